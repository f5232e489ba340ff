"""The kernel by keys: a block holds keys and values, and loops over the queries that see them.

Scores are computed transposed, keys along rows, so that weights and score gradients are left operands of the next
products without leaving their registers: with q, k, v, do tiles of query, key, value and dout,

    s = k @ q.T;  p = exp(s - lse);  dv += p @ do;  dp = v @ do.T;  ds = p * (dp - delta);  dk += ds @ q

The accumulators sum over the query heads that share a key head. Where there are few keys, several blocks share those
heads, and XLA adds up their sums. The kernel can also add up dquery, see `shares`: five products a tile instead of the
seven of two kernels.

Source: Dao, "FlashAttention-2", 2023, https://arxiv.org/abs/2307.08691
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.ops.attention.backward import shares
from pallas_kernels.ops.attention.backward.config import WARPGROUP_ROWS, WARPGROUPS, KeysConfig, columns_at_once
from pallas_kernels.ops.attention.backward.keys_launch import Block, Launch
from pallas_kernels.ops.attention.backward.tiles import Inputs, Tile, added, counted
from pallas_kernels.ops.attention.launch import (
    MORE_FOR_PRODUCER,
    REGISTERS,
    Lane,
    block_kernel,
    not_invariant,
    run_roles,
)
from pallas_kernels.ops.attention.problem import Problem
from pallas_kernels.primitives.barriers import drain, meet
from pallas_kernels.primitives.row_tiles import multiply_across, multiply_down

Gradients = tuple[jax.Array, ...]


def produce(block: Block) -> None:
    """Loads the key tile and then the queries that see it; adds the shares of dquery to their sums."""
    launch, scratch, stages = block.launch, block.scratch, block.launch.config.stages
    lane = block.lane
    if launch.config.parts > 1:
        lane = Lane(lane.batch, lax.div(lane.head, launch.config.parts))
    place = lane.rows(block.first_key, launch.config.columns)
    scratch.k.load_async(block.inputs.key.at[place], scratch.held)
    scratch.v.load_async(block.inputs.value.at[place], scratch.held)

    def load_all():
        def one(n, _):
            pl.when(n >= stages)(lambda: plgpu.barrier_wait(scratch.empty.at[lax.rem(n, stages)]))
            load_queries(block, n)

        lax.fori_loop(0, counted(launch.problem, block.steps), one, None)
        drain(scratch.empty, stages, block.steps)

    if launch.adds:
        shares.produce(block, load_all, partial(load_queries, block))
    else:
        load_all()


def load_queries(block: Block, n: Any) -> None:
    """Loads the n-th step's queries, with dout, rows and segments."""
    inputs, scratch, launch, batch = block.inputs, block.scratch, block.launch, block.lane.batch
    stage = lax.rem(n, launch.config.stages)
    full = scratch.full.at[stage]
    head, query_tile = block.queries(n)
    place = pl.ds(query_tile * launch.config.rows, launch.config.rows)
    scratch.q.at(stage).load_async(inputs.query.at[batch, place, head], full)
    scratch.do.at(stage).load_async(inputs.dout.at[batch, place, head], full)
    rows = inputs.rows.at[batch, head, pl.ds(0, launch.lines), place]
    plgpu.copy_gmem_to_smem(rows, scratch.rows.at[stage], full)
    if scratch.query_segments is not None:
        numbers = inputs.extras["query_segments"].at[batch, place]
        plgpu.copy_gmem_to_smem(numbers, scratch.query_segments.at[stage], full)


