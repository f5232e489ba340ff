"""A launch of the fused kernel and a running block of it: tiles, shared memory, the order of steps and of turns."""

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

from pallas_kernels.ops.attention.backward.config import FUSED_KEYS, FUSED_ROWS, WARPGROUPS
from pallas_kernels.ops.attention.backward.tiles import Inputs, KeyGradients, Lane, Visits, block_place
from pallas_kernels.ops.attention.launch import MORE_FOR_PRODUCER, REGISTERS
from pallas_kernels.ops.attention.masking import Masking
from pallas_kernels.ops.attention.problem import Problem
from pallas_kernels.primitives.row_tiles import RowTiles, TileForm, shared

STAGES = 2
"""Steps of queries in shared memory at once."""
SHARES = 2
"""Shares of dquery in shared memory at once: a block keeps computing while it waits for its turn to add one."""
PART = 64
"""Rows and columns of a warpgroup's product for a step's share: half the rows, or half the columns. Of 96 columns,
which lie in shared memory by 32, each warpgroup computes 64 and gives 48 to the producer."""
FINISHED_TILES = 16
"""Query tiles of a finisher: few, so that many blocks share the last ones to be ready."""
_SWIZZLE = 128
"""At most so many bytes."""


@dataclass(frozen=True)
class Done:
    """Parts of dquery in shared memory, in panels as TMA takes rows that are no whole groups of eight.

    ref: to (slots, warpgroups, panels, rows, columns of a panel).
    """

    ref: Any

    @staticmethod
    def scratch(slots: int, warpgroups: int, rows: int, columns: int, dtype: jnp.dtype) -> Any:
        """The scratch type of parts with so many columns; as many bytes as the float32 sums in the same place have."""
        width = math.gcd(columns, _SWIZZLE // dtype.itemsize)
        bytes_each = width * dtype.itemsize
        transforms: tuple[Any, ...] = ()
        if bytes_each > 16:  # 16 bytes are not swizzled
            transforms = (plgpu.SwizzleTransform(bytes_each),)  # pyright: ignore[reportAbstractUsage]
        room = jnp.dtype(jnp.float32).itemsize // dtype.itemsize
        return plgpu.SMEM((slots, warpgroups, room * columns // width, rows, width), dtype, transforms=transforms)

    def _panels(self, slot: Any, warpgroup: Any, columns: int) -> Iterator[tuple[Any, Any]]:
        width = self.ref.shape[-1]
        for i in range(columns // width):
            yield pl.ds(i * width, width), self.ref.at[slot, warpgroup, i]

    def store(self, slot: Any, warpgroup: Any, values: jax.Array) -> None:
        """Stores a part from registers."""
        for columns, panel in self._panels(slot, warpgroup, values.shape[1]):
            panel[...] = values[:, columns.start : columns.start + columns.size]

    def send(self, slot: Any, warpgroup: Any, target: Any) -> None:
        """Starts a part's TMA copy to device memory."""
        for columns, panel in self._panels(slot, warpgroup, target.shape[1]):
            plgpu.copy_smem_to_gmem(panel, target.at[:, columns])


class Scratch(NamedTuple):
    """A block's shared memory and barriers.

    k, v: the block's keys and values. q, do, qrows: a ring of query tiles, with dout and `rows_of`. ds: the score
    gradients of a step. share: of dquery; done: in the same place, dquery itself. held: keys and values have arrived.
    full, empty: a stage of the ring has arrived, or is free. met: both warpgroups are there. made, taken: a share is
    there, or added. fetched: the sum of the other blocks' shares has arrived.
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


def has_warps_apart(problem: Problem) -> bool:
    """Returns `Launch.warps_apart` of a problem's launch."""
    return problem.head_size != 64 or not problem.masking.is_causal


@dataclass(frozen=True, kw_only=True)
class Launch:
    """Static facts of a launch: the fastest form by head size and mask; TUNING.md has the measurements.

    parts: blocks that share a group's heads.
    """

    problem: Problem
    form: TileForm
    parts: int

    @property
    def heads_inside(self) -> bool:
        """Whether a block loops over the heads of a group for each query tile, or else over the tiles for each head.

        With heads inside, a block comes to a tile of any head after as many steps as the block that it waits for: under
        a causal mask, short blocks need not wait for long ones to come to the group's last head.
        """
        return self.masking.is_causal

    @property
    def has_finishers(self) -> bool:
        """Whether further blocks compute dquery from the sums; else the last block that adds to it does."""
        return not self.masking.is_causal

    @property
    def waves(self) -> int:
        """Waves of blocks per section of lanes (`block_place`): two if causal, as blocks differ in work, else one."""
        return 2 if self.masking.is_causal else 1

    @property
    def overlaps(self) -> bool:
        """Whether a step's product for dkey may still run when the next step's products begin.

        A mask, or scores of 128 queries, leave no registers for that.
        """
        return self.size == 128 or (self.size == 64 and self.masking.is_causal)

    @property
    def warps_apart(self) -> bool:
        """Whether the producer has a warp that loads queries and one for each of the shares; else one warp does it all.

        Loads and adds then go on while another share waits for its turn. The block's place is hidden from the compiler:
        ptxas spills otherwise.
        """
        return has_warps_apart(self.problem)

    def score_parts(self, is_masked: bool) -> int:
        """Parts of a step's scores that are computed one after the other, to save registers."""
        return 2 if self.splits_rows and (self.masking.is_causal or is_masked) else 1

    @property
    def registers(self) -> tuple[int, int]:
        """Registers of a thread of the producer and of a consumer."""
        has_many_copies = self.form.in_panels or self.width % 16 > 0
        is_short = self.masking.is_causal and self.size < 128 and has_many_copies
        return MORE_FOR_PRODUCER if is_short else REGISTERS

    @property
    def automatic_barriers(self) -> bool:
        """Whether Pallas adds its own barriers, with which this form is faster.

        The kernel does not need them: what a warpgroup stores is read by TMA or products, after `commit_smem`; or by
        its own threads, after one of the block's barriers, at which all of them arrive.
        """
        return self.size == 64 and not self.masking.is_causal

    @property
    def size(self) -> int:
        """The head size."""
        return self.problem.head_size

    @property
    def masking(self) -> Masking:
        """The problem's mask."""
        return self.problem.masking

    @property
    def rows(self) -> int:
        """Queries of a step."""
        return FUSED_ROWS[self.size]

    @property
    def splits_rows(self) -> bool:
        """Whether a warpgroup computes half the rows of a share; else half the columns."""
        return self.rows > PART

    @property
    def width(self) -> int:
        """Columns of a share that a warpgroup gives to the producer."""
        return self.size if self.splits_rows else self.size // WARPGROUPS

    @property
    def overlap(self) -> int:
        """Columns of a share that both warpgroups compute."""
        return WARPGROUPS * (PART - self.width)

    def made_columns(self, keys: RowTiles, warpgroup: Any) -> list[tuple[int, Any]]:
        """The key columns that a warpgroup multiplies score gradients by, each with its first column in the product."""
        if not self.form.in_panels:
            (whole,) = (panel for _, panel in keys.panels())
            first = warpgroup * (PART - self.overlap)
            return [(0, whole if self.splits_rows else whole.at[:, pl.ds(first, PART)])]
        width = self.size // self.form.copies
        first = 0 if self.splits_rows else warpgroup * ((PART - self.overlap) // width)
        return [(i * width, keys.read.at[first + i, keys.rows]) for i in range(PART // width)]

    def own_columns(self, values: jax.Array, warpgroup: Any) -> jax.Array:
        """The columns of a warpgroup's product that it gives to the producer."""
        if not self.overlap:
            return values
        first, second = values[:, : self.width], values[:, PART - self.width :]
        return lax.cond(warpgroup == 0, lambda: first, lambda: second)

    @property
    def query_tiles(self) -> int:
        """Query tiles of a head."""
        return pl.cdiv(self.masking.queries, self.rows)

    @property
    def key_tiles(self) -> int:
        """Key tiles of a lane."""
        return pl.cdiv(self.masking.keys, FUSED_KEYS)

    @property
    def group(self) -> int:
        """Query heads that a block loops over."""
        return self.problem.group // self.parts

    @property
    def lanes(self) -> int:
        """Key heads of all batch entries, times the parts of each."""
        return self.problem.batch * self.problem.key_heads * self.parts

    @property
    def adders(self) -> int:
        """Blocks that add shares; the finishers come after them."""
        return self.key_tiles * self.lanes

    @property
    def lines(self) -> int:
        """Lines of `rows_of` in shared memory: with a head size of 64, queries' numbers have no room."""
        return 2 if self.splits_rows else 3

    @property
    def finishers(self) -> int:
        """Blocks that compute dquery from the sums."""
        blocks = self.problem.batch * self.problem.heads * pl.cdiv(self.query_tiles, FINISHED_TILES)
        return blocks if self.has_finishers else 0

    def fetched_of(self, scratch: Scratch, slot: Any) -> Any:
        """The barrier of the sum that is loaded to a share's slot."""
        return scratch.fetched.at[slot] if self.warps_apart else scratch.fetched

    def part_of(self, ref: Any, b: Any, head: Any, query_tile: Any, i: Any) -> Any:
        """Warpgroup i's part of a query tile, in dquery or in the sums."""
        row, column = (i * PART, 0) if self.splits_rows else (0, i * self.width)
        return ref.at[b, pl.ds(query_tile * self.rows + row, PART), head, pl.ds(column, self.width)]

    def turn(self, batch: Any, head: Any, query_tile: Any) -> Any:
        """The place of a query tile's semaphore."""
        return (batch * self.problem.heads + head) * self.query_tiles + query_tile

    def results(self, inputs: Inputs) -> list[jax.ShapeDtypeStruct]:
        """The result types: dquery, dkey and dvalue or their parts in one array, and the sums."""
        # Sums have whole tiles: with groups of rows TMA does not stop at any query, as it does without.
        whole = (self.problem.batch, self.query_tiles * self.rows, self.problem.heads, self.size)
        dquery = jax.ShapeDtypeStruct(inputs.query.shape, self.problem.dtype)
        return [dquery, *KeyGradients.types(inputs.key, self.parts), jax.ShapeDtypeStruct(whole, jnp.float32)]

    def scratch_types(self) -> Scratch:
        """The types of a block's scratch."""
        dtype, barrier, form = self.problem.dtype, plgpu.Barrier, self.form
        shares = (SHARES, WARPGROUPS, PART, self.width)
        return Scratch(
            k=form.scratch(FUSED_KEYS),
            v=form.scratch(FUSED_KEYS),
            q=form.scratch(STAGES, self.rows),
            do=form.scratch(STAGES, self.rows),
            qrows=plgpu.SMEM((STAGES, self.lines, self.rows), jnp.float32),
            ds=shared((2, FUSED_KEYS, self.rows), dtype, swizzle=plgpu.find_swizzle(self.size * dtype.itemsize * 8)),
            share=plgpu.RefUnion(shared(shares, jnp.float32), Done.scratch(*shares, dtype)),
            held=barrier(num_arrivals=2 * form.copies),
            full=barrier(num_arrivals=1 + 2 * form.copies, num_barriers=STAGES),
            empty=barrier(num_arrivals=WARPGROUPS, num_barriers=STAGES),
            met=barrier(num_arrivals=WARPGROUPS),
            made=barrier(num_arrivals=WARPGROUPS, num_barriers=SHARES),
            taken=barrier(num_barriers=SHARES),
            fetched=barrier(num_arrivals=WARPGROUPS, num_barriers=SHARES if self.warps_apart else 1),
        )


class Outputs(NamedTuple):
    """References to the results, and to the sums of shares."""

    dquery: Any
    gradients: KeyGradients
    sums: Any


@dataclass(frozen=True)
class Block:
    """A running block that adds shares; all roles use it.

    tile: the number of its key tile. lane: the batch entry and key head; its parts share the group's heads. first_head:
    of the query heads. first_key: of the key tile. visits: the query tiles that see these keys. full_steps, steps: with
    full tiles, which come first, and all. turns: a semaphore for each query tile, which counts the blocks that have
    added to its sum.
    """

    launch: Launch
    inputs: Inputs
    outputs: Outputs
    scratch: Scratch
    tile: Any
    lane: Lane
    first_head: Any
    first_key: Any
    visits: Visits
    full_steps: Any
    steps: Any
    turns: Any

    @classmethod
    def of(cls, launch: Launch, inputs: Inputs, outputs: Outputs, scratch: Scratch, number: Any) -> Block:
        """The block with this number, called in the kernel."""
        problem = launch.problem
        tiles = {name: launch.form.tiles(getattr(scratch, name)) for name in ("k", "v", "q", "do")}
        share, done = scratch.share
        scratch = scratch._replace(**tiles, share=share, done=Done(done))
        tile, lane = block_place(number, tiles=launch.key_tiles, lanes=launch.lanes, waves=launch.waves)
        lane = Lane.of(lane, problem.key_heads, launch.parts)
        if launch.warps_apart:
            tile, lane = lax.optimization_barrier((tile, lane))
        first_key = tile * FUSED_KEYS
        visits = Visits(tiles=launch.masking.query_tiles(first_key, FUSED_KEYS, launch.rows))
        first_head = lane.first_query_head(problem.group, launch.group)
        full_steps = launch.group * visits.full
        steps = launch.group * visits.full + launch.group * visits.masked
        turns = pl.get_global(plgpu.SemaphoreType.REGULAR((problem.batch * problem.heads * launch.query_tiles,)))
        places = (tile, lane, first_head, first_key)
        return cls(launch, inputs, outputs, scratch, *places, visits, full_steps, steps, turns)

    def queries(self, n: Any, is_masked: bool | None = None) -> tuple[Any, Any]:
        """(head, query tile) of a step, the last tile first; is_masked: whether the tile is masked, if known."""
        visits, group = self.visits, self.launch.group
        if is_masked is None:
            masked, full = self.queries(n, True), self.queries(n, False)
            head, tile = (jnp.where(n >= group * visits.full, *pair) for pair in zip(masked, full, strict=True))
            return head, tile
        i = n - group * visits.full if is_masked else n  # `full_steps`, not captured: see `consume`
        # Nothing is divided by a count of zero; yet without the maximum ptxas spills six registers.
        count = jnp.maximum(visits.masked if is_masked else visits.full, 1)
        if self.launch.heads_inside and group > 1:
            g, i = lax.rem(i, group), count - 1 - lax.div(i, group)
        else:
            g, i = lax.div(i, count), count - 1 - lax.rem(i, count)
        return self.first_head + g, visits.masked_tile(i) if is_masked else visits.full_tile(i)

    def is_last_of(self, query_tile: Any, is_masked: Any) -> Any:
        """Whether this block is the last to add to a query tile, and computes dquery."""
        launch, masking = self.launch, self.launch.masking
        if launch.has_finishers:
            return False
        if masking.right is None:
            return self.tile == launch.key_tiles - 1
        if masking.right == 0 and masking.queries <= masking.keys and masking.keys % FUSED_KEYS == 0:
            # Static, to save registers.
            return is_masked
        return self.tile == masking.key_tiles(query_tile * launch.rows, launch.rows, FUSED_KEYS).last - 1
