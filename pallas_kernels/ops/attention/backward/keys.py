"""dkey and dvalue: a block holds keys and values and goes over the queries of all heads that see them.

Scores are computed transposed, keys along rows, so that weights and score gradients are left operands of the next
products without leaving their registers: with q, k, v, do tiles of query, key, value and dout,

    s = k @ q.T;  p = exp(s - lse);  dv += p @ do;  dp = v @ do.T;  ds = p * (dp - delta);  dk += ds @ q

Query heads that share a key head are summed in the accumulators; where there are few keys, blocks share a group's
heads, and their sums are added up behind. Source: Dao, "FlashAttention-2", 2023, https://arxiv.org/abs/2307.08691
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
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
    WAVES,
    KeysConfig,
    columns_at_once,
)
from pallas_kernels.ops.attention.backward.tiles import (
    Inputs,
    KeyGradients,
    Tile,
    Visits,
    block_place,
    hidden,
    hides_steps,
    kept_scale,
    lane_place,
    not_invariant,
)
from pallas_kernels.ops.attention.few_queries import Packing, row_places
from pallas_kernels.ops.attention.launch import block_kernel, run_roles
from pallas_kernels.ops.attention.masking import TileRange
from pallas_kernels.ops.attention.problem import Problem
from pallas_kernels.ops.attention.row_tiles import TileForm, multiply_across, multiply_down
from pallas_kernels.primitives.flop_metadata import Products
from pallas_kernels.primitives.gemm.pipeline import drain
from pallas_kernels.primitives.platform import target_device
from pallas_kernels.primitives.random import mixed_words

_SLOTS = 2
"""Tiles of keys in shared memory at once, where a block takes more than one."""
_LARGE_HEAD = 128
"""With which ptxas spills then if the compiler knows how many steps a tile takes; with fewer, if it does not."""


class Scratch(NamedTuple):
    """A block's shared memory, and its barriers.

    k, v: a tile's keys and values. q, do: of the queries of a step, with what each query's row needs and, if any, its
    segment. held: keys and values are there; full, empty: a stage of queries is there, and done with; finished: a
    warpgroup will not read keys and values any more, nor what it has put in their place.
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


@dataclass(frozen=True, kw_only=True)
class Launch:
    """See `key_value_gradients`."""

    problem: Problem
    form: TileForm
    config: KeysConfig
    packing: Packing | None

    @property
    def blocks(self) -> int:
        """Of a lane."""
        return pl.cdiv(self.key_tiles, self.config.tiles)

    @property
    def key_tiles(self) -> int:
        """Of a lane."""
        return pl.cdiv(self.problem.masking.keys, self.config.columns)

    @property
    def slots(self) -> int:
        """Tiles of keys in shared memory at once."""
        return min(self.config.tiles, _SLOTS)

    @property
    def steps_of_tile(self) -> int:
        """That each tile of keys takes, where all queries see all keys."""
        return self.heads * pl.cdiv(self.problem.masking.queries, KEY_ROWS)

    @property
    def heads(self) -> int:
        """Query heads that a block goes over."""
        return self.problem.group // self.config.parts

    @property
    def lanes(self) -> int:
        """Key heads of all batch entries, or their parts."""
        return self.problem.batch * self.problem.key_heads * self.config.parts

    def scratch_types(self) -> Scratch:
        """What a block is given."""
        config, form, has_segments = self.config, self.form, self.problem.masking.has_segments
        heads = 1 if self.packing is None else self.packing.heads_of(KEY_ROWS)
        full = 1 + 2 * form.copies * heads + has_segments
        keys = (config.columns,) if config.tiles == 1 else (self.slots, config.columns)
        return Scratch(
            k=form.scratch(*keys),
            v=form.scratch(*keys),
            q=form.scratch(config.stages, KEY_ROWS),
            do=form.scratch(config.stages, KEY_ROWS),
            rows=plgpu.SMEM((config.stages, 3, KEY_ROWS), jnp.float32),
            held=plgpu.Barrier(num_arrivals=2 * form.copies, num_barriers=self.slots),
            full=plgpu.Barrier(num_arrivals=full, num_barriers=config.stages),
            empty=plgpu.Barrier(num_arrivals=WARPGROUPS, num_barriers=config.stages),
            finished=plgpu.Barrier(num_arrivals=WARPGROUPS, num_barriers=self.slots),
            query_segments=plgpu.SMEM((config.stages, KEY_ROWS), jnp.int32) if has_segments else None,
        )


