"""What is known of a launch of the kernel, and where a block of it is and what it brings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.ops.attention.backward.config import KeysConfig
from pallas_kernels.ops.attention.backward.tiles import Inputs, Visits, block_place, hidden, hides_steps, lane_place
from pallas_kernels.ops.attention.gqa_packing import Packing, row_places
from pallas_kernels.ops.attention.masking import TileRange
from pallas_kernels.ops.attention.problem import Problem
from pallas_kernels.ops.attention.tiles.row_tiles import TileForm
from pallas_kernels.primitives.platform import target_device

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
class Refs(Inputs):
    """References to the arguments of `key_value_gradients`, and to its results."""

    dkey: Any
    dvalue: Any


@dataclass(frozen=True, kw_only=True)
class Launch:
    """See `key_value_gradients`. batch: of the arrays."""

    problem: Problem
    form: TileForm
    config: KeysConfig
    batch: int
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
        return self.heads * pl.cdiv(self.problem.masking.queries, self.config.rows)

    @property
    def heads(self) -> int:
        """Query heads that a block goes over."""
        return self.problem.group // self.config.parts

    @property
    def lanes(self) -> int:
        """Key heads of all batch entries, or their parts."""
        return self.batch * self.problem.key_heads * self.config.parts

    def scratch_types(self) -> Scratch:
        """What a block is given."""
        config, form, has_segments = self.config, self.form, self.problem.masking.has_segments
        heads = 1 if self.packing is None else self.packing.heads_of(config.rows)
        full = 1 + 2 * form.copies * heads + has_segments
        keys = (config.columns,) if config.tiles == 1 else (self.slots, config.columns)
        return Scratch(
            k=form.scratch(*keys),
            v=form.scratch(*keys),
            q=form.scratch(config.stages, config.rows),
            do=form.scratch(config.stages, config.rows),
            rows=plgpu.SMEM((config.stages, 3, config.rows), jnp.float32),
            held=plgpu.Barrier(num_arrivals=2 * form.copies, num_barriers=self.slots),
            full=plgpu.Barrier(num_arrivals=full, num_barriers=config.stages),
            empty=plgpu.Barrier(num_arrivals=config.warpgroups, num_barriers=config.stages),
            finished=plgpu.Barrier(num_arrivals=config.warpgroups, num_barriers=self.slots),
            query_segments=plgpu.SMEM((config.stages, config.rows), jnp.int32) if has_segments else None,
        )

    def results(self, key: jax.Array) -> list[jax.ShapeDtypeStruct]:
        """dkey and dvalue, or their parts in one array."""
        dtype, parts = self.problem.dtype, self.config.parts
        if parts > 1:
            return [jax.ShapeDtypeStruct((2, parts, *key.shape), dtype)]
        return [jax.ShapeDtypeStruct(key.shape, dtype)] * 2


@dataclass(frozen=True, kw_only=True)
class Block:
    """What is known of a block while it runs.

    b, key_head: its batch entry, and its head. part: of the head's group, or None. first_head: of its queries.
    first_key: of its tile, or of its first one. visits: the tiles of queries that see these keys. before: steps that
    are done when those of the tile begin; None: it has no tile before it.
    """

    launch: Launch
    refs: Refs
    scratch: Scratch
    b: Any
    key_head: Any
    part: Any
    first_head: Any
    first_key: Any
    visits: Visits
    before: Any = None

    @classmethod
    def of(cls, launch: Launch, refs: Refs, scratch: Scratch, *, queries: int) -> Block:
        """The block that runs, called in the kernel. queries: of the array."""
        form, config, problem = launch.form, launch.config, launch.problem
        names = ("k", "v", "q", "do")
        scratch = scratch._replace(**{name: form.tiles(getattr(scratch, name)) for name in names})
        # Where attention is causal, the first keys are those that the most queries see.
        tile_index, lane = block_place(
            lax.axis_index("block"),
            tiles=launch.blocks,
            lanes=launch.lanes,
            lane_bytes=4 * launch.heads * queries * form.size,
            section_blocks=config.waves * target_device().core_count,
        )
        b, key_head, part = lane_place(lane, problem.key_heads, config.parts)
        first_key = tile_index * (config.columns * config.tiles)
        if "tiles" in refs.extras:
            tiles = TileRange(*(refs.extras["tiles"][b, tile_index, i] for i in range(4)))
        else:
            tiles = problem.masking.query_tiles(first_key, config.columns, config.rows)
        hides = hides_steps(problem, form, problem.masking.queries, config.rows)
        visits = Visits(tiles=hidden(tiles) if hides else tiles)
        first_head = key_head * problem.group
        if part is not None:
            first_head = first_head + part * launch.heads
        return cls(
            launch=launch,
            refs=refs,
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
        tiles = launch.problem.masking.query_tiles(first_key, config.columns, config.rows)
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

    def bring(self) -> None:
        """The work of the warpgroup that brings operands."""
        scratch, stages = self.scratch, self.launch.config.stages
        steps = self._bring_tile(jnp.int32(0)) if self.launch.config.tiles == 1 else self._bring_tiles()

        # No barrier may be left with an arrival that nobody has seen.
        def drain(i, _):
            plgpu.barrier_wait(scratch.empty.at[lax.rem(i, stages)])

        lax.fori_loop(jnp.maximum(steps - stages, 0), steps, drain, None)

    def _bring_tiles(self) -> Any:
        """One after the other; how many steps they take."""
        slots = self.launch.slots

        def one(i, steps):
            own = self.at(i)
            pl.when(i >= slots)(lambda: plgpu.barrier_wait(own.scratch.finished))
            return own._bring_tile(steps)

        def drain(i, _):
            plgpu.barrier_wait(self.at(i).scratch.finished)

        steps = lax.fori_loop(0, self.tiles, one, jnp.int32(0))
        lax.fori_loop(jnp.maximum(self.tiles - slots, 0), self.tiles, drain, None)
        return steps

    def _bring_tile(self, steps: Any) -> Any:
        """A tile of keys and then the queries that see it, after so many steps; how many there are then."""
        refs, scratch, visits = self.refs, self.scratch, self.visits
        own = (self.b, pl.ds(self.first_key, self.launch.config.columns), self.key_head)
        scratch.k.bring(refs.key.at[own], scratch.held)
        scratch.v.bring(refs.value.at[own], scratch.held)
        steps = self._bring_heads(visits.masked, visits.masked_tile, steps)
        return self._bring_heads(visits.full, visits.full_tile, steps)

    def _bring_heads(self, count: Any, tile_of: Callable[[Any], Any], steps: Any) -> Any:
        """Brings so many tiles of queries of each head, after so many steps; how many steps there are then."""

        def bring(i, carry):
            head, step = carry
            stage = lax.rem(step, self.launch.config.stages)

            @pl.when(step >= self.launch.config.stages)
            def _():
                plgpu.barrier_wait(self.scratch.empty.at[stage])

            self._bring_queries(head, tile_of(i) * self.launch.config.rows, stage)
            return head, step + 1

        def one(g, step):
            return lax.fori_loop(0, count, bring, (self.first_head + g, step))[1]

        return lax.fori_loop(0, self.launch.heads, one, steps)

    def _bring_queries(self, head: Any, row: Any, stage: Any) -> None:
        """A tile, from row on, and what is known of its queries."""
        refs, scratch, config = self.refs, self.scratch, self.launch.config
        full = scratch.full.at[stage]
        for place, own in row_places(self.b, row, head, config.rows, self.launch.packing):
            scratch.q.at(stage, rows=own).bring(refs.query.at[place], full)
            scratch.do.at(stage, rows=own).bring(refs.dout.at[place], full)
        rows = refs.rows.at[self.b, head, :, pl.ds(row, config.rows)]
        plgpu.copy_gmem_to_smem(rows, scratch.rows.at[stage], full)
        if scratch.query_segments is not None:
            numbers = refs.extras["query_segments"].at[self.b, pl.ds(row, config.rows)]
            plgpu.copy_gmem_to_smem(numbers, scratch.query_segments.at[stage], full)
