"""What is known of a launch of the kernel, and where a block of it is and what it brings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.ops.attention.backward.config import WARPGROUP_ROWS, QueriesConfig
from pallas_kernels.ops.attention.backward.tiles import Inputs, Visits, block_place, hidden, hides_steps, lane_place
from pallas_kernels.ops.attention.gqa_packing import Packing, row_places
from pallas_kernels.ops.attention.masking import Masking, TileRange
from pallas_kernels.ops.attention.problem import Problem
from pallas_kernels.ops.attention.tiles.row_tiles import RowTiles, TileForm


class Scratch(NamedTuple):
    """A block's shared memory, and its barriers.

    q, do: of the block's queries. ring: tiles of keys and of values, in turns; at first of the queries' output. held: a
    warpgroup's queries are there; full, empty: a slot of the ring is there, and done with. key_segments: the numbers of
    a slot's keys, or None.
    """

    q: Any
    do: Any
    ring: Any
    held: Any
    full: Any
    empty: Any
    key_segments: Any


@dataclass(frozen=True, kw_only=True)
class Refs(Inputs):
    """References to the arguments of `query_gradients`, and to its results; None what it has not."""

    dquery: Any
    made_rows: Any
    dbias: Any


@dataclass(frozen=True, kw_only=True)
class Launch:
    """See `query_gradients`. batch: of the arrays. makes_rows: whether rows are made of output and log-sum-exp."""

    problem: Problem
    form: TileForm
    config: QueriesConfig
    batch: int
    makes_rows: bool
    makes_dbias: bool
    period: int | None
    packing: Packing | None

    @property
    def masking(self) -> Masking:
        """Who sees whom."""
        return self.problem.masking

    @property
    def blocks(self) -> int:
        """Of a head."""
        return pl.cdiv(self.masking.queries, self.config.rows)

    @property
    def lanes(self) -> int:
        """Heads of all batch entries, or their parts."""
        return self.batch * self.problem.heads * self.config.parts

    @property
    def key_blocks(self) -> int:
        """Tiles of a head's keys."""
        return pl.cdiv(self.masking.keys, self.config.columns)

    @property
    def lead(self) -> int:
        """Slots of the ring that the output of a block's queries takes."""
        return pl.cdiv(self.config.rows, self.config.columns) if self.makes_rows else 0

    @property
    def hides_steps(self) -> bool:
        """See `tiles.hides_steps`."""
        hides = hides_steps(self.problem, self.form, self.masking.keys, self.config.columns)
        # With two steps, and two warpgroups' masks, a head size of 128 is large enough.
        is_two = self.key_blocks == 2 and self.config.warpgroups == 2
        return hides or (self.masking.is_causal and self.form.size == 128 and is_two)

    def scratch_types(self) -> Scratch:
        """What a block is given."""
        config, form, has_segments = self.config, self.form, self.masking.has_segments
        heads = 1 if self.packing is None else self.packing.heads_of(WARPGROUP_ROWS)
        held = (3 if self.makes_rows else 2) * form.copies * heads
        return Scratch(
            q=form.scratch(config.warpgroups, WARPGROUP_ROWS),
            do=form.scratch(config.warpgroups, WARPGROUP_ROWS),
            ring=form.scratch(config.slots, config.columns),
            held=plgpu.Barrier(num_arrivals=held, num_barriers=config.warpgroups),
            full=plgpu.Barrier(num_arrivals=form.copies + has_segments, num_barriers=config.slots),
            empty=plgpu.Barrier(num_arrivals=config.warpgroups, num_barriers=config.slots),
            key_segments=plgpu.SMEM((config.slots, config.columns), jnp.int32) if has_segments else None,
        )

    def results(self, query: jax.Array) -> list[jax.ShapeDtypeStruct]:
        """dquery or its parts, and what else is made of rows and dbias."""
        shape = query.shape if self.config.parts == 1 else (self.config.parts, *query.shape)
        found = [jax.ShapeDtypeStruct(shape, self.problem.dtype)]
        rows = self.blocks * self.config.rows
        if self.makes_rows:
            found.append(jax.ShapeDtypeStruct((self.batch, self.problem.heads, 3, rows), jnp.float32))
        if self.makes_dbias:
            shape = (self.batch, self.problem.heads, rows, self.key_blocks * self.config.columns)
            found.append(jax.ShapeDtypeStruct(shape, jnp.float32))
        return found