@dataclass(frozen=True, kw_only=True)
class Block:
    """What is known of a block while it runs.

    b, key_head: its batch entry, and its head. part: of the head's group, or None. first_head: of its queries.
    first_key: of its tile, or of its first one. visits: the tiles of queries that see these keys. before: steps that
    are done when those of the tile begin; None: it has no tile before it.
    """

    launch: Launch
    inputs: Inputs
    gradients: KeyGradients
    scratch: Scratch
    b: Any
    key_head: Any
    part: Any
    first_head: Any
    first_key: Any
    visits: Visits
    before: Any = None

    @classmethod
    def of(cls, launch: Launch, inputs: Inputs, gradients: KeyGradients, scratch: Scratch) -> Block:
        """The block that runs, called in the kernel."""
        form, config, problem = launch.form, launch.config, launch.problem
        names = ("k", "v", "q", "do")
        scratch = scratch._replace(**{name: form.tiles(getattr(scratch, name)) for name in names})
        # Where attention is causal, the first keys are those that the most queries see.
        tile_index, lane = block_place(
            lax.axis_index("block"),
            tiles=launch.blocks,
            lanes=launch.lanes,
            lane_bytes=4 * launch.heads * inputs.query.shape[1] * form.size,
            section_blocks=WAVES * target_device().core_count,
        )
        b, key_head, part = lane_place(lane, problem.key_heads, config.parts)
        first_key = tile_index * (config.columns * config.tiles)
        if "tiles" in inputs.extras:
            tiles = TileRange(*(inputs.extras["tiles"][b, tile_index, i] for i in range(4)))
        else:
            tiles = problem.masking.query_tiles(first_key, config.columns, KEY_ROWS)
        hides = hides_steps(problem, form, problem.masking.queries, KEY_ROWS)
        visits = Visits(tiles=hidden(tiles) if hides else tiles)
        first_head = key_head * problem.group
        if part is not None:
            first_head = first_head + part * launch.heads
        return cls(
            launch=launch,
            inputs=inputs,
            gradients=gradients,
            scratch=scratch,
            b=b,
            key_head=key_head,
            part=part,
            first_head=first_head,
            first_key=first_key,
            visits=visits,
        )

    @property
    def tiles(self) -> Any:
        """Of keys, that it takes."""
        launch = self.launch
        first = lax.div(self.first_key, jnp.int32(launch.config.columns))
        return jnp.minimum(launch.key_tiles - first, launch.config.tiles)

    def at(self, i: Any) -> Block:
        """The same with the i-th of its tiles of keys."""
        launch, scratch, config = self.launch, self.scratch, self.launch.config
        slot = lax.rem(i, jnp.int32(launch.slots))
        first_key = self.first_key + i * config.columns
        tiles = launch.problem.masking.query_tiles(first_key, config.columns, KEY_ROWS)
        return replace(
            self,
            scratch=scratch._replace(
                k=scratch.k.at(slot),
                v=scratch.v.at(slot),
                held=scratch.held.at[slot],
                finished=scratch.finished.at[slot],
            ),
            first_key=first_key,
            visits=Visits(tiles=hidden(tiles) if launch.form.size >= _LARGE_HEAD else tiles),
            before=i * launch.steps_of_tile,
        )

    def stage(self, n: Any) -> Any:
        """Of the queries of the tile's n-th step."""
        return lax.rem(n if self.before is None else self.before + n, self.launch.config.stages)

    def produce(self) -> None:
        """The work of the producer."""
        steps = self._load_tile(jnp.int32(0)) if self.launch.config.tiles == 1 else self._load_tiles()
        drain(self.scratch.empty, self.launch.config.stages, steps)

    def _load_tiles(self) -> Any:
        """One after the other; how many steps they take."""
        slots = self.launch.slots

        def one(i, steps):
            own = self.at(i)
            pl.when(i >= slots)(lambda: plgpu.barrier_wait(own.scratch.finished))
            return own._load_tile(steps)

        steps = lax.fori_loop(0, self.tiles, one, jnp.int32(0))
        drain(self.scratch.finished, slots, self.tiles)
        return steps

    def _load_tile(self, steps: Any) -> Any:
        """A tile of keys and then the queries that see it, after so many steps; how many there are then."""
        inputs, scratch, visits = self.inputs, self.scratch, self.visits
        own = (self.b, pl.ds(self.first_key, self.launch.config.columns), self.key_head)
        scratch.k.load_async(inputs.key.at[own], scratch.held)
        scratch.v.load_async(inputs.value.at[own], scratch.held)
        steps = self._load_heads(visits.masked, visits.masked_tile, steps)
        return self._load_heads(visits.full, visits.full_tile, steps)

    def _load_heads(self, count: Any, tile_of: Callable[[Any], Any], steps: Any) -> Any:
        """Loads so many tiles of queries of each head, after so many steps; how many steps there are then."""

        def load(i, carry):
            head, step = carry
            stage = lax.rem(step, self.launch.config.stages)

            @pl.when(step >= self.launch.config.stages)
            def _():
                plgpu.barrier_wait(self.scratch.empty.at[stage])

            self._load_queries(head, tile_of(i) * KEY_ROWS, stage)
            return head, step + 1

        def one(g, step):
            return lax.fori_loop(0, count, load, (self.first_head + g, step))[1]

        return lax.fori_loop(0, self.launch.heads, one, steps)

    def _load_queries(self, head: Any, row: Any, stage: Any) -> None:
        """A tile, from row on, and what is known of its queries."""
        inputs, scratch = self.inputs, self.scratch
        full = scratch.full.at[stage]
        for place, own in row_places(self.b, row, head, KEY_ROWS, self.launch.packing):
            scratch.q.at(stage, rows=own).load_async(inputs.query.at[place], full)
            scratch.do.at(stage, rows=own).load_async(inputs.dout.at[place], full)
        rows = inputs.rows.at[self.b, head, :, pl.ds(row, KEY_ROWS)]
        plgpu.copy_gmem_to_smem(rows, scratch.rows.at[stage], full)
        if scratch.query_segments is not None:
            numbers = inputs.extras["query_segments"].at[self.b, pl.ds(row, KEY_ROWS)]
            plgpu.copy_gmem_to_smem(numbers, scratch.query_segments.at[stage], full)


