"""A launch of the fused kernel, and a block of it: tiles, shared memory, order of steps, and turns to add."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.ops.attention.backward.config import FUSED_KEYS, FUSED_ROWS, WARPGROUPS, WAVES
from pallas_kernels.ops.attention.backward.tiles import Inputs, KeyGradients, Visits, block_place, lane_place
from pallas_kernels.ops.attention.launch import MORE_FOR_PRODUCER, REGISTERS
from pallas_kernels.ops.attention.masking import Masking
from pallas_kernels.ops.attention.problem import Problem
from pallas_kernels.ops.attention.row_tiles import RowTiles, TileForm
from pallas_kernels.primitives.gemm.shared import shared
from pallas_kernels.primitives.platform import target_device

STAGES = 2
"""Steps of queries in shared memory at once."""
SHARES = 2
"""Shares of dquery in shared memory at once: a block computes on while it waits for its turn to add one."""
PART = 64
"""Rows and columns of what one warpgroup makes of a step's dquery: half the rows, or half the columns. Of 96 columns,
which lie in shared memory by 32, each makes 64 and hands on 48."""

FINISHED_TILES = 16
"""Tiles of queries of a block that finishes: few, so that the last ones to be ready are shared among many blocks."""
_SWIZZLE = 128
"""Bytes, at most."""


@dataclass(frozen=True)
class Done:
    """Where parts of dquery lie on their way to device memory, as TMA takes rows that are no whole groups.

    ref: to (slots, warpgroups, panels, rows, columns of a panel).
    """

    ref: Any

    @staticmethod
    def scratch(slots: int, warpgroups: int, rows: int, columns: int, dtype: jnp.dtype) -> Any:
        """The scratch type; columns: of a part. As many bytes as the part's sum has, which begins at the same place."""
        width = math.gcd(columns, _SWIZZLE // dtype.itemsize)
        swizzle = plgpu.SwizzleTransform(width * dtype.itemsize)  # pyright: ignore[reportAbstractUsage]
        room = jnp.dtype(jnp.float32).itemsize // dtype.itemsize
        return plgpu.SMEM((slots, warpgroups, room * columns // width, rows, width), dtype, transforms=(swizzle,))

    def _panels(self, slot: Any, warpgroup: Any, columns: int) -> Iterator[tuple[Any, Any]]:
        width = self.ref.shape[-1]
        for i in range(columns // width):
            yield pl.ds(i * width, width), self.ref.at[slot, warpgroup, i]

    def store(self, slot: Any, warpgroup: Any, values: jax.Array) -> None:
        """By the threads of a warpgroup."""
        for columns, panel in self._panels(slot, warpgroup, values.shape[1]):
            panel[...] = values[:, columns.start : columns.start + columns.size]

    def send(self, slot: Any, warpgroup: Any, target: Any) -> None:
        """By TMA."""
        for columns, panel in self._panels(slot, warpgroup, target.shape[1]):
            plgpu.copy_smem_to_gmem(panel, target.at[:, columns])


class Scratch(NamedTuple):
    """A block's shared memory, and its barriers.

    k, v: the block's keys and values. q, do, qrows: of the queries of a step, with what each query's row needs. ds: the
    score gradients of a step. share: of dquery; done: in the same place, dquery itself. held: keys and values are
    there; full, empty: a stage of queries is there, and done with; met: both warpgroups have stored score gradients;
    made, taken: a share is there, and added; fetched: the sum of others' is there.
    """

    k: Any
    v: Any
    q: Any
    do: Any
    qrows: Any
    ds: Any
    share: Any
    held: Any
    full: Any
    empty: Any
    met: Any
    made: Any
    taken: Any
    fetched: Any
    done: Any = None


@dataclass(frozen=True, kw_only=True)
class Launch:
    """A launch and its form, which is the fastest one by head size and mask; TUNING.md has the measurements.

    form: of tiles of queries and keys. parts: blocks that share a group's heads.
    """

    problem: Problem
    form: TileForm
    parts: int

    @property
    def heads_inside(self) -> bool:
        """Whether a block goes over the heads of a group for each tile of queries; else over all tiles for each head.

        A block comes to a tile of any head after so many steps as the block that it waits for, then: under a causal
        mask, short blocks need not wait for long ones to come to the group's last head.
        """
        return self.masking.is_causal

    @property
    def has_finishers(self) -> bool:
        """Whether more blocks make dquery of the sums, see `Finisher`.

        Else the last block that has a share of it does, without storing a sum of its own.
        """
        return not self.masking.is_causal

    @property
    def section_blocks(self) -> int:
        """See `block_place`."""
        return WAVES * target_device().core_count if self.masking.is_causal else 0

    @property
    def overlaps(self) -> bool:
        """Whether a step's product for dkey may be unfinished when the next step's products begin.

        There are no registers for it beside a mask, nor beside scores of 128 queries.
        """
        return self.size == 128 or (self.size == 64 and self.masking.is_causal)

    @property
    def warps_apart(self) -> bool:
        """Whether one warp loads queries, and for each of the shares there is another one that adds it.

        Queries come, and a share is added, while the one before waits for its turn or to be done. Else one warp does it
        all. With warps apart, places are hidden from the compiler: ptxas spills otherwise.
        """
        return self.size != 64 or not self.masking.is_causal

    def score_parts(self, is_masked: bool) -> int:
        """Parts of a step's scores that are computed one after the other, for want of registers."""
        return 2 if self.splits_rows and (self.masking.is_causal or is_masked) else 1

    @property
    def registers(self) -> tuple[int, int]:
        """Of threads of the producer and of the consumers."""
        is_short = self.masking.is_causal and self.size < 128 and self.form.in_panels
        return MORE_FOR_PRODUCER if is_short else REGISTERS

    @property
    def automatic_barriers(self) -> bool:
        """Whether Pallas adds barriers of its own, with which this form is faster.

        The kernel needs none: what a warpgroup stores is read by TMA or by products, after `commit_smem`; or by its own
        threads, after one of the block's barriers, at which all of them arrive.
        """
        return self.size == 64 and not self.masking.is_causal

    @property
    def size(self) -> int:
        """Of a head."""
        return self.problem.head_size

    @property
    def masking(self) -> Masking:
        """Who sees whom."""
        return self.problem.masking

    @property
    def rows(self) -> int:
        """Queries of a step."""
        return FUSED_ROWS[self.size]

    @property
    def splits_rows(self) -> bool:
        """Whether a warpgroup makes half the rows of a step's dquery, and not half the columns."""
        return self.rows > PART

    @property
    def width(self) -> int:
        """Columns of dquery that a warpgroup hands on."""
        return self.size if self.splits_rows else self.size // WARPGROUPS

    @property
    def overlap(self) -> int:
        """Columns of dquery that both warpgroups make."""
        return WARPGROUPS * (PART - self.width)

    def made_columns(self, keys: RowTiles, warpgroup: Any) -> list[tuple[int, Any]]:
        """What a warpgroup multiplies score gradients by, with the first columns of the products in what it makes."""
        if not self.form.in_panels:
            (whole,) = (panel for _, panel in keys.panels())
            first = warpgroup * (PART - self.overlap)
            return [(0, whole if self.splits_rows else whole.at[:, pl.ds(first, PART)])]
        width = self.size // self.form.copies
        first = 0 if self.splits_rows else warpgroup * ((PART - self.overlap) // width)
        return [(i * width, keys.read.at[first + i, keys.rows]) for i in range(PART // width)]

    def own_columns(self, values: jax.Array, warpgroup: Any) -> jax.Array:
        """Those that it hands on, of what it makes."""
        if not self.overlap:
            return values
        first, second = values[:, : self.width], values[:, PART - self.width :]
        return lax.cond(warpgroup == 0, lambda: first, lambda: second)

    @property
    def swizzle(self) -> int:
        """Bytes over which operands are swizzled, all of them alike."""
        return plgpu.find_swizzle(self.size * self.problem.dtype.itemsize * 8)

    @property
    def query_tiles(self) -> int:
        """Of a head."""
        return pl.cdiv(self.masking.queries, self.rows)

    @property
    def tiles(self) -> int:
        """Of queries, of all heads of all batch entries."""
        return self.problem.batch * self.problem.heads * self.query_tiles

    @property
    def key_tiles(self) -> int:
        """Of a lane."""
        return pl.cdiv(self.masking.keys, FUSED_KEYS)

    @property
    def group(self) -> int:
        """Query heads that a block goes over."""
        return self.problem.group // self.parts

    @property
    def lanes(self) -> int:
        """Key heads of all batch entries, or their parts, whose blocks share queries."""
        return self.problem.batch * self.problem.key_heads * self.parts

    @property
    def adders(self) -> int:
        """Blocks that add shares; the finishers come behind them."""
        return self.key_tiles * self.lanes

    @property
    def lines(self) -> int:
        """Of what queries' rows need. Numbers of queries, for masks, have no room with a head size of 64."""
        return 2 if self.splits_rows else 3

    @property
    def finishers(self) -> int:
        """Blocks that make dquery of the sums."""
        blocks = self.problem.batch * self.problem.heads * pl.cdiv(self.query_tiles, FINISHED_TILES)
        return blocks if self.has_finishers else 0

    def fetched_of(self, scratch: Scratch, slot: Any) -> Any:
        """The barrier of the sum that is loaded to where a share was."""
        return scratch.fetched.at[slot] if self.warps_apart else scratch.fetched

    def part_of(self, ref: Any, b: Any, head: Any, query_tile: Any, i: Any) -> Any:
        """What warpgroup i hands on of a tile of queries' dquery, and where it is summed."""
        row, column = (i * PART, 0) if self.splits_rows else (0, i * self.width)
        return ref.at[b, pl.ds(query_tile * self.rows + row, PART), head, pl.ds(column, self.width)]

    def results(self, inputs: Inputs) -> list[jax.ShapeDtypeStruct]:
        """dquery, dkey and dvalue or their parts in one array, and the sums."""
        # Whole tiles of sums: with groups of rows TMA does not stop at any query, as it does without.
        whole = (self.problem.batch, self.query_tiles * self.rows, self.problem.heads, self.size)
        dquery = jax.ShapeDtypeStruct(inputs.query.shape, self.problem.dtype)
        return [dquery, *KeyGradients.types(inputs.key, self.parts), jax.ShapeDtypeStruct(whole, jnp.float32)]

    def scratch_types(self) -> Scratch:
        """What a block is given."""
        dtype, barrier, form = self.problem.dtype, plgpu.Barrier, self.form
        shares = (SHARES, WARPGROUPS, PART, self.width)
        return Scratch(
            k=form.scratch(FUSED_KEYS),
            v=form.scratch(FUSED_KEYS),
            q=form.scratch(STAGES, self.rows),
            do=form.scratch(STAGES, self.rows),
            qrows=plgpu.SMEM((STAGES, self.lines, self.rows), jnp.float32),
            ds=shared((2, FUSED_KEYS, self.rows), dtype, swizzle=self.swizzle),
            share=plgpu.RefUnion(shared(shares, jnp.float32), Done.scratch(*shares, dtype)),
            held=barrier(num_arrivals=2 * form.copies),
            full=barrier(num_arrivals=1 + 2 * form.copies, num_barriers=STAGES),
            empty=barrier(num_arrivals=WARPGROUPS, num_barriers=STAGES),
            met=barrier(num_arrivals=WARPGROUPS),
            made=barrier(num_arrivals=WARPGROUPS, num_barriers=SHARES),
            taken=barrier(num_barriers=SHARES),
            fetched=barrier(num_arrivals=WARPGROUPS, num_barriers=SHARES if self.warps_apart else 1),
        )


@dataclass(frozen=True, kw_only=True)
class Steps:
    """Full tiles of queries come first, and of them and of those that are masked the last one first.

    visits: the tiles of queries, of each of `group` heads from `first_head` on. heads_inside: see `Launch`.
    """

    visits: Visits
    first_head: Any
    group: int
    heads_inside: bool

    @property
    def full(self) -> Any:
        """Steps with full tiles."""
        return self.group * self.visits.full

    @property
    def count(self) -> Any:
        """All of them."""
        return self.full + self.group * self.visits.masked

    def place(self, n: Any, is_masked: bool | None = None) -> tuple[Any, Any]:
        """(head, tile of queries) of a step; is_masked: whether its tile is, where that is known."""
        visits, group = self.visits, self.group
        if is_masked is None:
            masked, full = self.place(n, True), self.place(n, False)
            head, tile = (jnp.where(n >= self.full, *pair) for pair in zip(masked, full, strict=True))
            return head, tile
        i = n - self.full if is_masked else n
        # No count is divided by; at least 1 all the same, without which ptxas spills six registers.
        count = jnp.maximum(visits.masked if is_masked else visits.full, 1)
        if self.heads_inside and group > 1:
            g, i = lax.rem(i, group), count - 1 - lax.div(i, group)
        else:
            g, i = lax.div(i, count), count - 1 - lax.rem(i, count)
        return self.first_head + g, visits.masked_tile(i) if is_masked else visits.full_tile(i)


@dataclass(frozen=True)
class Outputs:
    """References to the results, and to the sums of shares."""

    dquery: Any
    gradients: KeyGradients
    sums: Any


class Turn(NamedTuple):
    """A block's turn to add to a tile of queries.

    head, query_tile: whose. place: of the semaphore. before: blocks that add earlier.
    """

    head: Any
    query_tile: Any
    place: Any
    before: Any


@dataclass(frozen=True, kw_only=True)
class Block:
    """What is known of a block while it runs.

    tile: the number of its tile of keys, of which first_key is the first. b, key_head: its batch entry and its head.
    part: of the head's group, or None.
    visits: the tiles of queries that see these keys, full ones and masked. walk: their order, over the heads of a
    group, in so many steps, full_steps of them with full tiles. turns: a semaphore for each sum, which counts the
    blocks that have added to it.
    """

    launch: Launch
    inputs: Inputs
    outputs: Outputs
    scratch: Scratch
    tile: Any
    b: Any
    key_head: Any
    part: Any
    first_key: Any
    visits: Visits
    walk: Steps
    full_steps: Any
    steps: Any
    turns: Any

    @classmethod
    def of(cls, launch: Launch, inputs: Inputs, outputs: Outputs, scratch: Scratch, number: Any) -> Block:
        """The block of that number, called in the kernel."""
        problem = launch.problem
        tiles = {name: launch.form.tiles(getattr(scratch, name)) for name in ("k", "v", "q", "do")}
        share, done = scratch.share
        scratch = scratch._replace(**tiles, share=share, done=Done(done))
        tile, lane = block_place(
            number,
            tiles=launch.key_tiles,
            lanes=launch.lanes,
            # Queries and their cotangents, and the sums in float32.
            lane_bytes=8 * launch.group * inputs.query.shape[1] * launch.size,
            section_blocks=launch.section_blocks,
        )
        b, key_head, part = lane_place(lane, problem.key_heads, launch.parts)
        if launch.warps_apart:
            tile, b, key_head, part = lax.optimization_barrier((tile, b, key_head, part))
        first_key = tile * FUSED_KEYS
        visits = Visits(tiles=launch.masking.query_tiles(first_key, FUSED_KEYS, launch.rows))
        first_head = key_head * problem.group
        if part is not None:
            first_head = first_head + part * launch.group
        walk = Steps(
            visits=visits,
            first_head=first_head,
            group=launch.group,
            heads_inside=launch.heads_inside,
        )
        return cls(
            launch=launch,
            inputs=inputs,
            outputs=outputs,
            scratch=scratch,
            tile=tile,
            b=b,
            key_head=key_head,
            part=part,
            first_key=first_key,
            visits=visits,
            walk=walk,
            full_steps=walk.full,
            steps=walk.count,
            turns=pl.get_global(plgpu.SemaphoreType.REGULAR((launch.tiles,))),
        )

    def turn(self, n: Any) -> Turn:
        """That of a step."""
        head, query_tile = self.walk.place(n)
        place = (self.b * self.launch.problem.heads + head) * self.launch.query_tiles + query_tile
        # The tiles of keys that a tile of queries sees begin with the first.
        return Turn(head, query_tile, place, self.tile)

    def is_last_of(self, query_tile: Any, is_masked: Any) -> Any:
        """Whether no block adds to a tile of queries after this one, which then makes dquery of it."""
        launch, masking = self.launch, self.launch.masking
        if launch.has_finishers:
            return False
        if masking.right is None:
            return self.tile == launch.key_tiles - 1
        if masking.right == 0 and masking.queries <= masking.keys and masking.keys % FUSED_KEYS == 0:
            # Known where the program is made: registers are short.
            return is_masked
        return self.tile == masking.key_tiles(query_tile * launch.rows, launch.rows, FUSED_KEYS).last - 1
