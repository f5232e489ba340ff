"""dkey and dvalue: a block holds keys and values and goes over the queries of all heads that see them.

Scores are computed transposed, keys along rows, so that weights and score gradients are left operands of the next
products without leaving their registers: with q, k, v, do tiles of query, key, value and dout,

    s = k @ q.T;  p = exp(s - lse);  dv += p @ do;  dp = v @ do.T;  ds = p * (dp - delta);  dk += ds @ q

Query heads that share a key head are summed in the accumulators; where there are few keys, blocks share a group's
heads, and their sums are added up behind. Source: Dao, "FlashAttention-2", 2023, https://arxiv.org/abs/2307.08691
"""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.ops.attention.backward_config import COLUMNS, WARPGROUP_ROWS, KeysConfig
from pallas_kernels.ops.attention.backward_tiles import (
    Tile,
    Visits,
    block_place,
    hidden,
    hides_steps,
    kept_scale,
    not_invariant,
)
from pallas_kernels.ops.attention.folded import Folds, row_places
from pallas_kernels.ops.attention.masking import TileRange
from pallas_kernels.ops.attention.problem import Problem
from pallas_kernels.ops.attention.row_tiles import TileForm, multiply_across, multiply_down
from pallas_kernels.primitives import settings
from pallas_kernels.primitives.platform import target_device
from pallas_kernels.primitives.random import mixed_words