@dataclass(frozen=True, kw_only=True)
class Held:
    """What a warpgroup has throughout: its keys' segments and the dropout key's words, where there are such; and the
    accumulators of what it makes."""

    segments: jax.Array | None
    words: Any
    dk: Any
    dv: Any


@dataclass(frozen=True, kw_only=True)
class Consumer:
    """makes_dkey, makes_dvalue: which of them this warpgroup makes. first: of its keys, in the block's tile."""

    block: Block
    makes_dkey: bool
    makes_dvalue: bool
    first: Any

    def run(self) -> None:
        """Computes and stores them."""
        block, extras = self.block, self.block.inputs.extras
        words = mixed_words(extras["words"]) if "words" in extras else None
        segments = None
        if block.scratch.query_segments is not None:
            own = extras["key_segments"].at[block.b, pl.ds(block.first_key + self.first, WARPGROUP_ROWS)]
            segments = plgpu.load(own, layout=plgpu.Layout.WGMMA.reduce(1), optimized=False)

        def over_queries(*accumulators):
            found = list(accumulators)
            dk = found.pop(0) if self.makes_dkey else None
            dv = found.pop(0) if self.makes_dvalue else None
            return self._over_queries(Held(segments=segments, words=words, dk=dk, dv=dv))

        sums = plgpu.WGMMAAccumulatorRef((WARPGROUP_ROWS, block.launch.form.size), jnp.float32)
        results = pl.run_scoped(over_queries, *[sums] * (self.makes_dkey + self.makes_dvalue))
        self._store(results)

    def _over_queries(self, held: Held) -> list[jax.Array]:
        """dkey and dvalue, those of them that it makes, but for constant factors: masked tiles first."""
        block, visits, heads = self.block, self.block.visits, self.block.launch.heads
        masked_steps = heads * visits.masked

        def masked_step(n, _):
            head = block.first_head + lax.div(n, visits.masked)
            self._step(n, head, visits.masked_tile(lax.rem(n, visits.masked)), held, is_masked=True)

        def full_step(n, _):
            i = n - masked_steps
            head = block.first_head + lax.div(i, visits.full)
            self._step(n, head, visits.full_tile(lax.rem(i, visits.full)), held, is_masked=False)

        if not isinstance(visits.masked, int) or visits.masked:
            lax.fori_loop(0, masked_steps, masked_step, None)
        steps = heads * (visits.masked + visits.full)
        lax.fori_loop(masked_steps, steps, full_step, None)
        results = [sums[...] for sums in (held.dk, held.dv) if sums is not None]
        if block.launch.config.overlaps:
            pl.when(steps > 0)(lambda: self._release(steps - 1))
        return results

    def _step(self, n: Any, head: Any, query_tile: Any, held: Held, *, is_masked: bool) -> None:
        launch, scratch, config = self.block.launch, self.block.scratch, self.block.launch.config
        copies, dtype = launch.form.copies, launch.problem.dtype
        stage = self.block.stage(n)
        tile = self._scores(head, query_tile, stage, held)
        plgpu.barrier_wait(scratch.full.at[stage])
        own = pl.ds(self.first + not_invariant(n) * WARPGROUP_ROWS, WARPGROUP_ROWS)
        own_k, own_v = scratch.k.at(rows=own), scratch.v.at(rows=own)
        q, do = scratch.q.at(stage), scratch.do.at(stage)

        def products(s, *others):
            multiply_across(s, own_k, q)
            for dp in others:
                multiply_across(dp, own_v, do)
            scores = plgpu.wgmma_accumulator_load(s, wait_n=len(others) * copies)
            if config.overlaps:
                pl.when(n > 0)(lambda: self._release(n - 1))
            lse = plgpu.load(scratch.rows.at[stage, 0], layout=tile.row_layout())
            weights, slope = tile.weights(scores, lse, is_masked=is_masked)
            weights = tile.marked(weights)
            if held.dv is not None:
                multiply_down(held.dv, tile.dropped(weights).astype(dtype), do)
            for dp in others:
                dweights = plgpu.wgmma_accumulator_load(dp, wait_n=0 if held.dv is None else copies)
                delta = plgpu.load(scratch.rows.at[stage, 1], layout=tile.row_layout())
                dscores = tile.score_gradients(weights, dweights, delta)
                dscores = dscores if slope is None else dscores * slope
                multiply_down(held.dk, dscores.astype(dtype), q)
            if not config.overlaps:
                plgpu.wgmma_wait(0)
                self._release(n)

        count = 2 if self.makes_dkey else 1
        pl.run_scoped(products, *[plgpu.WGMMAAccumulatorRef(tile.shape, jnp.float32)] * count)

    def _scores(self, head: Any, query_tile: Any, stage: Any, held: Held) -> Tile:
        block, rows, numbers = self.block, KEY_ROWS, self.block.scratch.query_segments
        return Tile(
            problem=block.launch.problem,
            query_axis=1,
            shape=(WARPGROUP_ROWS, rows),
            batch=block.b,
            head=head,
            row=query_tile * rows,
            column=block.first_key + self.first,
            extras=block.inputs.extras,
            words=held.words,
            places=block.scratch.rows.at[stage, 2],
            segments=None if numbers is None else (held.segments, numbers.at[stage]),
        )

    def _release(self, n: Any) -> None:
        """A step's queries are done with."""
        plgpu.commit_smem()
        plgpu.barrier_arrive(self.block.scratch.empty.at[self.block.stage(n)])

    def _store(self, results: list[jax.Array]) -> None:
        block, scratch, problem = self.block, self.block.scratch, self.block.launch.problem
        if not block.launch.config.shares_keys:
            # The other warpgroup may still multiply by what the result is about to overwrite.
            plgpu.barrier_arrive(scratch.finished)
            plgpu.barrier_wait(scratch.finished)
        place = (block.b, pl.ds(block.first_key + self.first, WARPGROUP_ROWS), block.key_head)
        place = place if block.part is None else (block.part, *place)
        own_k, own_v = (tiles.at(rows=pl.ds(self.first, WARPGROUP_ROWS)) for tiles in (scratch.k, scratch.v))
        columns = columns_at_once(block.launch.form.size)
        if self.makes_dkey:
            own_k.store(results.pop(0) * problem.scale, width=columns)
        if self.makes_dvalue:
            own_v.store(results.pop(0) * kept_scale(problem), width=columns)
        plgpu.commit_smem()
        if self.makes_dkey:
            own_k.send(block.gradients.dkey.at[place])
        if self.makes_dvalue:
            own_v.send(block.gradients.dvalue.at[place])
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        if block.launch.config.tiles > 1:
            plgpu.barrier_arrive(scratch.finished)


