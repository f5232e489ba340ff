"""The problem of one launch: its sizes, and the shared memory that its parts take."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import accumulate

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp

from pallas_kernels.primitives.few_rows.config import FewRowsConfig
from pallas_kernels.primitives.gemm.operands import SWIZZLE_BYTES
from pallas_kernels.primitives.row_tiles import TileForm
from pallas_kernels.primitives.transposed import GROUP

_ROWS = 8
"""The tensor cores take groups of eight columns of the right operand, which are rows of x here."""


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One launch without its arrays.

    widths: columns of the result, or of each result if weights lie side by side.
    weight_dtype: x's dtype, or int8, uint8 or int4.
    scale_groups: groups of scales along the depth, for integer weights; 0 for others.
    products: the number of weights that are multiplied with x, each with its own accumulators.
    residual_dtype: None without a residual.
    head_size: columns of a head, which are rotated in pairs half a head apart; 0 without rotation.
    is_normed: whether x's rows are normalised; the sums of squares then go with the products of every bundle.
    norm_itemsize: bytes of a value of the norm's scale; 0 without one.
    """

    rows: int
    widths: tuple[int, ...]
    k: int
    dtype: jnp.dtype
    weight_dtype: jnp.dtype
    scale_groups: int
    products: int
    out_dtypes: tuple[jnp.dtype, ...]
    residual_dtype: jnp.dtype | None
    config: FewRowsConfig
    head_size: int = 0
    is_normed: bool = False
    norm_itemsize: int = 0

    @classmethod
    def of(cls, *, config: FewRowsConfig, **sizes) -> Problem:
        """Returns the problem with as many warpgroups and stages as fit.

        Raises:
            ValueError: tiles do not hold whole heads, or two stages do not fit in shared memory.
        """
        problem = cls(config=config, **sizes)
        if problem.head_size and (problem.head_size % (2 * GROUP) or config.columns % problem.head_size):
            raise ValueError(f"tiles of {config.columns} columns do not hold whole heads of {problem.head_size}")
        for warpgroups in range(min(config.warpgroups, problem.steps), 0, -1):
            problem = replace(problem, config=replace(config, warpgroups=warpgroups))
            fitted = problem.config.fitted(stage_bytes=problem.stage_bytes, other_bytes=problem.epilogue_bytes)
            if fitted is not None:
                return replace(problem, config=fitted)
        raise ValueError(f"two stages of {problem.stage_bytes} bytes do not fit beside {problem.epilogue_bytes}")

    @property
    def tokens(self) -> int:
        """The number of rows, rounded up to whole groups."""
        return -(-self.rows // _ROWS) * _ROWS

    @property
    def x_form(self) -> TileForm:
        """Shared-memory layout of x's tiles."""
        options = {"size": self.config.depth, "dtype": self.dtype, "swizzle": SWIZZLE_BYTES}
        return TileForm.of(self.rows, has_all_rows=True, **options)

    def result_form(self, dtype: jnp.dtype) -> TileForm:
        """Shared-memory layout of a group's results, or of its residual."""
        return TileForm.of(self.rows, size=GROUP, dtype=dtype)

    @property
    def tiles(self) -> int:
        """The number of tiles of the results."""
        return self.spans[-1][1] // self.config.columns

    @property
    def spans(self) -> tuple[tuple[int, int], ...]:
        """The first column of each of `widths`, and the one after its last, with each padded to whole tiles."""
        columns = self.config.columns
        ends = tuple(accumulate(pl.cdiv(width, columns) * columns for width in self.widths))
        return tuple(zip((0, *ends[:-1]), ends, strict=True))

    def owners(self, column: jax.Array) -> Iterator[tuple[jax.Array, int]]:
        """Yields, for each of `widths`, whether a column belongs to it, and its first column."""
        for first, end in self.spans:
            yield (column >= first) & (column < end), first

    @property
    def steps(self) -> int:
        """The number of steps in a block's share of the depth."""
        return pl.cdiv(pl.cdiv(self.k, self.config.depth), self.config.splits)

    @property
    def others(self) -> int:
        """The number of other warpgroups of a cluster, which send their sums to the one that finishes a bundle."""
        return self.config.splits * self.config.warpgroups - 1

    @property
    def groups(self) -> int:
        """The number of groups of 64 columns in a tile."""
        return self.config.columns // GROUP

    @property
    def bundles(self) -> tuple[tuple[int, ...], ...]:
        """The groups that are finished together: single groups, or both groups of pairs of columns.

        The blocks of a cluster finish bundles in turn.
        """
        if not self.head_size:
            return tuple((group,) for group in range(self.groups))
        half = self.head_size // (2 * GROUP)
        heads = range(0, self.groups, 2 * half)
        return tuple((head + i, head + i + half) for head in heads for i in range(half))

    @property
    def members(self) -> int:
        """The number of groups in a bundle."""
        return len(self.bundles[0])

    @property
    def parts(self) -> int:
        """The number of arrays of sums that are finished together: a bundle's products, and the squares."""
        return self.products * self.members + self.is_normed

    @property
    def own_bundles(self) -> int:
        """The largest number of bundles that one block finishes."""
        return pl.cdiv(len(self.bundles), self.config.splits)

    @property
    def is_quantized(self) -> bool:
        """Whether the weights are integers with scales."""
        return self.scale_groups > 0

    @property
    def is_grouped(self) -> bool:
        """Whether there are several scales along the depth."""
        return self.scale_groups > 1

    @property
    def groups_a_step(self) -> int:
        """The number of groups of scales in a step."""
        return self.config.depth * self.scale_groups // self.k

    @property
    def weight_bits(self) -> int:
        """Bits of one weight."""
        return jnp.iinfo(self.weight_dtype).bits if self.is_quantized else 8 * self.dtype.itemsize

    @property
    def copies(self) -> int:
        """The number of TMA copies that load a step's operands."""
        return self.products * (2 if self.is_grouped else 1) + self.x_form.copies

    @property
    def stage_bytes(self) -> int:
        """Bytes of one step's operands."""
        depth, columns = self.config.depth, self.products * self.config.columns
        scales = 4 * columns * self.groups_a_step if self.is_grouped else 0
        return columns * depth * self.weight_bits // 8 + self.tokens * depth * self.dtype.itemsize + scales

    @property
    def epilogue_bytes(self) -> int:
        """Bytes of the sums from other warpgroups, of results, residual and a norm's scale."""
        arriving = self.others * self.parts * GROUP * self.tokens * 4
        itemsizes = [dtype.itemsize for dtype in self.out_dtypes]
        if self.residual_dtype is not None:
            itemsizes.append(self.residual_dtype.itemsize)
        own = self.own_bundles * (arriving + self.members * sum(itemsizes) * GROUP * self.tokens)
        return own + self.steps * self.config.depth * self.norm_itemsize