def key_value_gradients(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    dout: jax.Array,
    rows: jax.Array,
    extras: Mapping[str, jax.Array],
    *,
    problem: Problem,
    form: TileForm,
    config: KeysConfig,
    folds: Folds | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Returns (dkey, dvalue), like key and value.

    Args:
        query, key, value, dout: in device memory.
        rows: of `rows_of`.
        extras: those that there are of "query_segments", "key_segments" (padded to whole tiles), "tiles" (with
            segments: (batch, tiles of keys, 4)), "words", "dense" (its last axes keys, queries).
        form: of their tiles.
        folds: how rows of the problem, which is folded, lie in query and dout; None: as they are.
    """
    batch, length = query.shape[:2]
    size = form.size
    masking = problem.masking
    blocks = pl.cdiv(masking.keys, config.columns)
    parts = config.parts
    own_heads = problem.group // parts
    lanes = batch * problem.key_heads * parts
    at_once = target_device().core_count
    copies = form.copies * (1 if folds is None else folds.heads_of(config.rows))

    def attention_backward_keys(query_ref, key_ref, value_ref, dout_ref, rows_ref, extras_refs, *refs):
        *gradients, scratch = refs
        dkey_ref, dvalue_ref = gradients if parts == 1 else (gradients[0].at[0], gradients[0].at[1])
        k, v, q, do = map(form.tiles, scratch[:4])
        qrows, held, full, empty, finished, *qsegments = scratch[4:]
        warpgroup = lax.axis_index("warpgroup")
        # Where attention is causal, the first keys are those that the most queries see.
        tile_index, lane = block_place(
            lax.axis_index("block"),
            tiles=blocks,
            lanes=lanes,
            lane_bytes=4 * own_heads * length * size,
            section_blocks=config.waves * at_once,
        )
        b, key_head, part = _lane_place(lane, problem.key_heads, parts)
        first_key = tile_index * config.columns
        if "tiles" in extras_refs:
            tiles = TileRange(*(extras_refs["tiles"][b, tile_index, i] for i in range(4)))
        else:
            tiles = masking.query_tiles(first_key, config.columns, config.rows)
        hides = hides_steps(problem, form, masking.queries, config.rows)
        visits = Visits(tiles=hidden(tiles) if hides else tiles)
        first_head = key_head * problem.group
        if part is not None:
            first_head = first_head + part * own_heads

        @pl.when(warpgroup == config.warpgroups)
        def _():
            plgpu.set_max_registers(config.memory_registers, action="decrease")
            own = (b, pl.ds(first_key, config.columns), key_head)
            k.bring(key_ref.at[own], held)
            v.bring(value_ref.at[own], held)

            def heads(count, tile_of, steps):
                def bring(i, carry):
                    head, step = carry
                    stage = lax.rem(step, config.stages)

                    @pl.when(step >= config.stages)
                    def _():
                        plgpu.barrier_wait(empty.at[stage])

                    row = tile_of(i) * config.rows
                    for place, own in row_places(b, row, head, config.rows, folds):
                        q.at(stage, rows=own).bring(query_ref.at[place], full.at[stage])
                        do.at(stage, rows=own).bring(dout_ref.at[place], full.at[stage])
                    rows_here = rows_ref.at[b, head, :, pl.ds(row, config.rows)]
                    plgpu.copy_gmem_to_smem(rows_here, qrows.at[stage], full.at[stage])
                    if qsegments:
                        numbers = extras_refs["query_segments"].at[b, pl.ds(row, config.rows)]
                        plgpu.copy_gmem_to_smem(numbers, qsegments[0].at[stage], full.at[stage])
                    return head, step + 1

                def one(g, step):
                    return lax.fori_loop(0, count, bring, (first_head + g, step))[1]

                return lax.fori_loop(0, own_heads, one, steps)

            steps = heads(visits.masked, visits.masked_tile, jnp.int32(0))
            steps = heads(visits.full, visits.full_tile, steps)

            # No barrier may be left with an arrival that nobody has seen.
            def drain(i, _):
                plgpu.barrier_wait(empty.at[lax.rem(i, config.stages)])

            lax.fori_loop(jnp.maximum(steps - config.stages, 0), steps, drain, None)

        def compute(makes_dkey: bool, makes_dvalue: bool, first: jax.Array | int):
            """Of the keys from `first` on in the block's tile."""
            shape = (WARPGROUP_ROWS, config.rows)
            words = mixed_words(extras_refs["words"]) if "words" in extras_refs else None
            own_segments = None
            if qsegments:
                own = extras_refs["key_segments"].at[b, pl.ds(first_key + first, WARPGROUP_ROWS)]
                own_segments = plgpu.load(own, layout=plgpu.Layout.WGMMA.reduce(1), optimized=False)

            def run(*accumulators):
                accumulators = list(accumulators)
                dk = accumulators.pop(0) if makes_dkey else None
                dv = accumulators.pop(0) if makes_dvalue else None

                def release(n):
                    plgpu.commit_smem()
                    plgpu.barrier_arrive(empty.at[lax.rem(n, config.stages)])

                def step(n, head, query_tile, is_masked):
                    stage = lax.rem(n, config.stages)
                    tile = Tile(
                        problem=problem,
                        query_axis=1,
                        shape=shape,
                        batch=b,
                        head=head,
                        row=query_tile * config.rows,
                        column=first_key + first,
                        extras=extras_refs,
                        words=words,
                        places=qrows.at[stage, 2],
                        segments=(own_segments, qsegments[0].at[stage]) if qsegments else None,
                    )
                    plgpu.barrier_wait(full.at[stage])

                    own = pl.ds(first + not_invariant(n) * WARPGROUP_ROWS, WARPGROUP_ROWS)
                    own_k, own_v = k.at(rows=own), v.at(rows=own)

                    def products(s, *others):
                        multiply_across(s, own_k, q.at(stage))
                        for dp in others:
                            multiply_across(dp, own_v, do.at(stage))
                        scores = plgpu.wgmma_accumulator_load(s, wait_n=len(others) * form.copies)
                        if config.overlaps:
                            pl.when(n > 0)(lambda: release(n - 1))
                        lse = plgpu.load(qrows.at[stage, 0], layout=tile.row_layout())
                        weights, slope = tile.weights(scores, lse, is_masked=is_masked)
                        weights = tile.marked(weights)
                        if dv is not None:
                            multiply_down(dv, tile.dropped(weights).astype(problem.dtype), do.at(stage))
                        for dp in others:
                            dweights = plgpu.wgmma_accumulator_load(dp, wait_n=0 if dv is None else form.copies)
                            delta = plgpu.load(qrows.at[stage, 1], layout=tile.row_layout())
                            dscores = tile.score_gradients(weights, dweights, delta)
                            dscores = dscores if slope is None else dscores * slope
                            assert dk is not None
                            multiply_down(dk, dscores.astype(problem.dtype), q.at(stage))
                        if not config.overlaps:
                            plgpu.wgmma_wait(0)
                            release(n)

                    count = 2 if makes_dkey else 1
                    pl.run_scoped(products, *[plgpu.WGMMAAccumulatorRef(shape, jnp.float32)] * count)

                masked_steps = own_heads * visits.masked

                def masked_step(n, _):
                    head = first_head + lax.div(n, visits.masked)
                    step(n, head, visits.masked_tile(lax.rem(n, visits.masked)), True)

                def full_step(n, _):
                    i = n - masked_steps
                    step(n, first_head + lax.div(i, visits.full), visits.full_tile(lax.rem(i, visits.full)), False)

                if not isinstance(visits.masked, int) or visits.masked:
                    lax.fori_loop(0, masked_steps, masked_step, None)
                steps = own_heads * (visits.masked + visits.full)
                lax.fori_loop(masked_steps, steps, full_step, None)
                results = [a[...] for a in (dk, dv) if a is not None]
                if config.overlaps:
                    pl.when(steps > 0)(lambda: release(steps - 1))
                return results

            count = makes_dkey + makes_dvalue
            results = pl.run_scoped(run, *[plgpu.WGMMAAccumulatorRef((WARPGROUP_ROWS, size), jnp.float32)] * count)
            if not config.shares_keys:
                # The other warpgroup may still multiply by what the result is about to overwrite.
                plgpu.barrier_arrive(finished)
                plgpu.barrier_wait(finished)
            place = (b, pl.ds(first_key + first, WARPGROUP_ROWS), key_head)
            place = place if part is None else (part, *place)
            own_k, own_v = (held_tile.at(rows=pl.ds(first, WARPGROUP_ROWS)) for held_tile in (k, v))
            if makes_dkey:
                own_k.store(results.pop(0) * problem.scale, width=COLUMNS)
            if makes_dvalue:
                own_v.store(results.pop(0) * kept_scale(problem), width=COLUMNS)
            plgpu.commit_smem()
            if makes_dkey:
                own_k.send(dkey_ref.at[place])
            if makes_dvalue:
                own_v.send(dvalue_ref.at[place])
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

        @pl.when(warpgroup < config.warpgroups)
        def _():
            plgpu.set_max_registers(config.compute_registers, action="increase")
            plgpu.barrier_wait(held)
            if config.shares_keys:
                compute(True, True, warpgroup * WARPGROUP_ROWS)
                return
            pl.when(warpgroup == 0)(lambda: compute(False, True, 0))
            pl.when(warpgroup == 1)(lambda: compute(True, False, 0))

    dtype = problem.dtype
    result = [jax.ShapeDtypeStruct(key.shape, dtype)] * 2
    if parts > 1:
        result = [jax.ShapeDtypeStruct((2, parts, *key.shape), dtype)]
    kernel = settings.kernel(
        attention_backward_keys,
        out_type=result,
        grid=(blocks * lanes,),
        grid_names=("block",),
        num_threads=config.warpgroups + 1,
        thread_name="warpgroup",
        scratch_types=(
            (
                *[form.scratch(config.columns)] * 2,
                *[form.scratch(config.stages, config.rows)] * 2,
                plgpu.SMEM((config.stages, 3, config.rows), jnp.float32),
                plgpu.Barrier(num_arrivals=2 * form.copies),
                plgpu.Barrier(num_arrivals=1 + 2 * copies + masking.has_segments, num_barriers=config.stages),
                plgpu.Barrier(num_arrivals=config.warpgroups, num_barriers=config.stages),
                plgpu.Barrier(num_arrivals=config.warpgroups),
                *([plgpu.SMEM((config.stages, config.rows), jnp.int32)] if masking.has_segments else []),
            ),
        ),
        compiler_params=plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=not config.automatic_barriers),
    )
    made = kernel(query, key, value, dout, rows, dict(extras))
    return (_added(made[0][0]), _added(made[0][1])) if parts > 1 else tuple(made)


def _lane_place(lane: jax.Array, key_heads: int, parts: int) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """(batch entry, key head, part of its group or None) of a lane."""
    part = None
    if parts > 1:
        lane, part = lax.div(lane, parts), lax.rem(lane, parts)
    return lax.div(lane, key_heads), lax.rem(lane, key_heads), part


def _added(parts: jax.Array) -> jax.Array:
    """The sum over the first axis, in float32 and then rounded: one elementwise kernel."""
    whole, *others = parts.astype(jnp.float32)
    for other in others:
        whole = whole + other
    return whole.astype(parts.dtype)
