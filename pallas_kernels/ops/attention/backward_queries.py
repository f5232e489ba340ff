"""dquery: a block holds queries and goes over the keys that they see.

With q, k, v, do tiles of query, key, value and dout,

    s = q @ k.T;  p = exp(s - lse);  dp = do @ v.T;  ds = p * (dp - delta);  dq += ds @ k

where ds is a left operand that never leaves its registers. Scores are computed here once more instead of being added up
over blocks of the other kernel: results do not depend on the order in which blocks run.
"""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.ops.attention.backward_config import WARPGROUP_ROWS, QueriesConfig
from pallas_kernels.ops.attention.backward_tiles import Tile, Visits, block_place, not_invariant, store_columns
from pallas_kernels.ops.attention.masking import TileRange
from pallas_kernels.ops.attention.problem import Problem
from pallas_kernels.primitives import settings
from pallas_kernels.primitives.gemm.shared import shared
from pallas_kernels.primitives.random import mixed_words


def query_gradients(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    dout: jax.Array,
    rows: jax.Array,
    extras: Mapping[str, jax.Array],
    *,
    problem: Problem,
    config: QueriesConfig,
    makes_dbias: bool = False,
    by_number: bool = False,
) -> tuple[jax.Array, jax.Array | None]:
    """Returns dquery, like query, and the gradients of all scores where they are asked for.

    Args:
        query, key, value, dout: lengths in multiples of 8, head size in multiples of 64.
        rows: of `rows_of`.
        extras: those that there are of "query_segments", "key_segments" (padded to whole tiles), "tiles" (with
            segments: (batch, tiles of queries, 4)), "words", "dense"; and "places", the keys' numbers (padded, int32).
        makes_dbias: whether to store (batch, heads, queries, keys), float32, both padded to whole tiles. No tile is
            skipped then.
        by_number: whether the third line of `rows` says what a query sees under a causal mask, and not its place.
    """
    batch, _, heads, size = query.shape
    masking = problem.masking
    blocks = pl.cdiv(masking.queries, config.rows)
    key_blocks = pl.cdiv(masking.keys, config.columns)
    lanes = batch * heads
    dtype = problem.dtype

    def attention_backward_queries(query_ref, key_ref, value_ref, dout_ref, rows_ref, extras_refs, dquery_ref, *refs):
        dbias_ref = refs[0] if makes_dbias else None
        q, do, ring, held, full, empty = refs[-1]
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
        visits = Visits(tiles=tiles)

        @pl.when(warpgroup == config.warpgroups)
        def _():
            plgpu.set_max_registers(config.memory_registers, action="decrease")
            for i in range(config.warpgroups):
                place = (b, pl.ds(first_query + i * WARPGROUP_ROWS, WARPGROUP_ROWS), head)
                plgpu.copy_gmem_to_smem(query_ref.at[place], q.at[i], held.at[i])
                plgpu.copy_gmem_to_smem(dout_ref.at[place], do.at[i], held.at[i])

            def bring(tile_of, before):
                def step(i, n):
                    place = (b, pl.ds(tile_of(i) * config.columns, config.columns), key_head)
                    for ref in (key_ref, value_ref):
                        slot = lax.rem(n, config.slots)

                        @pl.when(n >= config.slots)
                        def _(slot=slot):
                            plgpu.barrier_wait(empty.at[slot])

                        plgpu.copy_gmem_to_smem(ref.at[place], ring.at[slot], full.at[slot])
                        n = n + 1
                    return n

                return step

            n = lax.fori_loop(0, visits.masked, bring(visits.masked_tile, 0), jnp.int32(0))
            n = lax.fori_loop(0, visits.full, bring(visits.full_tile, 0), n)

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
            lse, delta = (
                plgpu.load(rows_ref.at[b, head, i, pl.ds(first, WARPGROUP_ROWS)], layout=vector, optimized=False)
                for i in (0, 1)
            )
            numbers = None
            if by_number:
                place = (b, head, 2, pl.ds(first, WARPGROUP_ROWS))
                numbers = plgpu.load(rows_ref.at[place], layout=vector, optimized=False).astype(jnp.int32)
            plgpu.barrier_wait(held.at[warpgroup])

            def run(dq):
                def release(n):
                    plgpu.barrier_arrive(empty.at[lax.rem(2 * n, config.slots)])

                def step(n, key_tile, is_masked):
                    k_slot, v_slot = lax.rem(2 * n, config.slots), lax.rem(2 * n + 1, config.slots)
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
                        numbers=numbers,
                    )

                    own = warpgroup + not_invariant(n)
                    own_q, own_do = q.at[own], do.at[own]

                    def products(s, dp):
                        plgpu.barrier_wait(full.at[k_slot])
                        plgpu.wgmma(s, own_q, ring.at[k_slot].transpose((1, 0)))
                        plgpu.barrier_wait(full.at[v_slot])
                        plgpu.wgmma(dp, own_do, ring.at[v_slot].transpose((1, 0)))
                        scores = plgpu.wgmma_accumulator_load(s, wait_n=1)
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
                        plgpu.wgmma(dq, dscores.astype(dtype), ring.at[k_slot])
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
            own_q = q.at[warpgroup]
            store_columns(own_q, dq * problem.scale)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(own_q, dquery_ref.at[b, pl.ds(first, WARPGROUP_ROWS), head])
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    out_type = [jax.ShapeDtypeStruct(query.shape, dtype)]
    if makes_dbias:
        shape = (batch, heads, blocks * config.rows, key_blocks * config.columns)
        out_type.append(jax.ShapeDtypeStruct(shape, jnp.float32))
    kernel = settings.kernel(
        attention_backward_queries,
        out_type=out_type,
        grid=(blocks * lanes,),
        grid_names=("block",),
        num_threads=config.warpgroups + 1,
        thread_name="warpgroup",
        scratch_types=(
            (
                shared((config.warpgroups, WARPGROUP_ROWS, size), dtype),
                shared((config.warpgroups, WARPGROUP_ROWS, size), dtype),
                shared((config.slots, config.columns, size), dtype),
                plgpu.Barrier(num_arrivals=2, num_barriers=config.warpgroups),
                plgpu.Barrier(num_barriers=config.slots),
                plgpu.Barrier(num_arrivals=config.warpgroups, num_barriers=config.slots),
            ),
        ),
        compiler_params=plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=not config.automatic_barriers),
    )
    dquery, *others = kernel(query, key, value, dout, rows, dict(extras))
    return dquery, others[0] if others else None