def consume(block: Block, warpgroup: Any, *, has_dkey: bool = True, has_dvalue: bool = True) -> None:
    """Computes and stores dkey, dvalue or both of a warpgroup's 64 keys, and its half of the block's shares."""
    launch, scratch, inputs = block.launch, block.scratch, block.inputs
    problem, config = launch.problem, launch.config
    form, value_form = problem.forms
    plgpu.barrier_wait(scratch.held)

    def first() -> Any:
        """The warpgroup's first key in the block, computed at each use: LLVM compiles a captured value differently."""
        return warpgroup * WARPGROUP_ROWS if config.shares_keys else 0

    segments = None
    if scratch.query_segments is not None:
        own = inputs.extras["key_segments"].at[block.lane.batch, pl.ds(block.first_key + first(), WARPGROUP_ROWS)]
        segments = plgpu.load(own, layout=plgpu.Layout.WGMMA.reduce(1), optimized=False)

    def release(n: Any) -> None:
        if not launch.adds:  # else each step has done so, before it met the other warpgroup
            plgpu.commit_smem()
        plgpu.barrier_arrive(scratch.empty.at[lax.rem(n, config.stages)])

    def release_before(n: Any) -> None:
        """Frees the stage of the step before n, by a later step of that stage: n - 1 may be negative."""
        release(n + config.stages - 1)

    def step(n: Any, dk: Any, dv: Any, *, is_masked: bool) -> None:
        overlaps = config.overlaps and not (launch.adds and is_masked)
        # Parts of a step's scores that are computed one after the other, to save registers.
        parts = 2 if launch.splits_rows and (problem.masking.is_causal or is_masked) else 1
        stage, width = lax.rem(n, config.stages), launch.config.rows // parts
        head, query_tile = block.queries(n, is_masked)
        plgpu.barrier_wait(scratch.full.at[stage])
        again = not_invariant(n) * WARPGROUP_ROWS
        own = pl.ds(first() + again, WARPGROUP_ROWS)
        both_ds = scratch.ds.at[lax.rem(n, 2)] if launch.adds else None

        def score_gradients(i: int, s: Any, dp: Any = None) -> jax.Array | None:
            """The i-th part of the step's score gradients; adds to dvalue."""
            rows, row = pl.ds(i * width, width), query_tile * launch.config.rows + i * width
            query, dout = scratch.q.at(stage, rows=rows), scratch.do.at(stage, rows=rows)
            multiply_across(s, scratch.k.at(rows=own), query)
            if dp is not None:
                multiply_across(dp, scratch.v.at(rows=own), dout)
            if launch.lines == 3:
                places = scratch.rows.at[stage, 2]
            else:
                places = inputs.rows.at[block.lane.batch, head, 2, pl.ds(row, width)]
            tile = Tile(
                problem=problem,
                query_axis=1,
                shape=(WARPGROUP_ROWS, width),
                batch=block.lane.batch,
                head=head,
                row=row,
                column=block.first_key + first(),
                extras=inputs.extras,
                places=places,
                segments=None if segments is None else (segments, scratch.query_segments.at[stage]),
            )
            scores = plgpu.wgmma_accumulator_load(s, wait_n=0 if dp is None else value_form.copies)
            if overlaps and i == 0:
                # The last step's product for dkey is done, too.
                pl.when(n > 0)(lambda: release_before(n))
            lse = plgpu.load(scratch.rows.at[stage, 0, rows], layout=plgpu.Layout.WGMMA.reduce(0))
            weights, slope = tile.weights(scores, lse, is_masked=is_masked)
            weights = tile.marked(weights)
            kept = None if dv is None else tile.dropped(weights).astype(problem.dtype)
            if dp is None:
                multiply_down(dv, kept, dout)
                return None
            dweights = plgpu.wgmma_accumulator_load(dp, wait_n=0)
            delta = plgpu.load(scratch.rows.at[stage, 1, rows], layout=plgpu.Layout.WGMMA.reduce(0))
            dscores = tile.score_gradients(weights, dweights, delta)
            narrow = (dscores if slope is None else dscores * slope).astype(problem.dtype)
            if both_ds is not None:
                both_ds.at[pl.ds(first(), WARPGROUP_ROWS), rows][...] = narrow
            if dv is not None:
                # Not before: a product whose left operand is in registers holds the warpgroup until most of it is done.
                multiply_down(dv, kept, dout)
            return narrow

        def multiply_dkey() -> None:
            if dk is not None:
                for i, narrow in enumerate(narrows):
                    multiply_down(dk, narrow, scratch.q.at(stage, rows=pl.ds(i * width, width)))

        def end() -> None:
            if not overlaps:
                plgpu.wgmma_wait(0)
                release(n)

        accumulators = [plgpu.WGMMAAccumulatorRef((WARPGROUP_ROWS, width), jnp.float32)] * (1 + has_dkey)
        narrows = [pl.run_scoped(partial(score_gradients, i), *accumulators) for i in range(parts)]
        if not launch.adds:
            multiply_dkey()
            end()
            return
        meet(scratch.met)

        def share(dq):
            shares.multiply(block, warpgroup, both_ds, pl.ds(again, config.columns), dq)
            multiply_dkey()
            # The producer gets the share while these products are under way.
            values = launch.own_columns(plgpu.wgmma_accumulator_load(dq, wait_n=parts * form.copies), warpgroup)
            shares.give(block, warpgroup, n, values, query_tile, is_masked=is_masked)
            end()

        pl.run_scoped(share, plgpu.WGMMAAccumulatorRef((shares.PART, shares.PART), jnp.float32))

    def all_steps(*sums: Any) -> list[jax.Array]:
        dk, dv = sums[0] if has_dkey else None, sums[-1] if has_dvalue else None

        def loop(start: Any, end: Any, is_masked: bool) -> None:
            if block.visits.has_masked or not is_masked:
                lax.fori_loop(start, counted(problem, end), lambda n, _: step(n, dk, dv, is_masked=is_masked), None)

        loop(0, block.first_steps, not launch.adds)
        if launch.adds and config.overlaps:
            plgpu.wgmma_wait(0)
            pl.when(block.first_steps > 0)(lambda: release_before(block.first_steps))
        loop(block.first_steps, block.steps, launch.adds)
        results = [each[...] for each in sums]
        if config.overlaps and not launch.adds:
            pl.when(block.steps > 0)(lambda: release_before(block.steps))
        return results

    own_first = first()
    sizes = [problem.head_size] * has_dkey + [problem.value_size] * has_dvalue
    sums = [plgpu.WGMMAAccumulatorRef((WARPGROUP_ROWS, size), jnp.float32) for size in sizes]
    results = pl.run_scoped(all_steps, *sums)
    if launch.adds or not config.shares_keys:
        meet(scratch.met)  # the other warpgroup's products with what the results overwrite are done, too
    own, place = pl.ds(own_first, WARPGROUP_ROWS), block.lane.rows(block.first_key + own_first, WARPGROUP_ROWS)
    stored = []
    if has_dkey:
        stored.append((scratch.k.at(rows=own), results[0], problem.scale, block.outputs.dkey))
    if has_dvalue:
        stored.append((scratch.v.at(rows=own), results[-1], problem.kept_scale, block.outputs.dvalue))
    for tile, values, scale, _ in stored:
        tile.store(values * scale, width=columns_at_once(tile.form.size))
    plgpu.commit_smem()
    for tile, _, _, gradient in stored:
        tile.send(gradient.at[place])
    if launch.adds:
        shares.await_added(block)
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def key_gradients(inputs: Inputs, *, problem: Problem, config: KeysConfig) -> Gradients:
    """Returns (dkey, dvalue), like key and value; with `adds_dquery` (dquery, dkey, dvalue).

    A launch needs memory for `parts` copies of dkey and dvalue if there are several; with `adds_dquery` also for a
    float32 array like query with whole query tiles. Then it is one launch with a larger batch under `jax.vmap`: JAX's
    own copies of the kernel would share its semaphores, and none would know whose turn it is.

    Args:
        inputs: with bias and masks, if any, as (..., keys, queries). With `adds_dquery` there are no extras.
        problem: with `adds_dquery`, one with whole key tiles.
    """
    if not config.adds_dquery:
        return _launched(inputs, problem, config)

    @jax.custom_batching.custom_vmap
    def compute(inputs):
        return _launched(inputs, problem, config)

    @compute.def_vmap
    def _mapped(count, is_mapped, inputs):
        def flat(array, mapped):
            whole = array if mapped else jnp.broadcast_to(array, (count, *array.shape))
            return whole.reshape(-1, *whole.shape[2:])

        batch, inputs = problem.batch, jax.tree.map(flat, inputs, is_mapped[0])
        results = key_gradients(inputs, problem=replace(problem, batch=count * batch), config=config)
        return tuple(array.reshape(count, batch, *array.shape[1:]) for array in results), (True, True, True)

    return compute(inputs)


