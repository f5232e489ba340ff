"""A launch of the kernel by keys and a running block of it: tiles, shared memory, the order of steps and of turns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.ops.attention.backward.config import WARPGROUPS, KeysConfig
from pallas_kernels.ops.attention.backward.tiles import Inputs, block_place
from pallas_kernels.ops.attention.launch import Lane
from pallas_kernels.ops.attention.masking import TileRange
from pallas_kernels.ops.attention.problem import Problem
from pallas_kernels.primitives.row_tiles import RowTiles, TileForm, shared

SHARES = 2
"""Shares of dquery in shared memory at once: a block keeps computing while it waits for its turn to add one."""
PART = 64
"""Rows and columns of a warpgroup's product for a step's share: half the rows, or half the columns. Of 96 columns,
which lie in shared memory by 32, each warpgroup computes 64 and gives 48 to the producer."""
FINISHED_TILES = 16
"""Query tiles of a finisher: few, so that many blocks share the last ones to be ready."""


class Scratch(NamedTuple):
    """A block's shared memory and barriers; None for one that the launch does not have.

    k, v: the key tile and its values, in the end dkey and dvalue. q, do, rows, query_segments: a ring of query tiles,
    with dout, `gradients.rows_of` and segments. held: keys and values have arrived. full, empty: a stage of the ring
    has arrived, or is free. met: both warpgroups are there.

    Of shares of dquery: ds: the score gradients of a step. share: the shares; dquery: in the same place, dquery itself.
    share_full, share_empty: a share is there, or added. sum_full: the sum of the other blocks' shares has arrived.
    """

    k: Any
    v: Any
    q: Any
    do: Any
    rows: Any
    query_segments: Any
    held: Any
    full: Any
    empty: Any
    met: Any
    ds: Any = None
    share: Any = None
    share_full: Any = None
    share_empty: Any = None
    sum_full: Any = None
    dquery: Any = None


def has_warps_apart(problem: Problem) -> bool:
    """Whether the producer has a warp that loads queries and one for each share of dquery; else one warp does it all.

    Loads and adds then go on while another share waits for its turn. The block's place is hidden from the compiler:
    ptxas spills otherwise.
    """
    return problem.head_size != 64 or not problem.masking.is_causal


@dataclass(frozen=True, kw_only=True)
class Launch:
    """Static facts of a launch.

    problem: with the parts of a group's heads, which blocks share, as so many key heads.
    """

    problem: Problem
    config: KeysConfig

    @property
    def adds(self) -> bool:
        """Whether blocks add shares of dquery."""
        return self.config.adds_dquery

    @property
    def has_finishers(self) -> bool:
        """Whether further blocks compute dquery from the sums; else the last block that adds to it does."""
        return self.adds and not self.problem.masking.is_causal

    @property
    def warps_apart(self) -> bool:
        """See `has_warps_apart`."""
        return self.adds and has_warps_apart(self.problem)

    @property
    def automatic_barriers(self) -> bool:
        """Whether Pallas adds its own barriers. With shares, only the form that is faster with them has them.

        It does not need them: what a warpgroup stores is read by TMA or products, after `commit_smem`; or by its own
        threads, after one of the block's barriers, at which all of them arrive.
        """
        return not self.adds or (self.problem.head_size == 64 and not self.problem.masking.is_causal)

    @property
    def query_tiles(self) -> int:
        """Query tiles of a head."""
        return pl.cdiv(self.problem.masking.queries, self.config.rows)

    @property
    def key_tiles(self) -> int:
        """Key tiles of a lane."""
        return pl.cdiv(self.problem.masking.keys, self.config.columns)

    @property
    def blocks(self) -> int:
        """Blocks with keys; the finishers come after them."""
        return self.key_tiles * self.problem.batch * self.problem.key_heads

    @property
    def finishers(self) -> int:
        """Blocks that compute dquery from the sums."""
        blocks = self.problem.batch * self.problem.heads * pl.cdiv(self.query_tiles, FINISHED_TILES)
        return blocks if self.has_finishers else 0

    @property
    def lines(self) -> int:
        """Lines of `gradients.rows_of` in shared memory: with 128 queries a step, their numbers have no room."""
        return 2 if self.splits_rows else 3

    @property
    def splits_rows(self) -> bool:
        """Whether a warpgroup computes half the rows of a share; else half the columns."""
        return self.config.rows > PART

    @property
    def width(self) -> int:
        """Columns of a share that a warpgroup gives to the producer."""
        return self.problem.head_size if self.splits_rows else self.problem.head_size // WARPGROUPS

    def own_columns(self, values: jax.Array, warpgroup: Any) -> jax.Array:
        """The columns of a warpgroup's product that it gives to the producer."""
        if self.width == PART:
            return values
        first, second = values[:, : self.width], values[:, PART - self.width :]
        return lax.cond(warpgroup == 0, lambda: first, lambda: second)

    def sum_full(self, scratch: Scratch, slot: Any) -> Any:
        """The barrier of the sum that is loaded to a share's slot."""
        return scratch.sum_full.at[slot] if self.warps_apart else scratch.sum_full

    def part_of(self, ref: Any, b: Any, head: Any, query_tile: Any, i: Any) -> Any:
        """Warpgroup i's part of a query tile, in dquery or in the sums."""
        row, column = (i * PART, 0) if self.splits_rows else (0, i * self.width)
        return ref.at[b, pl.ds(query_tile * self.config.rows + row, PART), head, pl.ds(column, self.width)]

    def turn(self, batch: Any, head: Any, query_tile: Any) -> Any:
        """The place of a query tile's semaphore."""
        return (batch * self.problem.heads + head) * self.query_tiles + query_tile

    def results(self, inputs: Inputs) -> list[jax.ShapeDtypeStruct]:
        """The result types: with shares the sums and dquery; dkey and dvalue, or one array with the parts of both."""
        gradients = [jax.ShapeDtypeStruct(array.shape, array.dtype) for array in (inputs.key, inputs.value)]
        if self.config.parts > 1:
            batch, keys, _, size = inputs.key.shape
            gradients = [jax.ShapeDtypeStruct((2, batch, keys, self.problem.key_heads, size), inputs.key.dtype)]
        if not self.adds:
            return gradients
        # Sums have whole tiles: with groups of rows TMA does not stop at any query, as it does without.
        whole = (self.problem.batch, self.query_tiles * self.config.rows, self.problem.heads, self.problem.head_size)
        dquery = jax.ShapeDtypeStruct(inputs.query.shape, self.problem.dtype)
        return [jax.ShapeDtypeStruct(whole, jnp.float32), dquery, *gradients]

    def part_form(self) -> TileForm:
        """The layout of parts of dquery: in panels, as TMA takes rows that are no whole groups of eight."""
        return TileForm(size=self.width, dtype=self.problem.dtype, in_panels=True)

    def scratch_types(self) -> Scratch:
        """The types of a block's scratch."""
        config, (form, value_form), barrier = self.config, self.problem.forms, plgpu.Barrier
        stages, has_segments = config.stages, self.problem.masking.has_segments
        scratch = Scratch(
            k=form.scratch(config.columns),
            v=value_form.scratch(config.columns),
            q=form.scratch(stages, config.rows),
            do=value_form.scratch(stages, config.rows),
            rows=plgpu.SMEM((stages, self.lines, config.rows), jnp.float32),
            query_segments=plgpu.SMEM((stages, config.rows), jnp.int32) if has_segments else None,
            held=barrier(num_arrivals=form.copies + value_form.copies),
            full=barrier(num_arrivals=1 + form.copies + value_form.copies + has_segments, num_barriers=stages),
            empty=barrier(num_arrivals=WARPGROUPS, num_barriers=stages),
            met=barrier(num_arrivals=WARPGROUPS),
        )
        if not self.adds:
            return scratch
        dtype, panels = self.problem.dtype, self.part_form().panels
        swizzle = plgpu.SwizzleTransform(self.width // panels * dtype.itemsize)  # pyright: ignore[reportAbstractUsage]
        # Parts of dquery take as many bytes as the float32 sums in the same place.
        shape = (SHARES, WARPGROUPS, 4 // dtype.itemsize * panels, PART, self.width // panels)
        swizzle_of_ds = plgpu.find_swizzle(self.problem.head_size * dtype.itemsize * 8)
        return scratch._replace(
            ds=shared((2, config.columns, config.rows), dtype, swizzle=swizzle_of_ds),
            share=plgpu.RefUnion(
                shared((SHARES, WARPGROUPS, PART, self.width), jnp.float32),
                plgpu.SMEM(shape, dtype, transforms=(swizzle,)),
            ),
            share_full=barrier(num_arrivals=WARPGROUPS, num_barriers=SHARES),
            share_empty=barrier(num_barriers=SHARES),
            sum_full=barrier(num_arrivals=WARPGROUPS, num_barriers=SHARES if self.warps_apart else 1),
        )


class Outputs(NamedTuple):
    """References to the results, and to the sums of shares; None for those that the launch does not have."""

    sums: Any
    dquery: Any
    dkey: Any
    dvalue: Any


@dataclass(frozen=True)
class Block:
    """A running block with keys; all roles use it.

    tile: the number of its key tile. lane: the batch entry, and the key head or a part of it. first_head: of its query
    heads. first_key: of the key tile. visits: the query tiles that see these keys. first_steps, steps:
    those of the first loop, and all: with shares full tiles come first, else masked ones. turns: a semaphore for each
    query tile, which counts the blocks that have added to its sum.
    """

    launch: Launch
    inputs: Inputs
    outputs: Outputs
    scratch: Scratch
    tile: Any
    lane: Lane
    first_head: Any
    first_key: Any
    visits: TileRange
    first_steps: Any
    steps: Any
    turns: Any

    @classmethod
    def of(cls, launch: Launch, inputs: Inputs, results: Sequence[Any], scratch: Scratch, number: Any) -> Block:
        """The block with this number, called in the kernel. results: references to `Launch.results`."""
        problem, config = launch.problem, launch.config
        sums, dquery, *gradients = results if launch.adds else (None, None, *results)
        outputs = Outputs(sums, dquery, *(gradients if config.parts == 1 else (gradients[0].at[i] for i in (0, 1))))
        form, value_form = problem.forms
        tiles = {"k": form, "q": form, "v": value_form, "do": value_form}
        scratch = scratch._replace(**{name: own.tiles(getattr(scratch, name)) for name, own in tiles.items()})
        turns = None
        if launch.adds:
            share, dquery = scratch.share
            parts = RowTiles(form=launch.part_form(), landed=dquery, read=dquery)
            scratch = scratch._replace(share=share, dquery=parts)
            turns = pl.get_global(plgpu.SemaphoreType.REGULAR((problem.batch * problem.heads * launch.query_tiles,)))
        # Under a causal mask the first keys are seen by the most queries. A section has one wave of blocks where all
        # do the same work and add.
        lanes, waves = problem.batch * problem.key_heads, 1 if launch.has_finishers else 2
        tile, lane = block_place(number, tiles=launch.key_tiles, lanes=lanes, waves=waves)
        lane = Lane.of(lane, problem.key_heads)
        if launch.warps_apart:
            tile, lane = lax.optimization_barrier((tile, lane))
        first_key = tile * config.columns
        if problem.masking.has_segments:
            visits = TileRange.of(inputs.extras["tiles"], lane.batch, tile)
        else:
            visits = problem.masking.query_tiles(first_key, config.columns, config.rows)
        first_head = lane.head * problem.group
        first_steps = problem.group * (visits.full if launch.adds else visits.masked)
        steps = problem.group * visits.full + problem.group * visits.masked
        places = (tile, lane, first_head, first_key)
        return cls(launch, inputs, outputs, scratch, *places, visits, first_steps, steps, turns)

    def queries(self, n: Any, is_masked: bool | None = None) -> tuple[Any, Any]:
        """(head, query tile) of a step, with shares from the last tile on. is_masked: of the tile, if known."""
        visits, launch, heads = self.visits, self.launch, self.launch.problem.group
        # `first_steps`, not captured: LLVM compiles a captured value differently.
        first_steps = heads * (visits.full if launch.adds else visits.masked)
        if is_masked is None:
            later, sooner = self.queries(n, launch.adds), self.queries(n, not launch.adds)
            head, tile = (jnp.where(n >= first_steps, *pair) for pair in zip(later, sooner, strict=True))
            return head, tile
        i = n - first_steps if is_masked == launch.adds else n
        # Nothing is divided by a count of zero; yet without the maximum ptxas spills six registers.
        count = jnp.maximum(visits.masked if is_masked else visits.full, 1)
        if launch.adds and launch.problem.masking.is_causal and heads > 1:
            # Over the heads of a group for each query tile, so that a block comes to a tile of any head after as many
            # steps as the block that it waits for: short blocks need not wait for long ones to come to the last head.
            g, i = lax.rem(i, heads), lax.div(i, heads)
        else:
            g, i = lax.div(i, count), lax.rem(i, count)
        i = count - 1 - i if launch.adds else i
        return self.first_head + g, visits.masked_tile(i) if is_masked else visits.full_tile(i)

    def is_last_of(self, query_tile: Any, is_masked: Any) -> Any:
        """Whether this block is the last to add to a query tile, and computes dquery."""
        masking, config = self.launch.problem.masking, self.launch.config
        if self.launch.has_finishers:
            return False
        if masking.queries <= masking.keys:
            return is_masked  # static, to save registers
        return self.tile == masking.key_tiles(query_tile * config.rows, config.rows, config.columns).last - 1
