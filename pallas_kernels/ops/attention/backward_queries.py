"""dquery: a block holds queries and goes over the keys that they see.

With q, k, v, do tiles of query, key, value and dout,

    s = q @ k.T;  p = exp(s - lse);  dp = do @ v.T;  ds = p * (dp - delta);  dq += ds @ k

where ds is a left operand that never leaves its registers. Scores are computed here once more instead of being added up
over blocks of the other kernel: results do not depend on the order in which blocks run.

What each query's row needs (`rows_of`) this kernel can make, too: a block has its queries' dout, and is brought their
output in the place of the first keys.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.ops.attention.backward_config import COLUMNS, WARPGROUP_ROWS, QueriesConfig
from pallas_kernels.ops.attention.backward_tiles import (
    Tile,
    Visits,
    block_place,
    hidden,
    hides_steps,
    not_invariant,
    row_sums,
)
from pallas_kernels.ops.attention.folded import Folds, row_places
from pallas_kernels.ops.attention.masking import TileRange
from pallas_kernels.ops.attention.problem import LOG2_E, Problem
from pallas_kernels.ops.attention.row_tiles import TileForm, multiply_across, multiply_down
from pallas_kernels.primitives import settings
from pallas_kernels.primitives.random import mixed_words


def query_gradients(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    dout: jax.Array,
    rows: jax.Array | tuple[jax.Array, jax.Array],
    extras: Mapping[str, jax.Array],
    *,
    problem: Problem,
    form: TileForm,
    config: QueriesConfig,
    makes_dbias: bool = False,
    numbers: int | None = None,
    folds: Folds | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """Returns dquery, like query; `rows_of`'s rows; and the gradients of all scores where they are asked for.

    Args:
        query, key, value, dout: in device memory.
        rows: of `rows_of`; or what the kernel makes them of: the output, like query, and the log-sum-exp, (batch,
            heads, queries padded to whole tiles).
        extras: those that there are of "query_segments", "key_segments" (padded to whole tiles), "tiles" (with
            segments: (batch, tiles of queries, 4)), "words", "dense"; and "places", the keys' numbers (padded, int32).
        form: of the tiles of query, key, value and dout.
        makes_dbias: whether to store (batch, heads, queries, keys), float32, both padded to whole tiles. No tile is
            skipped then.
        numbers: after so many queries their numbers begin anew, and these say what is seen under a causal mask. None:
            they are the queries' places.
        folds: how rows of the problem, which is folded, lie in query, dout and output; None: as they are.
    """
    batch, size, heads = query.shape[0], form.size, problem.heads
    masking = problem.masking
    blocks = pl.cdiv(masking.queries, config.rows)
    key_blocks = pl.cdiv(masking.keys, config.columns)
    lanes = batch * heads
    dtype = problem.dtype
    makes_rows = isinstance(rows, tuple)
    # Slots of the ring that the output of a block's queries takes.
    lead = pl.cdiv(config.rows, config.columns) if makes_rows else 0
    copies = form.copies * (1 if folds is None else folds.heads_of(WARPGROUP_ROWS))

    def attention_backward_queries(query_ref, key_ref, value_ref, dout_ref, rows_refs, extras_refs, dquery_ref, *refs):
        dbias_ref = refs[-2] if makes_dbias else None
        *tiles, held, full, empty, ksegments = refs[-1]
        q, do, ring = map(form.tiles, tiles)
        warpgroup = lax.axis_index("warpgroup")
        # Where attention is causal, the last queries are those that see the most keys.
        place, lane = block_place(
            lax.axis_index("block"),
            tiles=blocks,
            lanes=lanes,
            lane_bytes=-(-4 * key.shape[1] * size // problem.group),
        )
        tile_index = blocks - 1 - place
        b, head = lax.div(lane, heads), lax.rem(lane, heads)
        key_head = lax.div(head, problem.group)
        first_query = tile_index * config.rows
        if "tiles" in extras_refs:
            tiles = TileRange(*(extras_refs["tiles"][b, tile_index, i] for i in range(4)))
        else:
            tiles = masking.key_tiles(first_query, config.rows, config.columns)
        if makes_dbias:
            tiles = tiles._replace(first=0, last=key_blocks)
        hides = hides_steps(problem, form, masking.keys, config.columns)
        # With two steps, and two warpgroups' masks, a head size of 128 is large enough.
        hides |= masking.is_causal and size == 128 and key_blocks == 2 and config.warpgroups == 2
        visits = Visits(tiles=hidden(tiles) if hides else tiles)

        def out_of(i):
            """Where the output of a warpgroup's queries is."""
            row = i * WARPGROUP_ROWS
            slot, first = lax.div(row, config.columns), lax.rem(row, config.columns)
            return ring.at(slot, rows=pl.ds(first, WARPGROUP_ROWS))

        @pl.when(warpgroup == config.warpgroups)
        def _():
            plgpu.set_max_registers(config.memory_registers, action="decrease")
            for i in range(config.warpgroups):
                tiles_of = [(query_ref, q.at(i)), (dout_ref, do.at(i))]
                if makes_rows:
                    tiles_of.append((rows_refs[0], out_of(i)))
                for place, own in row_places(b, first_query + i * WARPGROUP_ROWS, head, WARPGROUP_ROWS, folds):
                    for ref, tile in tiles_of:
                        tile.part(own).bring(ref.at[place], held.at[i])

            def bring(tile_of):
                def step(i, n):
                    place = (b, pl.ds(tile_of(i) * config.columns, config.columns), key_head)
                    for ref in (key_ref, value_ref):
                        slot = lax.rem(n, config.slots)

                        @pl.when(n >= config.slots)
                        def _(slot=slot):
                            plgpu.barrier_wait(empty.at[slot])

                        ring.at(slot).bring(ref.at[place], full.at[slot])
                        if ksegments is not None:
                            # With values too, since a slot has now keys and now values.
                            numbers = extras_refs["key_segments"].at[place[0], place[1]]
                            plgpu.copy_gmem_to_smem(numbers, ksegments.at[slot], full.at[slot])
                        n = n + 1
                    return n

                return step

            n = lax.fori_loop(0, visits.masked, bring(visits.masked_tile), jnp.int32(lead))
            n = lax.fori_loop(0, visits.full, bring(visits.full_tile), n)

            # No barrier may be left with an arrival that nobody has seen.
            def drain(i, _):
                plgpu.barrier_wait(empty.at[lax.rem(i, config.slots)])

            lax.fori_loop(jnp.maximum(n - config.slots, 0), n, drain, None)

        @pl.when(warpgroup < config.warpgroups)
        def _():
            plgpu.set_max_registers(config.compute_registers, action="increase")
            first = first_query + warpgroup * WARPGROUP_ROWS
            shape = (WARPGROUP_ROWS, config.columns)
            words = mixed_words(extras_refs["words"]) if "words" in extras_refs else None
            vector = plgpu.Layout.WGMMA.reduce(1)
            place = (b, head, pl.ds(first, WARPGROUP_ROWS))

            def row_values(ref):
                return plgpu.load(ref, layout=vector, optimized=False)

            def row_numbers():
                """Of the queries, in the row layout."""
                if numbers == 1:  # a remainder by one folds to a constant, which has no layout to infer
                    return plgpu.layout_cast(jnp.zeros((WARPGROUP_ROWS,), jnp.int32), vector)
                number = plgpu.broadcasted_iota(jnp.int32, (WARPGROUP_ROWS,), 0, layout=vector) + first
                return number if numbers is None else lax.rem(number, numbers)

            def made_rows():
                """lse in base 2 and delta; and the rows are in device memory for the other kernel."""
                lse = row_values(rows_refs[1].at[place]) * LOG2_E
                plgpu.barrier_wait(held.at[warpgroup])
                delta = row_sums(out_of(warpgroup), do.at(warpgroup))
                # What TMA writes there next must come after these reads.
                plgpu.commit_smem()
                for i in range(lead):
                    plgpu.barrier_arrive(empty.at[i])
                for i, line in enumerate((lse, delta, row_numbers().astype(jnp.float32))):
                    refs[0].at[b, head, i, pl.ds(first, WARPGROUP_ROWS)][...] = line
                return lax.optimization_barrier((lse, delta))

            def given_rows():
                lse, delta = (row_values(rows_refs.at[b, head, i, pl.ds(first, WARPGROUP_ROWS)]) for i in (0, 1))
                plgpu.barrier_wait(held.at[warpgroup])
                return lse, delta

            lse, delta = made_rows() if makes_rows else given_rows()
            own_numbers = None if numbers is None else row_numbers()
            own_segments = None
            if ksegments is not None:
                own_segments = row_values(extras_refs["query_segments"].at[b, pl.ds(first, WARPGROUP_ROWS)])

            def run(dq):
                def slots_of(n):
                    return (lax.rem(lead + 2 * n + i, config.slots) for i in (0, 1))

                def release(n):
                    if ksegments is not None:
                        plgpu.commit_smem()  # threads have read what TMA writes next
                    plgpu.barrier_arrive(empty.at[lax.rem(lead + 2 * n, config.slots)])

                def step(n, key_tile, is_masked):
                    k_slot, v_slot = slots_of(n)
                    tile = Tile(
                        problem=problem,
                        query_axis=0,
                        shape=shape,
                        batch=b,
                        head=head,
                        row=first,
                        column=key_tile * config.columns,
                        extras=extras_refs,
                        words=words,
                        places=extras_refs["places"].at[pl.ds(key_tile * config.columns, config.columns)],
                        numbers=own_numbers,
                        segments=None if ksegments is None else (own_segments, ksegments.at[k_slot]),
                    )

                    own = warpgroup + not_invariant(n)
                    own_q, own_do = q.at(own), do.at(own)

                    def products(s, dp):
                        plgpu.barrier_wait(full.at[k_slot])
                        multiply_across(s, own_q, ring.at(k_slot))
                        plgpu.barrier_wait(full.at[v_slot])
                        multiply_across(dp, own_do, ring.at(v_slot))
                        scores = plgpu.wgmma_accumulator_load(s, wait_n=form.copies)
                        if config.overlaps:
                            pl.when(n > 0)(lambda: release(n - 1))
                        weights, slope = tile.weights(scores, lse, is_masked=is_masked)
                        weights = tile.marked(weights)
                        dweights = plgpu.wgmma_accumulator_load(dp, wait_n=0)
                        plgpu.barrier_arrive(empty.at[v_slot])
                        dscores = tile.score_gradients(weights, dweights, delta)
                        if dbias_ref is not None:
                            place = (b, head, pl.ds(first, shape[0]), pl.ds(tile.column, shape[1]))
                            dbias_ref[place] = dscores
                        dscores = dscores if slope is None else dscores * slope
                        multiply_down(dq, dscores.astype(dtype), ring.at(k_slot))
                        if not config.overlaps:
                            plgpu.wgmma_wait(0)
                            release(n)

                    pl.run_scoped(products, *[plgpu.WGMMAAccumulatorRef(shape, jnp.float32)] * 2)

                if not isinstance(visits.masked, int) or visits.masked:
                    lax.fori_loop(0, visits.masked, lambda n, _: step(n, visits.masked_tile(n), True), None)
                steps = visits.masked + visits.full
                lax.fori_loop(
                    visits.masked,
                    steps,
                    lambda n, _: step(n, visits.full_tile(n - visits.masked), False),
                    None,
                )
                result = dq[...]
                if config.overlaps:
                    pl.when(steps > 0)(lambda: release(steps - 1))
                return result

            dq = pl.run_scoped(run, plgpu.WGMMAAccumulatorRef((WARPGROUP_ROWS, size), jnp.float32))
            own_q = q.at(warpgroup)
            if not config.automatic_barriers:
                plgpu.commit_smem()  # all of its warps have read
            own_q.store(dq * problem.scale, width=COLUMNS)
            plgpu.commit_smem()
            for place, own in row_places(b, first, head, WARPGROUP_ROWS, folds):
                own_q.part(own).send(dquery_ref.at[place])
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    out_type = [jax.ShapeDtypeStruct(query.shape, dtype)]
    if makes_rows:
        out_type.append(jax.ShapeDtypeStruct((batch, heads, 3, blocks * config.rows), jnp.float32))
    if makes_dbias:
        shape = (batch, heads, blocks * config.rows, key_blocks * config.columns)
        out_type.append(jax.ShapeDtypeStruct(shape, jnp.float32))
    params = plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=not config.automatic_barriers)
    if masking.has_segments:
        params = replace(params, reduction_scratch_bytes=0)  # there is no room, and no sum across warps
    kernel = settings.kernel(
        attention_backward_queries,
        out_type=out_type,
        grid=(blocks * lanes,),
        grid_names=("block",),
        num_threads=config.warpgroups + 1,
        thread_name="warpgroup",
        scratch_types=(
            (
                *[form.scratch(config.warpgroups, WARPGROUP_ROWS)] * 2,
                form.scratch(config.slots, config.columns),
                plgpu.Barrier(num_arrivals=(3 if makes_rows else 2) * copies, num_barriers=config.warpgroups),
                plgpu.Barrier(num_arrivals=form.copies + masking.has_segments, num_barriers=config.slots),
                plgpu.Barrier(num_arrivals=config.warpgroups, num_barriers=config.slots),
                plgpu.SMEM((config.slots, config.columns), jnp.int32) if masking.has_segments else None,
            ),
        ),
        compiler_params=params,
    )
    dquery, *others = kernel(query, key, value, dout, rows, dict(extras))
    made = others.pop(0) if isinstance(rows, tuple) else rows
    return dquery, made, others[0] if others else None