@dataclass(frozen=True, kw_only=True)
class Block:
    """What is known of a block while it runs.

    b, head, key_head: its batch entry, and its heads of queries and of keys. part: of the keys, or None. first_query:
    of its tile. visits: the tiles of keys that it goes over.
    """

    launch: Launch
    refs: Refs
    scratch: Scratch
    b: Any
    head: Any
    part: Any
    key_head: Any
    first_query: Any
    visits: Visits

    @classmethod
    def of(cls, launch: Launch, refs: Refs, scratch: Scratch, *, keys: int) -> Block:
        """The block that runs, called in the kernel. keys: of the array."""
        form, config, problem, masking = launch.form, launch.config, launch.problem, launch.masking
        scratch = scratch._replace(q=form.tiles(scratch.q), do=form.tiles(scratch.do), ring=form.tiles(scratch.ring))
        # Where attention is causal, the last queries are those that see the most keys.
        place, lane = block_place(
            lax.axis_index("block"),
            tiles=launch.blocks,
            lanes=launch.lanes,
            lane_bytes=-(-4 * keys * form.size // problem.group),
        )
        tile_index = launch.blocks - 1 - place
        b, head, part = lane_place(lane, problem.heads, config.parts)
        key_head = lax.div(head, problem.group)
        first_query = tile_index * config.rows
        if "tiles" in refs.extras:
            tiles = TileRange(*(refs.extras["tiles"][b, tile_index, i] for i in range(4)))
        else:
            tiles = masking.key_tiles(first_query, config.rows, config.columns)
        if part is not None:
            tiles = _part_of(tiles, part, config.parts)
        if launch.makes_dbias:
            tiles = tiles._replace(first=0, last=launch.key_blocks)
        visits = Visits(tiles=hidden(tiles) if launch.hides_steps else tiles)
        return cls(
            launch=launch,
            refs=refs,
            scratch=scratch,
            b=b,
            head=head,
            part=part,
            key_head=key_head,
            first_query=first_query,
            visits=visits,
        )

    def output_of(self, warpgroup: Any) -> RowTiles:
        """Where the output of a warpgroup's queries is, until the first keys come."""
        row, columns = warpgroup * WARPGROUP_ROWS, self.launch.config.columns
        slot, first = lax.div(row, columns), lax.rem(row, columns)
        return self.scratch.ring.at(slot, rows=pl.ds(first, WARPGROUP_ROWS))

    def bring(self) -> None:
        """The work of the warpgroup that brings operands."""
        for i in range(self.launch.config.warpgroups):
            self._bring_queries(i)
        visits, config, empty = self.visits, self.launch.config, self.scratch.empty
        n = lax.fori_loop(0, visits.masked, self._bringing(visits.masked_tile), jnp.int32(self.launch.lead))
        n = lax.fori_loop(0, visits.full, self._bringing(visits.full_tile), n)

        # No barrier may be left with an arrival that nobody has seen.
        def drain(i, _):
            plgpu.barrier_wait(empty.at[lax.rem(i, config.slots)])

        lax.fori_loop(jnp.maximum(n - config.slots, 0), n, drain, None)

    def _bring_queries(self, i: int) -> None:
        """Those of warpgroup i, with their dout, and their output where rows are made of it."""
        launch, refs, scratch = self.launch, self.refs, self.scratch
        tiles = [(refs.query, scratch.q.at(i)), (refs.dout, scratch.do.at(i))]
        if launch.makes_rows:
            tiles.append((refs.rows[0], self.output_of(i)))
        first = self.first_query + i * WARPGROUP_ROWS
        for place, own in row_places(self.b, first, self.head, WARPGROUP_ROWS, launch.packing):
            for ref, tile in tiles:
                tile.part(own).bring(ref.at[place], scratch.held.at[i])

    def _bringing(self, tile_of: Callable[[Any], Any]) -> Callable[[Any, Any], Any]:
        """The body of a loop that brings a tile of keys, and then one of values."""
        config, refs, scratch = self.launch.config, self.refs, self.scratch

        def step(i, n):
            place = (self.b, pl.ds(tile_of(i) * config.columns, config.columns), self.key_head)
            for ref in (refs.key, refs.value):
                slot = lax.rem(n, config.slots)

                @pl.when(n >= config.slots)
                def _(slot=slot):
                    plgpu.barrier_wait(scratch.empty.at[slot])

                scratch.ring.at(slot).bring(ref.at[place], scratch.full.at[slot])
                if scratch.key_segments is not None:
                    # With values too, since a slot has now keys and now values.
                    numbers = refs.extras["key_segments"].at[place[0], place[1]]
                    plgpu.copy_gmem_to_smem(numbers, scratch.key_segments.at[slot], scratch.full.at[slot])
                n = n + 1
            return n

        return step


def _part_of(tiles: TileRange, part: Any, parts: int) -> TileRange:
    """The tiles of one of so many parts, of tiles of which none in front of the full ones is masked."""
    each = lax.div(tiles.last - tiles.first + parts - 1, jnp.int32(parts))
    first = jnp.minimum(tiles.first + part * each, tiles.last)
    last = jnp.minimum(first + each, tiles.last)
    return TileRange(first, first, jnp.clip(tiles.full_last, first, last), last)