def key_value_gradients(
    inputs: Inputs,
    *,
    problem: Problem,
    form: TileForm,
    config: KeysConfig,
    packing: Packing | None = None,
    product: Products | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Returns (dkey, dvalue), like key and value.

    Args:
        inputs: whose dense array has keys before queries.
        form: of their tiles.
        packing: how rows of the packed problem lie in query and dout; None: as they are.
        product: one of the kernel's matrix products, for the FLOPs that the program states.
    """
    launch = Launch(problem=problem, form=form, config=config, packing=packing)

    def attention_backward_keys(inputs, *others):
        *gradients, scratch = others
        warpgroup = lax.axis_index("warpgroup")
        block = Block.of(launch, inputs, KeyGradients.of(gradients), scratch)

        def compute(own: Block, first: Any, *, makes_dkey: bool = True, makes_dvalue: bool = True) -> None:
            Consumer(block=own, makes_dkey=makes_dkey, makes_dvalue=makes_dvalue, first=first).run()

        def compute_tile(own: Block) -> None:
            plgpu.barrier_wait(own.scratch.held)
            compute(own, warpgroup * WARPGROUP_ROWS)

        def consume() -> None:
            if config.tiles > 1:
                lax.fori_loop(0, block.tiles, lambda i, _: compute_tile(block.at(i)), None)
            elif config.shares_keys:
                compute_tile(block)
            else:
                plgpu.barrier_wait(block.scratch.held)
                pl.when(warpgroup == 0)(lambda: compute(block, 0, makes_dkey=False))
                pl.when(warpgroup == 1)(lambda: compute(block, 0, makes_dvalue=False))

        run_roles(warpgroup, WARPGROUPS, block.produce, consume)

    kernel = block_kernel(
        attention_backward_keys,
        out_type=KeyGradients.types(inputs.key, config.parts),
        blocks=launch.blocks * launch.lanes,
        consumers=WARPGROUPS,
        scratch=(launch.scratch_types(),),
        products=product and product.times(4),
    )
    return KeyGradients.summed(kernel(inputs))
