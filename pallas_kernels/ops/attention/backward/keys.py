"""The kernel of dkey and dvalue: a block holds keys and values, and loops over the queries that see them.

Scores are computed transposed, keys along rows, so that weights and score gradients are left operands of the next
products without leaving their registers: with q, k, v, do tiles of query, key, value and dout,

    s = k @ q.T;  p = exp(s - lse);  dv += p @ do;  dp = v @ do.T;  ds = p * (dp - delta);  dk += ds @ q

The accumulators sum over the query heads that share a key head. Where there are few keys, several blocks share those
heads, and XLA adds up their sums. Source: Dao, "FlashAttention-2", 2023, https://arxiv.org/abs/2307.08691
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.ops.attention.backward.config import (
    KEY_ROWS,
    WARPGROUP_ROWS,
    WARPGROUPS,
    KeysConfig,
    columns_at_once,
)
from pallas_kernels.ops.attention.backward.tiles import (
    Inputs,
    KeyGradients,
    Lane,
    Tile,
    Visits,
    block_place,
    hidden,
    hides_steps,
    kept_scale,
    not_invariant,
    segment_tiles,
)
from pallas_kernels.ops.attention.launch import block_kernel, run_roles
from pallas_kernels.ops.attention.problem import Problem
from pallas_kernels.primitives.gemm.pipeline import drain
from pallas_kernels.primitives.random import mixed_words
from pallas_kernels.primitives.row_tiles import TileForm, multiply_across, multiply_down


class Scratch(NamedTuple):
    """A block's shared memory and barriers.

    k, v: the key tile and its values, in the end dkey and dvalue. q, do, rows, query_segments: a ring of query tiles,
    with dout, `rows_of` and, if any, segments. held: keys and values have arrived. full, empty: a stage of the ring has
    arrived, or is free. finished: the consumers no longer use k and v.
    """

    k: Any
    v: Any
    q: Any
    do: Any
    rows: Any
    held: Any
    full: Any
    empty: Any
    finished: Any
    query_segments: Any


@dataclass(frozen=True)
class _Launch:
    """Static facts of a launch; see `key_value_gradients`."""

    problem: Problem
    form: TileForm
    config: KeysConfig

    @property
    def blocks(self) -> int:
        return pl.cdiv(self.problem.masking.keys, self.config.columns)

    @property
    def heads(self) -> int:
        return self.problem.group // self.config.parts

    @property
    def lanes(self) -> int:
        return self.problem.batch * self.problem.key_heads * self.config.parts

    def scratch_types(self) -> Scratch:
        config, form, has_segments = self.config, self.form, self.problem.masking.has_segments
        full = 1 + 2 * form.copies + has_segments
        return Scratch(
            k=form.scratch(config.columns),
            v=form.scratch(config.columns),
            q=form.scratch(config.stages, KEY_ROWS),
            do=form.scratch(config.stages, KEY_ROWS),
            rows=plgpu.SMEM((config.stages, 3, KEY_ROWS), jnp.float32),
            held=plgpu.Barrier(num_arrivals=2 * form.copies),
            full=plgpu.Barrier(num_arrivals=full, num_barriers=config.stages),
            empty=plgpu.Barrier(num_arrivals=WARPGROUPS, num_barriers=config.stages),
            finished=plgpu.Barrier(num_arrivals=WARPGROUPS),
            query_segments=plgpu.SMEM((config.stages, KEY_ROWS), jnp.int32) if has_segments else None,
        )


@dataclass(frozen=True)
class _Block:
    """A running block; both roles use it.

    lane: the batch entry and key head. first_head: of the query heads. first_key: of the key tile. visits: the query
    tiles that see these keys.
    """

    launch: _Launch
    inputs: Inputs
    gradients: KeyGradients
    scratch: Scratch
    lane: Lane
    first_head: Any
    first_key: Any
    visits: Visits

    @classmethod
    def of(cls, launch: _Launch, inputs: Inputs, gradients: KeyGradients, scratch: Scratch) -> _Block:
        form, config, problem = launch.form, launch.config, launch.problem
        scratch = scratch._replace(**{name: form.tiles(getattr(scratch, name)) for name in ("k", "v", "q", "do")})
        # Under a causal mask the first keys are seen by the most queries.
        tile_index, lane = block_place(lax.axis_index("block"), tiles=launch.blocks, lanes=launch.lanes)
        lane = Lane.of(lane, problem.key_heads, config.parts)
        first_key = tile_index * config.columns
        tiles = segment_tiles(inputs.extras, lane.batch, tile_index)
        tiles = tiles or problem.masking.query_tiles(first_key, config.columns, KEY_ROWS)
        visits = Visits(tiles=hidden(tiles) if hides_steps(problem, form, problem.masking.queries, KEY_ROWS) else tiles)
        first_head = lane.first_query_head(problem.group, launch.heads)
        return cls(launch, inputs, gradients, scratch, lane, first_head, first_key, visits)

    def stage(self, n: Any) -> Any:
        """The ring's stage of the n-th step."""
        return lax.rem(n, self.launch.config.stages)

    def produce(self) -> None:
        """Runs the producer: loads the key tile and then the queries that see it."""
        inputs, scratch, visits = self.inputs, self.scratch, self.visits
        place = self.lane.rows(self.first_key, self.launch.config.columns)
        scratch.k.load_async(inputs.key.at[place], scratch.held)
        scratch.v.load_async(inputs.value.at[place], scratch.held)
        steps = self._load_heads(visits.masked, visits.masked_tile, jnp.int32(0))
        steps = self._load_heads(visits.full, visits.full_tile, steps)
        drain(scratch.empty, self.launch.config.stages, steps)

    def _load_heads(self, count: Any, tile_of: Callable[[Any], Any], steps: Any) -> Any:
        """Loads `count` query tiles of each head."""
        stages = self.launch.config.stages

        def load(i, carry):
            head, step = carry
            stage = lax.rem(step, stages)
            pl.when(step >= stages)(lambda: plgpu.barrier_wait(self.scratch.empty.at[stage]))
            self._load_queries(head, tile_of(i) * KEY_ROWS, stage)
            return head, step + 1

        def one(g, step):
            return lax.fori_loop(0, count, load, (self.first_head + g, step))[1]

        return lax.fori_loop(0, self.launch.heads, one, steps)

    def _load_queries(self, head: Any, row: Any, stage: Any) -> None:
        inputs, scratch, batch = self.inputs, self.scratch, self.lane.batch
        full = scratch.full.at[stage]
        place = (batch, pl.ds(row, KEY_ROWS), head)
        scratch.q.at(stage).load_async(inputs.query.at[place], full)
        scratch.do.at(stage).load_async(inputs.dout.at[place], full)
        plgpu.copy_gmem_to_smem(inputs.rows.at[batch, head, :, pl.ds(row, KEY_ROWS)], scratch.rows.at[stage], full)
        if scratch.query_segments is not None:
            numbers = inputs.extras["query_segments"].at[batch, pl.ds(row, KEY_ROWS)]
            plgpu.copy_gmem_to_smem(numbers, scratch.query_segments.at[stage], full)


