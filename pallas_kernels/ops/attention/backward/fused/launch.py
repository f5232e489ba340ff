"""What is known of a launch of the fused kernel before it runs: its tiles, its shared memory, and where sums lie."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.ops.attention.backward.config import WARPGROUP_ROWS, FusedConfig
from pallas_kernels.ops.attention.backward.fused.finish import Done, Finishers
from pallas_kernels.ops.attention.backward.fused.spread import SUMS, Spread
from pallas_kernels.ops.attention.masking import Masking
from pallas_kernels.ops.attention.problem import Problem
from pallas_kernels.ops.attention.tiles.row_tiles import RowTiles, TileForm
from pallas_kernels.primitives.gemm.shared import shared

ROWS = {64: 128, 96: 64, 128: 64}
"""Queries a step, by head size: as many as there are registers for."""
WARPGROUPS = 2
"""That compute."""
COLUMNS = WARPGROUPS * WARPGROUP_ROWS
"""Keys of a block."""
PART = 64
"""Rows and columns of what one warpgroup makes of a step's dquery: half the rows, or half the columns. Of 96 columns,
which lie in shared memory by 32, each makes 64 and hands on 48."""


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
    """batch, heads: of the queries. size: of a head in shared memory, one of those in `ROWS`. in_panels: how tiles lie,
    see `row_tiles`."""

    problem: Problem
    config: FusedConfig
    batch: int
    heads: int
    size: int
    in_panels: bool

    @property
    def masking(self) -> Masking:
        """Who sees whom."""
        return self.problem.masking

    @property
    def rows(self) -> int:
        """Queries of a step."""
        return ROWS[self.size]

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
        if not self.in_panels:
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
    def form(self) -> TileForm:
        """Of tiles of queries and keys."""
        return TileForm(size=self.size, dtype=self.problem.dtype, in_panels=self.in_panels)

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
        return self.batch * self.heads * self.query_tiles

    @property
    def key_tiles(self) -> int:
        """Of a lane."""
        return pl.cdiv(self.masking.keys, COLUMNS)

    @property
    def group(self) -> int:
        """Query heads that a block goes over."""
        return self.problem.group // self.config.parts

    @property
    def lanes(self) -> int:
        """Key heads of all batch entries, or their parts, whose blocks share queries."""
        return self.batch * self.problem.key_heads * self.config.all_parts

    @property
    def lane_tiles(self) -> int:
        """Of queries of a head, that a lane's blocks go over."""
        tiles, rest = divmod(self.query_tiles, self.config.splits)
        if rest or (self.config.splits > 1 and self.masking.has_band):
            raise ValueError(
                "queries are split by whole tiles, as many each, and where they see all keys; got "
                f"{self.query_tiles} tiles and {self.config}"
            )
        return tiles

    @property
    def adders(self) -> int:
        """Blocks that add shares; the finishers come behind them."""
        return self.key_tiles * self.lanes

    @property
    def lines(self) -> int:
        """Of what queries' rows need. Numbers of queries, for masks, have no room with a head size of 64."""
        return 2 if self.splits_rows else 3

    @property
    def keeps_apart(self) -> bool:
        """Whether places are hidden from the compiler, without which ptxas spills."""
        return self.config.warps_apart and (not self.splits_rows or not self.masking.has_band)

    @cached_property
    def spread(self) -> Spread | None:
        """How the blocks that share queries begin with different ones, if they do."""
        heads = self.config.spread
        if not heads:
            return None
        if self.masking.has_band or self.config.heads_inside or not self.config.finishers or self.group % heads:
            raise ValueError(
                "blocks begin with tiles of their own where all queries see all keys, others finish, and the "
                f"{self.group} heads of a block, one after the other, are a multiple of spread; got {self.config}"
            )
        return Spread(blocks=self.key_tiles, span=heads * self.lane_tiles)

    @property
    def sums(self) -> int:
        """Of each tile of queries, to which blocks add."""
        return 1 if self.spread is None else SUMS

    @cached_property
    def finishers(self) -> Finishers | None:
        """The blocks that make dquery of the sums, if others than those that add do."""
        if not self.config.finishers:
            return None
        return Finishers(
            masking=self.masking,
            batch=self.batch,
            heads=self.heads,
            rows=self.rows,
            columns=COLUMNS,
            warpgroups=WARPGROUPS,
            slots=self.config.shares,
            spread=self.spread,
            lane_tiles=self.lane_tiles,
        )

    @property
    def fetches_apart(self) -> bool:
        """Whether more than one sum may be on its way to a block."""
        return self.config.finishers or self.config.warps_apart

    def fetched_of(self, scratch: Scratch, slot: Any) -> Any:
        """The barrier of the sum that is brought to where a share was."""
        return scratch.fetched.at[slot] if self.fetches_apart else scratch.fetched

    def part_of(self, ref: Any, b: Any, head: Any, query_tile: Any, i: Any) -> Any:
        """What warpgroup i hands on of a tile of queries' dquery, and where it is summed."""
        row, column = (i * PART, 0) if self.splits_rows else (0, i * self.width)
        return ref.at[b, pl.ds(query_tile * self.rows + row, PART), head, pl.ds(column, self.width)]

    def results(self, query: jax.Array, key: jax.Array, value: jax.Array) -> list[jax.ShapeDtypeStruct]:
        """dquery, dkey and dvalue or their parts in one array, and the sums, the second ones behind the first."""
        # Whole tiles of sums: with groups of rows TMA does not stop at any query, as it does without.
        whole = (self.sums * self.batch, self.query_tiles * self.rows, self.heads, self.size)
        parts = self.config.all_parts
        shapes = [key.shape, value.shape] if parts == 1 else [(2, parts, *key.shape)]
        return [
            *(jax.ShapeDtypeStruct(shape, self.problem.dtype) for shape in (query.shape, *shapes)),
            jax.ShapeDtypeStruct(whole, jnp.float32),
        ]

    def scratch_types(self) -> Scratch:
        """What a block is given."""
        config, dtype, barrier, form = self.config, self.problem.dtype, plgpu.Barrier, self.form
        shares = (config.shares, WARPGROUPS, PART, self.width)
        return Scratch(
            k=form.scratch(COLUMNS),
            v=form.scratch(COLUMNS),
            q=form.scratch(config.stages, self.rows),
            do=form.scratch(config.stages, self.rows),
            qrows=plgpu.SMEM((config.stages, self.lines, self.rows), jnp.float32),
            ds=shared((2, COLUMNS, self.rows), dtype, swizzle=self.swizzle),
            share=plgpu.RefUnion(shared(shares, jnp.float32), Done.scratch(*shares, dtype)),
            held=barrier(num_arrivals=2 * form.copies),
            full=barrier(num_arrivals=1 + 2 * form.copies, num_barriers=config.stages),
            empty=barrier(num_arrivals=WARPGROUPS, num_barriers=config.stages),
            met=barrier(num_arrivals=WARPGROUPS),
            made=barrier(num_arrivals=WARPGROUPS, num_barriers=config.shares),
            taken=barrier(num_barriers=config.shares),
            fetched=barrier(num_arrivals=WARPGROUPS, num_barriers=config.shares if self.fetches_apart else 1),
        )
