"""A row's scalars in the backward pass from sums over its lines, of which each warp has one.

To take a row's mean off with one barrier, each warp centres its own line of the row first. The lines are then joined as
Chan, Golub and LeVeque join samples: nothing is subtracted that is large against the result, as it would be in
E[x**2] - E[x]**2. Source: "Updating formulae and a pairwise algorithm for computing sample variances", 1979.

Values of 16 bits have deviations that their own distance from any of the row's values does not drown: with one of them
taken off, plain sums over the row serve.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_kernels.ops._norms.norm import Norm, RowScalars, lanes_of_lines
from pallas_kernels.primitives.rows import RowValues, Segment, line_sums, map_row, over_lines


@dataclass(frozen=True, kw_only=True)
class LineSums:
    """Which sums over its line each warp gives, and what they make of the row.

    lines: in a row of `features` values of `dtype`. keeps_row: whether its values stay in registers meanwhile.
    """

    norm: Norm
    dtype: Any
    features: int
    lines: int
    keeps_row: bool

    @property
    def line(self) -> int:
        """Columns in a line."""
        return self.features // self.lines

    @property
    def is_shifted(self) -> bool:
        """Whether values come with one of the row's own taken off, so that lines need not be centred."""
        return self.norm.centered and self.dtype.itemsize < 4

    @property
    def has_remainders(self) -> bool:
        """Whether what is left of a line's mean, once it is taken off, counts."""
        return self.norm.mean_passes(self.dtype) == 2

    @property
    def kinds(self) -> int:
        """How many sums there are of a line."""
        return 2 + 2 * self.norm.centered + self.has_remainders

    def of_part(self, value: RowValues, weighted: RowValues, segments: Sequence[Segment]) -> tuple[jax.Array, ...]:
        """Each line's sums of squares and products and, of rows that lose their mean, what takes it off; (4,) each.

        The lines are a warpgroup's, of the normalised rows and of the weighted dy. A line that is not shifted loses its
        own mean first, which is then among the sums, in the place of the shifted values' sum.
        """
        if not self.norm.centered:
            return line_sums(map_row(jnp.square, value)), line_sums(map_row(jnp.multiply, value, weighted))
        if self.is_shifted:
            mean = line_sums(value)
        else:
            mean = line_sums(value) * (1.0 / self.line)
            value = map_row(jnp.subtract, value, over_lines(mean, segments))
        return (
            line_sums(map_row(jnp.square, value)),
            line_sums(map_row(jnp.multiply, value, weighted)),
            mean,
            line_sums(weighted),
            *((line_sums(value),) if self.has_remainders else ()),
        )

    def scalars(self, ref) -> RowScalars:
        """Of the row whose sums of all lines are in `ref`, a (kinds, lines) reference."""
        if self.norm.centered and not self.is_shifted:
            return self._of_centered_lines(ref)

        def sum_of(kind):
            if not self.norm.centered and not self.keeps_row:  # two sums: less to add up than to wait for shuffles
                return sum(ref[kind, at] for at in range(self.lines))
            return jnp.sum(plgpu.load(ref.at[kind], layout=lanes_of_lines(self.lines), optimized=False))

        if self.is_shifted:
            return self._of_shifted_sums(sum_of)
        return RowScalars.of_sums(self.features, self.norm.epsilon, squares=sum_of(0), products=sum_of(1))

    def _of_shifted_sums(self, sum_of) -> RowScalars:
        mean, weight = sum_of(2) * (1.0 / self.features), sum_of(3)
        squares = jnp.maximum(sum_of(0) - self.features * mean * mean, jnp.float32(0))
        return RowScalars.of_sums(
            self.features,
            self.norm.epsilon,
            squares=squares,
            products=sum_of(1) - mean * weight,
            means=(mean,),
            weighted=weight,
            is_folded=True,
        )

    def _of_centered_lines(self, ref) -> RowScalars:
        def read(kind):
            return [ref[kind, at] for at in range(self.lines)]

        squares, products, line_means, weights = sum(read(0)), sum(read(1)), read(2), read(3)
        means = [sum(line_means) * (1.0 / self.lines)]
        offsets = [m - means[0] for m in line_means]
        if self.has_remainders:
            remainders = read(4)
            means.append(sum(offsets) * (1.0 / self.lines) + sum(remainders) * (1.0 / self.features))
            offsets = [o - means[1] for o in offsets]
            squares += 2 * sum(o * r for o, r in zip(offsets, remainders, strict=True))
        squares += self.line * sum(o * o for o in offsets)
        products += sum(o * w for o, w in zip(offsets, weights, strict=True))
        return RowScalars.of_sums(
            self.features, self.norm.epsilon, squares=squares, products=products, means=means, weighted=sum(weights)
        )