def _launched(inputs: Inputs, problem: Problem, config: KeysConfig) -> Gradients:
    launch = Launch(problem=replace(problem, key_heads=problem.key_heads * config.parts), config=config)

    def attention_backward_keys(inputs, *others):
        *results, scratch = others
        warpgroup, number = lax.axis_index("warpgroup"), lax.axis_index("block")
        block = Block.of(launch, inputs, results, scratch, number)

        def either(own: Callable[[], None], finish: Callable[[jax.Array], None]) -> None:
            """The role in a block with keys, or in the n-th finisher."""
            if not launch.has_finishers:
                own()
                return
            pl.when(number < launch.blocks)(own)
            pl.when(number >= launch.blocks)(lambda: finish(number - launch.blocks))

        def consume_keys() -> None:
            if config.shares_keys:
                consume(block, warpgroup)
            else:
                pl.when(warpgroup == 0)(lambda: consume(block, warpgroup, has_dkey=False))
                pl.when(warpgroup == 1)(lambda: consume(block, warpgroup, has_dvalue=False))

        run_roles(
            warpgroup,
            WARPGROUPS,
            lambda: either(lambda: produce(block), lambda n: shares.produce_finished(block, n)),
            lambda: either(consume_keys, lambda n: shares.consume_finished(block, n, warpgroup)),
            MORE_FOR_PRODUCER if is_short else REGISTERS,
            consumers_first=launch.warps_apart,
        )

    is_short = launch.adds and problem.masking.is_causal and problem.head_size < 128 and problem.in_panels
    if launch.adds:
        attention_backward_keys.__name__ = "attention_backward_fused"
    kernel = block_kernel(
        attention_backward_keys,
        out_type=launch.results(inputs),
        blocks=launch.blocks + launch.finishers,
        consumers=WARPGROUPS,
        scratch=(launch.scratch_types(),),
        products=problem.products(3 if launch.adds else 2, 2),
        automatic_barriers=launch.automatic_barriers,
    )
    results = kernel(inputs)[launch.adds :]  # without the sums
    if config.parts == 1:
        return tuple(results)
    *dquery, both = results
    each = (half.reshape(*half.shape[:2], -1, config.parts, half.shape[3]) for half in both)
    # A tile of values may be wider than they are.
    like = (inputs.key, inputs.value)
    return *dquery, *(added(half)[..., : array.shape[-1]] for half, array in zip(each, like, strict=True))
