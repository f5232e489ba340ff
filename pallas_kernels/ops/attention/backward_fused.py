"""dquery, dkey and dvalue in one kernel, which computes scores once: five products a tile instead of seven.

A block works as in `backward_keys`, and multiplies its score gradients by its keys besides. That product is the block's
share of dquery, which the warpgroup that brings queries adds to a float32 array in device memory, by TMA. The blocks
that share queries do so in the order of their keys, each one waiting for the one before it: sums come out the same
whatever the order in which blocks run. The first one stores its share, so that nothing need be set to zero before; the
last one stores no sum, but dquery, or other blocks make it of the sums (`backward_finish`). A block goes over queries
from the last one down, as do those that it waits for, which were all launched before it: so the first of the running
blocks never waits, and none waits for ever.

Sources: the backward pass of Shah et al., "FlashAttention-3", 2024, https://arxiv.org/abs/2407.08608; queries from the
last one down: Qiang et al., "DASH: Deterministic Attention Scheduling", 2026, https://arxiv.org/abs/2601.21824
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.ops.attention.backward_batch import by_batch
from pallas_kernels.ops.attention.backward_config import WARPGROUP_ROWS, FusedConfig
from pallas_kernels.ops.attention.backward_finish import Finishers
from pallas_kernels.ops.attention.backward_steps import Steps
from pallas_kernels.ops.attention.backward_tiles import (
    Tile,
    Visits,
    block_place,
    kept_scale,
    not_invariant,
    store_columns,
)
from pallas_kernels.ops.attention.problem import Problem
from pallas_kernels.primitives.gemm.shared import shared
from pallas_kernels.primitives.platform import target_device
from pallas_kernels.primitives.random import mixed_words

ROWS = {64: 128, 128: 64}
"""Queries a step, by head size: as many as there are registers for."""
_WARPGROUPS = 2
COLUMNS = _WARPGROUPS * WARPGROUP_ROWS
"""Keys of a block."""
_PART = 64
"""Rows and columns of what one warpgroup makes of a step's dquery: half the rows, or half the columns."""


