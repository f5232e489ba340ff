"""The norm that a kernel computes, and the arithmetic that all kernels share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from pallas_kernels.primitives.random import Words, keep_mask
from pallas_kernels.primitives.rows import RowValues, Segment, map_row, row_sum

# No automatic barriers: each thread reads back only what it wrote itself, in the same layout.
COMPILER_PARAMS = plgpu.CompilerParams(unsafe_no_auto_barriers=True, approx_math=True)

NormName = Literal["rms_norm", "layer_norm"]


@dataclass(frozen=True, kw_only=True)
class Norm:
    """A norm's static parameters.

    name: "rms_norm" divides a row by its root mean square; "layer_norm" subtracts its mean first.
    epsilon: added to the mean square.
    rate: the rate of the dropout before the residual sum.
    """

    name: NormName
    epsilon: float
    rate: float = 0.0

    @property
    def centered(self) -> bool:
        """Whether the mean is subtracted from rows."""
        return self.name == "layer_norm"

    def mean_passes(self, dtype: DTypeLike) -> int:
        """The number of times a row's mean is subtracted.

        Twice in float32, where the rounding of the first mean is visible in rows of small deviation; the mean that
        remains is small, and exact. bfloat16 and float16 cannot hold such rows.
        """
        return 0 if not self.centered else 2 if dtype == jnp.float32 else 1

    def kernel_name(self, *, has_residual: bool, has_dropout: bool) -> str:
        """The kernel's name in traces and HLO."""
        if has_dropout:
            return f"dropout_residual_{self.name}"
        return f"{self.name}_residual" if has_residual else self.name

    def drop(self, values: RowValues, words: Words, row, columns: tuple[jax.Array, ...], features: int) -> RowValues:
        """Applies dropout to a row: zero where the mask drops a value, else the value times 1 / (1 - rate)."""
        factor = 1.0 / (1.0 - self.rate)

        def drop(value, column):
            mask = keep_mask(words, row, column, features=features, rate=self.rate)
            return jnp.where(mask, value * factor, jnp.zeros_like(value))

        return map_row(drop, values, columns)


@dataclass(frozen=True, kw_only=True)
class RowScalars:
    """The scalars of a row that its gradient depends on, float32.

    With v = (x - mean) * inverse and w = scale * dy the gradient is w * inverse - (x - mean) * slope - offset.
    The mean is the sum of `means`, subtracted one after the other. Without a mean to subtract, `means` is empty and
    `offset` None. If `is_folded`, the single mean is subtracted in one multiply-add, v = x * inverse - mean * inverse,
    and the slope belongs to v; that is accurate where the mean is not large against x - mean in float32.
    """

    inverse: jax.Array
    slope: jax.Array
    means: tuple[jax.Array, ...]
    offset: jax.Array | None
    is_folded: bool = False

    @staticmethod
    def of_sums(
        features: int, epsilon: float, *, squares, products, means=(), weighted=None, is_folded=False
    ) -> RowScalars:
        """Computes the scalars from sums over the row of (x - mean)**2, (x - mean) * w and, for centred rows, w."""
        inverse = lax.rsqrt(squares * (1.0 / features) + epsilon)
        return RowScalars(
            inverse=inverse,
            slope=products * ((1.0 if is_folded else inverse) * inverse * inverse * (1.0 / features)),
            means=tuple(means),
            offset=None if weighted is None else weighted * inverse * (1.0 / features),
            is_folded=is_folded,
        )

    def finish(
        self, value: RowValues, dy: RowValues, weighted: RowValues, sums: dict[str, RowValues]
    ) -> tuple[RowValues, dict[str, RowValues]]:
        """Returns the gradient through the norm, and the column sums with the row's part of dscale and dbias added."""
        if not self.is_folded:
            centered = self.center(value)
            return self.gradient(centered, weighted), self.column_sums(centered, dy, sums)
        inverse, slope, offset, shift = self.inverse, self.slope, self.offset, self.means[0] * self.inverse
        normed = map_row(lambda v: v * inverse - shift, value)
        gradient = map_row(lambda n, w: w * inverse - (n * slope + offset), normed, weighted)
        added = dict(sums)
        if "scale" in sums:
            added["scale"] = map_row(lambda p, d, n: p + d * n, sums["scale"], dy, normed)
        if "bias" in sums:
            added["bias"] = map_row(jnp.add, sums["bias"], dy)
        return gradient, added

    def center(self, values: RowValues) -> RowValues:
        """Subtracts the mean from the row."""
        for mean in self.means:
            values = map_row(lambda v, mean=mean: v - mean, values)
        return values

    def gradient(self, centered: RowValues, weighted: RowValues) -> RowValues:
        """Returns the gradient through the norm."""
        gradient = map_row(lambda v, w: w * self.inverse - v * self.slope, centered, weighted)
        return gradient if self.offset is None else map_row(lambda g: g - self.offset, gradient)

    def column_sums(self, centered: RowValues, dy: RowValues, sums: dict[str, RowValues]) -> dict[str, RowValues]:
        """Adds the row's part of dscale and dbias to the column sums."""
        added = dict(sums)
        if "scale" in sums:
            added["scale"] = map_row(lambda p, d, v: p + d * (v * self.inverse), sums["scale"], dy, centered)
        if "bias" in sums:
            added["bias"] = map_row(jnp.add, sums["bias"], dy)
        return added


def row_scalars(
    norm: Norm, value: RowValues, weighted: RowValues, segments: Sequence[Segment], features: int, dtype: DTypeLike
) -> RowScalars:
    """Computes the scalars of a row that a warpgroup or a warp holds whole."""
    means = []
    for _ in range(norm.mean_passes(dtype)):
        mean = row_sum(value, segments) * (1.0 / features)
        value = map_row(lambda v, mean=mean: v - mean, value)
        means.append(mean)
    total_weight = row_sum(weighted, segments) if means else None
    squares = row_sum(map_row(jnp.square, value), segments)
    products = row_sum(map_row(jnp.multiply, value, weighted), segments)
    return RowScalars.of_sums(
        features, norm.epsilon, squares=squares, products=products, means=means, weighted=total_weight
    )


def weigh(dy: RowValues, gain: RowValues | None) -> RowValues:
    """Returns dy times the scale in float32, or dy without a scale."""
    return dy if gain is None else map_row(lambda g, d: g.astype(jnp.float32) * d, gain, dy)
