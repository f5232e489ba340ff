"""What is known of a launch of `backward_fused` before it runs: its tiles, its shared memory, and where sums lie."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_kernels.ops.attention.backward_config import WARPGROUP_ROWS, FusedConfig
from pallas_kernels.ops.attention.backward_finish import Finishers
from pallas_kernels.ops.attention.masking import Masking
from pallas_kernels.ops.attention.problem import Problem
from pallas_kernels.primitives.gemm.shared import shared

ROWS = {64: 128, 128: 64}
"""Queries a step, by head size: as many as there are registers for."""
WARPGROUPS = 2
"""That compute."""
COLUMNS = WARPGROUPS * WARPGROUP_ROWS
"""Keys of a block."""
PART = 64
"""Rows and columns of what one warpgroup makes of a step's dquery: half the rows, or half the columns."""


class Scratch(NamedTuple):
    """A block's shared memory, and its barriers.

    k, v: the block's keys and values. q, do, qrows: of the queries of a step, with what each query's row needs. ds: the
    score gradients of a step. share: of dquery. held: keys and values are there; full, empty: a stage of queries is
    there, and done with; met: both warpgroups have stored score gradients; made, taken: a share is there, and added;
    fetched: the sum of others' is there.
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


@dataclass(frozen=True, kw_only=True)
class Launch:
    """batch, heads, size: of the queries; the latter a head's, 64 or 128."""

    problem: Problem
    config: FusedConfig
    batch: int
    heads: int
    size: int

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
    def query_tiles(self) -> int:
        """Of a head."""
        return pl.cdiv(self.masking.queries, self.rows)

    @property
    def key_tiles(self) -> int:
        """Of a lane."""
        return pl.cdiv(self.masking.keys, COLUMNS)

    @property
    def lanes(self) -> int:
        """Key heads of all batch entries, whose blocks share queries."""
        return self.batch * self.problem.key_heads

    @property
    def adders(self) -> int:
        """Blocks that add shares; the finishers come behind them."""
        return self.key_tiles * self.lanes

    @property
    def lines(self) -> int:
        """Of what queries' rows need. Numbers of queries, for masks, have no room with a head size of 64."""
        return 3 if self.size == 128 else 2

    @property
    def keeps_apart(self) -> bool:
        """Whether places are hidden from the compiler, without which ptxas spills."""
        return self.config.warps_apart and (self.size == 128 or not self.masking.has_band)

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
        )

    @property
    def fetches_apart(self) -> bool:
        """Whether more than one sum may be on its way to a block."""
        return self.config.finishers or self.config.warps_apart

    def fetched_of(self, scratch: Scratch, slot: Any) -> Any:
        """The barrier of the sum that is brought to where a share was."""
        return scratch.fetched.at[slot] if self.fetches_apart else scratch.fetched

    def part_of(self, ref: Any, b: Any, head: Any, query_tile: Any, i: Any) -> Any:
        """What warpgroup i makes of a tile of queries' dquery, and where it is summed."""
        row, column = (i * PART, 0) if self.splits_rows else (0, i * PART)
        return ref.at[b, pl.ds(query_tile * self.rows + row, PART), head, pl.ds(column, PART)]

    def results(self, query: jax.Array, key: jax.Array, value: jax.Array) -> list[jax.ShapeDtypeStruct]:
        """dquery, dkey, dvalue and the sums."""
        # Whole tiles of dquery: threads store them, who do not stop at the last query as TMA does.
        whole = (self.batch, self.query_tiles * self.rows, self.heads, self.size)
        return [
            jax.ShapeDtypeStruct(whole, self.problem.dtype),
            *(jax.ShapeDtypeStruct(array.shape, self.problem.dtype) for array in (key, value)),
            jax.ShapeDtypeStruct(query.shape, jnp.float32),
        ]

    def scratch_types(self) -> Scratch:
        """What a block is given."""
        config, dtype, barrier = self.config, self.problem.dtype, plgpu.Barrier
        return Scratch(
            k=shared((COLUMNS, self.size), dtype),
            v=shared((COLUMNS, self.size), dtype),
            q=shared((config.stages, self.rows, self.size), dtype),
            do=shared((config.stages, self.rows, self.size), dtype),
            qrows=plgpu.SMEM((config.stages, self.lines, self.rows), jnp.float32),
            ds=shared((2, COLUMNS, self.rows), dtype),
            share=shared((config.shares, WARPGROUPS, PART, PART), jnp.float32),
            held=barrier(num_arrivals=2),
            full=barrier(num_arrivals=3, num_barriers=config.stages),
            empty=barrier(num_arrivals=WARPGROUPS, num_barriers=config.stages),
            met=barrier(num_arrivals=WARPGROUPS),
            made=barrier(num_arrivals=WARPGROUPS, num_barriers=config.shares),
            taken=barrier(num_barriers=config.shares),
            fetched=barrier(num_arrivals=WARPGROUPS, num_barriers=config.shares if self.fetches_apart else 1),
        )