def consume(block: _Block, first: Any, *, makes_dkey: bool = True, makes_dvalue: bool = True) -> None:
    """Runs a consumer: computes and stores dkey, dvalue or both of 64 keys, from `first` in the block's key tile on."""
    launch, scratch, extras = block.launch, block.scratch, block.inputs.extras
    config, form, problem = launch.config, launch.form, launch.problem
    words = mixed_words(extras["words"]) if "words" in extras else None
    segments = None
    if scratch.query_segments is not None:
        own = extras["key_segments"].at[block.lane.batch, pl.ds(block.first_key + first, WARPGROUP_ROWS)]
        segments = plgpu.load(own, layout=plgpu.Layout.WGMMA.reduce(1), optimized=False)

    def release(n: Any) -> None:
        plgpu.commit_smem()
        plgpu.barrier_arrive(scratch.empty.at[block.stage(n)])

    def step(n: Any, head: Any, query_tile: Any, dk: Any, dv: Any, *, is_masked: bool) -> None:
        stage = block.stage(n)
        tile = Tile(
            problem=problem,
            query_axis=1,
            shape=(WARPGROUP_ROWS, KEY_ROWS),
            batch=block.lane.batch,
            head=head,
            row=query_tile * KEY_ROWS,
            column=block.first_key + first,
            extras=extras,
            words=words,
            places=scratch.rows.at[stage, 2],
            segments=None if segments is None else (segments, scratch.query_segments.at[stage]),
        )
        plgpu.barrier_wait(scratch.full.at[stage])
        own = pl.ds(first + not_invariant(n) * WARPGROUP_ROWS, WARPGROUP_ROWS)
        own_k, own_v = scratch.k.at(rows=own), scratch.v.at(rows=own)
        q, do = scratch.q.at(stage), scratch.do.at(stage)

        def products(s, dp=None):
            multiply_across(s, own_k, q)
            if dp is not None:
                multiply_across(dp, own_v, do)
            scores = plgpu.wgmma_accumulator_load(s, wait_n=0 if dp is None else form.copies)
            if config.overlaps:
                pl.when(n > 0)(lambda: release(n - 1))
            lse = plgpu.load(scratch.rows.at[stage, 0], layout=tile.row_layout())
            weights, slope = tile.weights(scores, lse, is_masked=is_masked)
            weights = tile.marked(weights)
            if dv is not None:
                multiply_down(dv, tile.dropped(weights).astype(problem.dtype), do)
            if dp is not None:
                dweights = plgpu.wgmma_accumulator_load(dp, wait_n=0 if dv is None else form.copies)
                delta = plgpu.load(scratch.rows.at[stage, 1], layout=tile.row_layout())
                dscores = tile.score_gradients(weights, dweights, delta)
                dscores = dscores if slope is None else dscores * slope
                multiply_down(dk, dscores.astype(problem.dtype), q)
            if not config.overlaps:
                plgpu.wgmma_wait(0)
                release(n)

        pl.run_scoped(products, *[plgpu.WGMMAAccumulatorRef(tile.shape, jnp.float32)] * (1 + makes_dkey))

    def over_queries(*sums):
        dk, dv = sums[0] if makes_dkey else None, sums[-1] if makes_dvalue else None
        visits, heads = block.visits, launch.heads
        masked_steps = heads * visits.masked

        def masked_step(n, _):
            head = block.first_head + lax.div(n, visits.masked)
            step(n, head, visits.masked_tile(lax.rem(n, visits.masked)), dk, dv, is_masked=True)

        def full_step(n, _):
            i = n - masked_steps
            head = block.first_head + lax.div(i, visits.full)
            step(n, head, visits.full_tile(lax.rem(i, visits.full)), dk, dv, is_masked=False)

        if visits.has_masked:
            lax.fori_loop(0, masked_steps, masked_step, None)
        steps = heads * (visits.masked + visits.full)
        lax.fori_loop(masked_steps, steps, full_step, None)
        results = [each[...] for each in sums]
        if config.overlaps:
            pl.when(steps > 0)(lambda: release(steps - 1))
        return results

    sums = plgpu.WGMMAAccumulatorRef((WARPGROUP_ROWS, form.size), jnp.float32)
    results = pl.run_scoped(over_queries, *[sums] * (makes_dkey + makes_dvalue))
    if not config.shares_keys:
        # The other warpgroup may still multiply by what the results are about to overwrite.
        plgpu.barrier_arrive(scratch.finished)
        plgpu.barrier_wait(scratch.finished)
    place, own = block.lane.result_rows(block.first_key + first, WARPGROUP_ROWS), pl.ds(first, WARPGROUP_ROWS)
    stored = []
    if makes_dkey:
        stored.append((scratch.k.at(rows=own), results[0], problem.scale, block.gradients.dkey))
    if makes_dvalue:
        stored.append((scratch.v.at(rows=own), results[-1], kept_scale(problem), block.gradients.dvalue))
    for tile, values, scale, _ in stored:
        tile.store(values * scale, width=columns_at_once(form.size))
    plgpu.commit_smem()
    for tile, _, _, gradient in stored:
        tile.send(gradient.at[place])
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def key_value_gradients(
    inputs: Inputs,
    *,
    problem: Problem,
    form: TileForm,
    config: KeysConfig,
) -> tuple[jax.Array, jax.Array]:
    """Returns (dkey, dvalue), like key and value.

    Args:
        inputs: with the dense array, if any, as (..., keys, queries).
        form: the layout of query, key, value and dout tiles in shared memory.
    """
    launch = _Launch(problem, form, config)

    def attention_backward_keys(inputs, *others):
        *gradients, scratch = others
        warpgroup = lax.axis_index("warpgroup")
        block = _Block.of(launch, inputs, KeyGradients.of(gradients), scratch)

        def consume_all() -> None:
            plgpu.barrier_wait(block.scratch.held)
            if config.shares_keys:
                consume(block, warpgroup * WARPGROUP_ROWS)
            else:
                pl.when(warpgroup == 0)(lambda: consume(block, 0, makes_dkey=False))
                pl.when(warpgroup == 1)(lambda: consume(block, 0, makes_dvalue=False))

        run_roles(warpgroup, WARPGROUPS, block.produce, consume_all)

    kernel = block_kernel(
        attention_backward_keys,
        out_type=KeyGradients.types(inputs.key, config.parts),
        blocks=launch.blocks * launch.lanes,
        consumers=WARPGROUPS,
        scratch=(launch.scratch_types(),),
        products=problem.product and problem.product.times(4),
    )
    return KeyGradients.summed(kernel(inputs))