def fused_gradients(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    dout: jax.Array,
    rows: jax.Array,
    extras: Mapping[str, jax.Array],
    *,
    problem: Problem,
    config: FusedConfig,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns (dquery, dkey, dvalue), like query, key and value; dquery may have more queries, which say nothing.

    Copies under `jax.vmap` run as one launch, with which they share no turns.

    Args:
        query, key, value, dout: lengths in multiples of 8, head size 64 or 128.
        rows: of `rows_of`.
        extras: those that there are of "words" and "dense" (its last axes keys, queries). No segments.
    """
    return by_batch(partial(_launch, config=config), problem, (query, key, value, dout, rows), extras)


def _launch(
    problem: Problem, operands: tuple[jax.Array, ...], extras: Mapping[str, jax.Array], *, config: FusedConfig
) -> tuple[jax.Array, jax.Array, jax.Array]:
    query, key, value, dout, rows = operands
    batch, _, heads, size = query.shape
    masking = problem.masking
    blocks = pl.cdiv(masking.keys, COLUMNS)
    step_rows = ROWS[size]
    splits_rows = step_rows > _PART
    query_tiles = pl.cdiv(masking.queries, step_rows)
    lanes = batch * problem.key_heads
    at_once = target_device().core_count
    dtype = problem.dtype
    # Numbers of queries, for masks: with a head size of 64 there is no room for them in shared memory.
    lines = 3 if size == 128 else 2
    # ptxas spills otherwise.
    keeps_apart = config.loads_apart and size == 128
    finishers = None
    if config.finishers:
        finishers = Finishers(
            masking=masking,
            batch=batch,
            heads=heads,
            rows=step_rows,
            columns=COLUMNS,
            warpgroups=_WARPGROUPS,
            slots=config.shares,
        )

    def part_of(ref, b, head, query_tile, i):
        """What warpgroup i makes of a tile of queries' dquery."""
        row, column = (i * _PART, 0) if splits_rows else (0, i * _PART)
        return ref.at[b, pl.ds(query_tile * step_rows + row, _PART), head, pl.ds(column, _PART)]

    def sum_of(ref, b, head, query_tile, i):
        """Where that is summed."""
        return ref.at[b, head, query_tile, i] if config.tiled_sums else part_of(ref, b, head, query_tile, i)

    def attention_backward_fused(query_ref, key_ref, value_ref, dout_ref, rows_ref, extras_refs, *outputs):
        dquery_ref, dkey_ref, dvalue_ref, sums_ref, scratch = outputs
        (k, v, q, do, qrows, ds, share), (held, full, empty, met, made, taken, fetched) = scratch
        warpgroup = lax.axis_index("warpgroup")
        block = lax.axis_index("block")
        tile_index, lane = block_place(
            block,
            tiles=blocks,
            lanes=lanes,
            # Queries and their cotangents, and the sums in float32.
            lane_bytes=8 * problem.group * query.shape[1] * size,
            section_blocks=config.waves * at_once,
        )
        b, key_head = lax.div(lane, problem.key_heads), lax.rem(lane, problem.key_heads)
        if keeps_apart:
            tile_index, b, key_head = lax.optimization_barrier((tile_index, b, key_head))
        first_key = tile_index * COLUMNS
        visits = Visits(tiles=masking.query_tiles(first_key, COLUMNS, step_rows))
        walk = Steps(
            visits=visits,
            first_head=key_head * problem.group,
            group=problem.group,
            heads_inside=config.heads_inside,
        )
        full_steps, steps = walk.full, walk.count
        turns = pl.get_global(plgpu.SemaphoreType.REGULAR((batch * heads * query_tiles,)))

        def is_last_of(query_tile, is_masked):
            """Whether no block adds to a tile of queries after this one, which then makes dquery of it."""
            if config.finishers:
                return False
            if masking.right is None:
                return tile_index == blocks - 1
            if masking.right == 0 and masking.queries <= masking.keys and masking.keys % COLUMNS == 0:
                # Known where the program is made: registers are short.
                return is_masked
            return tile_index == masking.key_tiles(query_tile * step_rows, step_rows, COLUMNS).last - 1

        def bring_and_add():
            own = (b, pl.ds(first_key, COLUMNS), key_head)
            plgpu.copy_gmem_to_smem(key_ref.at[own], k, held)
            plgpu.copy_gmem_to_smem(value_ref.at[own], v, held)

            def bring(n):
                stage = lax.rem(n, config.stages)
                head, query_tile = walk.place(n)
                place = pl.ds(query_tile * step_rows, step_rows)
                plgpu.copy_gmem_to_smem(query_ref.at[b, place, head], q.at[stage], full.at[stage])
                plgpu.copy_gmem_to_smem(dout_ref.at[b, place, head], do.at[stage], full.at[stage])
                plgpu.copy_gmem_to_smem(rows_ref.at[b, head, pl.ds(0, lines), place], qrows.at[stage], full.at[stage])

            def bring_all():
                def one(n, _):
                    pl.when(n >= config.stages)(lambda: plgpu.barrier_wait(empty.at[lax.rem(n, config.stages)]))
                    bring(n)

                # No barrier may be left with an arrival that nobody has seen.
                def drain(n, _):
                    plgpu.barrier_wait(empty.at[lax.rem(n, config.stages)])

                lax.fori_loop(0, steps, one, None)
                lax.fori_loop(jnp.maximum(steps - config.stages, 0), steps, drain, None)

            if not config.loads_apart:
                lax.fori_loop(0, jnp.minimum(steps, config.stages), lambda n, _: bring(n), None)

            def step(n, _):
                stage, slot = lax.rem(n, config.stages), lax.rem(n, config.shares)
                head, query_tile = walk.place(n)
                turn = (b * heads + head) * query_tiles + query_tile
                sums = [sum_of(sums_ref, b, head, query_tile, i) for i in range(_WARPGROUPS)]
                is_last = jnp.asarray(is_last_of(query_tile, n >= full_steps))

                def await_turn():
                    # The tiles of keys that a tile of queries sees begin with the first.
                    plgpu.semaphore_wait(turns.at[turn], tile_index, decrement=False, memory_scope="gpu")

                def fetch():
                    # While this step's products are under way.
                    await_turn()
                    for i in range(_WARPGROUPS):
                        plgpu.copy_gmem_to_smem(sums[i], share.at[slot, i], fetched)

                if not config.finishers:
                    pl.when(is_last & (tile_index > 0))(fetch)
                if not config.loads_apart:
                    plgpu.barrier_wait(empty.at[stage])
                    pl.when(n + config.stages < steps)(lambda: bring(n + config.stages))
                plgpu.barrier_wait(made.at[slot])

                def put(reduction=None):
                    for i in range(_WARPGROUPS):
                        plgpu.copy_smem_to_gmem(share.at[slot, i], sums[i], reduction_op=reduction)

                def give():
                    await_turn()
                    pl.when(tile_index == 0)(put)
                    pl.when(tile_index > 0)(lambda: put("add"))
                    # All is there, not only read.
                    plgpu.wait_smem_to_gmem(0)

                lax.cond(is_last, lambda: None, give) if not config.finishers else give()
                plgpu.semaphore_signal(turns.at[turn], memory_scope="gpu")
                plgpu.barrier_arrive(taken.at[slot])

            if not config.loads_apart:
                lax.fori_loop(0, steps, step, None)
                return

            @plgpu.warp_map
            def _(warp):
                pl.when(warp == 0)(bring_all)
                pl.when(warp == 1)(lambda: lax.fori_loop(0, steps, step, None))

        def compute():
            plgpu.barrier_wait(held)
            first = warpgroup * WARPGROUP_ROWS
            words = mixed_words(extras_refs["words"]) if "words" in extras_refs else None

            def run(dk, dv):
                def step(n, is_masked):
                    stage = lax.rem(n, config.stages)
                    head, query_tile = walk.place(n, is_masked)
                    # Of queries: scores of one part after the other, for want of registers.
                    parts = 2 if splits_rows and (config.halves or is_masked) else 1
                    width = step_rows // parts
                    plgpu.barrier_wait(full.at[stage])
                    again = not_invariant(n) * WARPGROUP_ROWS
                    own = pl.ds(first + again, WARPGROUP_ROWS)
                    both_ds = ds.at[lax.rem(n, 2)]

                    def score_gradients(i, s, dp):
                        own_rows, row = pl.ds(i * width, width), query_tile * step_rows + i * width
                        plgpu.wgmma(s, k.at[own], q.at[stage, own_rows].transpose((1, 0)))
                        plgpu.wgmma(dp, v.at[own], do.at[stage, own_rows].transpose((1, 0)))
                        tile = Tile(
                            problem=problem,
                            query_axis=1,
                            shape=(WARPGROUP_ROWS, width),
                            batch=b,
                            head=head,
                            row=row,
                            column=first_key + first,
                            extras=extras_refs,
                            words=words,
                            places=qrows.at[stage, 2] if lines == 3 else rows_ref.at[b, head, 2, pl.ds(row, width)],
                        )
                        scores = plgpu.wgmma_accumulator_load(s, wait_n=1)
                        lse = plgpu.load(qrows.at[stage, 0, own_rows], layout=tile.row_layout())
                        weights, slope = tile.weights(scores, lse, is_masked=is_masked)
                        weights = tile.marked(weights)
                        plgpu.wgmma(dv, tile.dropped(weights).astype(dtype), do.at[stage, own_rows])
                        dweights = plgpu.wgmma_accumulator_load(dp, wait_n=1)
                        delta = plgpu.load(qrows.at[stage, 1, own_rows], layout=tile.row_layout())
                        dscores = tile.score_gradients(weights, dweights, delta)
                        narrow = (dscores if slope is None else dscores * slope).astype(dtype)
                        if not config.dquery_first:
                            plgpu.wgmma(dk, narrow, q.at[stage, own_rows])
                        both_ds.at[pl.ds(first, WARPGROUP_ROWS), own_rows][...] = narrow
                        return narrow if config.dquery_first else None

                    accumulators = [plgpu.WGMMAAccumulatorRef((WARPGROUP_ROWS, width), jnp.float32)] * 2
                    narrows = [pl.run_scoped(partial(score_gradients, i), *accumulators) for i in range(parts)]
                    plgpu.commit_smem()
                    plgpu.barrier_arrive(met)
                    plgpu.barrier_wait(met)

                    def add(dq):
                        half = pl.ds(warpgroup * _PART, _PART)
                        own_ds = both_ds.at[:, half] if splits_rows else both_ds
                        keys = pl.ds(again, COLUMNS)
                        plgpu.wgmma(dq, own_ds.transpose((1, 0)), k.at[keys] if splits_rows else k.at[keys, half])
                        if config.dquery_first:
                            for i, narrow in enumerate(narrows):
                                plgpu.wgmma(dk, narrow, q.at[stage, pl.ds(i * width, width)])
                            values = plgpu.wgmma_accumulator_load(dq, wait_n=parts)
                        else:
                            values = dq[...]
                            plgpu.commit_smem()
                            plgpu.barrier_arrive(empty.at[stage])
                        slot = lax.rem(n, config.shares)
                        pl.when(n >= config.shares)(lambda: plgpu.barrier_wait(taken.at[slot]))

                        def give():
                            share.at[slot, warpgroup][...] = values

                        def finish():
                            pl.when(tile_index == 0)(lambda: store(values))
                            pl.when(tile_index > 0)(lambda: store(with_others(values)))

                        def with_others(values):
                            plgpu.barrier_wait(fetched)
                            return values + share.at[slot, warpgroup][...]

                        def store(total):
                            part_of(dquery_ref, b, head, query_tile, warpgroup)[...] = (total * problem.scale).astype(
                                dtype
                            )

                        is_last = is_last_of(query_tile, is_masked)
                        pl.when(not is_last if isinstance(is_last, bool) else ~is_last)(give)
                        pl.when(is_last)(finish)
                        plgpu.commit_smem()
                        plgpu.barrier_arrive(made.at[slot])
                        if config.dquery_first:
                            plgpu.wgmma_wait(0)
                            plgpu.barrier_arrive(empty.at[stage])

                    pl.run_scoped(add, plgpu.WGMMAAccumulatorRef((_PART, _PART), jnp.float32))

                lax.fori_loop(0, full_steps, lambda n, _: step(n, False), None)
                if not isinstance(visits.masked, int) or visits.masked:
                    lax.fori_loop(full_steps, steps, lambda n, _: step(n, True), None)
                for i in range(config.shares):
                    pl.when(steps > i)(lambda i=i: plgpu.barrier_wait(taken.at[lax.rem(steps - 1 - i, config.shares)]))
                return dk[...], dv[...]

            dk, dv = pl.run_scoped(run, *[plgpu.WGMMAAccumulatorRef((WARPGROUP_ROWS, size), jnp.float32)] * 2)
            own = pl.ds(first, WARPGROUP_ROWS)
            # All products with k were done when the last share was taken.
            store_columns(k.at[own], dk * problem.scale)
            store_columns(v.at[own], dv * kept_scale(problem))
            plgpu.commit_smem()
            place = (b, pl.ds(first_key + first, WARPGROUP_ROWS), key_head)
            plgpu.copy_smem_to_gmem(k.at[own], dkey_ref.at[place])
            plgpu.copy_smem_to_gmem(v.at[own], dvalue_ref.at[place])
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

        def fetch_sums(finishers):
            finishers.bring(block - blocks * lanes, sum_of, sums_ref, share, turns, fetched, made)

        def finish_sums(finishers):
            half = pl.ds(warpgroup * _PART, _PART)

            def room(slot):
                return q.at[slot, half] if splits_rows else ds.at[slot, half]

            finishers.finish(
                block - blocks * lanes,
                part_of,
                dquery_ref,
                share,
                room,
                fetched,
                made,
                warpgroup=warpgroup,
                scale=problem.scale,
            )

        def either(adds, finishes):
            if finishers is None:
                adds()
                return
            pl.when(block < blocks * lanes)(adds)
            pl.when(block >= blocks * lanes)(partial(finishes, finishers))

        def memory_role():
            plgpu.set_max_registers(config.memory_registers, action="decrease")
            either(bring_and_add, fetch_sums)

        def compute_role():
            plgpu.set_max_registers(config.compute_registers, action="increase")
            either(compute, finish_sums)

        roles = [(warpgroup == _WARPGROUPS, memory_role), (warpgroup < _WARPGROUPS, compute_role)]
        for is_own, role in reversed(roles) if keeps_apart else roles:
            pl.when(is_own)(role)

    # Whole tiles of dquery: threads store them, who do not stop at the last query as TMA does.
    whole = jax.ShapeDtypeStruct((batch, query_tiles * step_rows, heads, size), dtype)
    sums_shape = (batch, heads, query_tiles, _WARPGROUPS, _PART, _PART) if config.tiled_sums else query.shape
    kernel = plgpu.kernel(
        attention_backward_fused,
        out_type=[
            whole,
            *(jax.ShapeDtypeStruct(array.shape, dtype) for array in (key, value)),
            jax.ShapeDtypeStruct(sums_shape, jnp.float32),
        ],
        grid=(blocks * lanes + (finishers.blocks if finishers else 0),),
        grid_names=("block",),
        num_threads=_WARPGROUPS + 1,
        thread_name="warpgroup",
        scratch_types=(
            (
                (
                    shared((COLUMNS, size), dtype),
                    shared((COLUMNS, size), dtype),
                    shared((config.stages, step_rows, size), dtype),
                    shared((config.stages, step_rows, size), dtype),
                    plgpu.SMEM((config.stages, lines, step_rows), jnp.float32),
                    shared((2, COLUMNS, step_rows), dtype),
                    shared((config.shares, _WARPGROUPS, _PART, _PART), jnp.float32),
                ),
                (
                    plgpu.Barrier(num_arrivals=2),
                    plgpu.Barrier(num_arrivals=3, num_barriers=config.stages),
                    plgpu.Barrier(num_arrivals=_WARPGROUPS, num_barriers=config.stages),
                    plgpu.Barrier(num_arrivals=_WARPGROUPS),
                    plgpu.Barrier(num_arrivals=_WARPGROUPS, num_barriers=config.shares),
                    plgpu.Barrier(num_barriers=config.shares),
                    plgpu.Barrier(num_arrivals=_WARPGROUPS, num_barriers=config.shares if finishers else 1),
                ),
            ),
        ),
        compiler_params=plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=not config.automatic_barriers),
    )
    dquery, dkey, dvalue, _ = kernel(query, key, value, dout, rows, dict(extras))
    return dquery, dkey, dvalue
