"""One launch without its arrays: sizes, and what its parts take of shared memory."""

from __future__ import annotations

from dataclasses import dataclass, replace

import jax.experimental.pallas as pl
import jax.numpy as jnp

from pallas_kernels.primitives.few_rows.config import GROUP, FewRowsConfig

_ROWS = 8
"""The tensor cores take groups of eight columns of the right operand, which here are rows of x."""


@dataclass(frozen=True, kw_only=True)
class Problem:
    """See the module.

    weight_dtype: x's, or int8 or int4. scale_groups: of integer weights, along the depth; 0 without.
    residual_dtype: None where there is no residual.
    """

    rows: int
    n: int
    k: int
    dtype: jnp.dtype
    weight_dtype: jnp.dtype
    scale_groups: int
    products: int
    out_dtypes: tuple[jnp.dtype, ...]
    residual_dtype: jnp.dtype | None
    config: FewRowsConfig

    @classmethod
    def of(cls, *, config: FewRowsConfig, **sizes) -> Problem:
        """The problem with as many warpgroups and stages as fit."""
        problem = cls(config=config, **sizes)
        for warpgroups in range(min(config.warpgroups, problem.steps), 0, -1):
            problem = replace(problem, config=replace(config, warpgroups=warpgroups))
            fitted = problem.config.fitted(stage_bytes=problem.stage_bytes, other_bytes=problem.finish_bytes)
            if fitted is not None:
                return replace(problem, config=fitted)
        raise ValueError(f"two stages of {problem.stage_bytes} bytes do not fit beside {problem.finish_bytes}")

    @property
    def tokens(self) -> int:
        """Rows, in whole groups."""
        return -(-self.rows // _ROWS) * _ROWS

    @property
    def tiles(self) -> int:
        """Of the result."""
        return pl.cdiv(self.n, self.config.columns)

    @property
    def steps(self) -> int:
        """Of a block's share of the depth."""
        return pl.cdiv(pl.cdiv(self.k, self.config.depth), self.config.splits)

    @property
    def others(self) -> int:
        """Warpgroups of a cluster whose sums come to the one that finishes some columns."""
        return self.config.splits * self.config.warpgroups - 1

    @property
    def groups(self) -> int:
        """Of 64 columns in a tile. The blocks of a cluster finish them in turn."""
        return self.config.columns // GROUP

    @property
    def own_groups(self) -> int:
        """The most of them that one block finishes."""
        return pl.cdiv(self.groups, self.config.splits)

    @property
    def is_quantized(self) -> bool:
        """Whether weights are integers with scales."""
        return self.scale_groups > 0

    @property
    def is_grouped(self) -> bool:
        """Whether there are several scales along the depth."""
        return self.scale_groups > 1

    @property
    def groups_a_step(self) -> int:
        """Of scales."""
        return self.config.depth * self.scale_groups // self.k

    @property
    def weight_bits(self) -> int:
        """Of one weight."""
        return jnp.iinfo(self.weight_dtype).bits if self.is_quantized else 8 * self.dtype.itemsize

    @property
    def copies(self) -> int:
        """That bring a step's operands."""
        return self.products * (2 if self.is_grouped else 1) + 1

    @property
    def stage_bytes(self) -> int:
        """Of one step's operands."""
        depth, columns = self.config.depth, self.products * self.config.columns
        scales = 4 * columns * self.groups_a_step if self.is_grouped else 0
        return columns * depth * self.weight_bits // 8 + self.tokens * depth * self.dtype.itemsize + scales

    @property
    def finish_bytes(self) -> int:
        """Of what arrives from other blocks, of results and of the residual."""
        arriving = self.others * self.products * GROUP * self.tokens * 4
        itemsizes = [dtype.itemsize for dtype in self.out_dtypes]
        if self.residual_dtype is not None:
            itemsizes.append(self.residual_dtype.itemsize)
        return self.own_groups * (arriving + sum(itemsizes) * GROUP * self.tokens)
