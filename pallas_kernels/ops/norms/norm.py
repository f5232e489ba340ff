"""The norm that a kernel computes, and the arithmetic that all kernels share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels.primitives.random import Words, dropped
from pallas_kernels.primitives.rows import RowValues, map_row

NormName = Literal["rms_norm", "layer_norm"]


@dataclass(frozen=True, kw_only=True)
class StaticNorm:
    """What is static of a norm, for the row kernels. `pallas_kernels.Norm`, with arrays, is a product's argument.

    name: "rms_norm" divides a row by its root mean square; "layer_norm" subtracts its mean first.
    epsilon: added to the mean square.
    rate: the rate of the dropout before the residual sum.
    rounds_before_scale: whether rows are rounded before the scale; see `pallas_kernels.rms_norm`.
    """

    name: NormName
    epsilon: float
    rate: float = 0.0
    rounds_before_scale: bool = False

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

    def statistics(self, rows: int, dtype: DTypeLike) -> jax.ShapeDtypeStruct:
        """The statistics that the backward pass needs: each row's reciprocal deviation, then the means to subtract."""
        return jax.ShapeDtypeStruct((1 + self.mean_passes(dtype), rows), jnp.float32)

    def scaled(self, value: jax.Array, scale: Any, bias: Any, dtype: DTypeLike) -> jax.Array:
        """Applies a scale and a bias, each possibly None, to normalised float32 values of rows of `dtype`.

        A sum or product of two 16-bit values that is rounded to float32 and then to 16 bits is that of 16 bits.
        """
        for step, array in ((jnp.multiply, scale), (jnp.add, bias)):
            if array is None:
                continue
            if self.rounds_before_scale:
                value = value.astype(dtype).astype(jnp.float32)
                dtype = jnp.promote_types(dtype, array.dtype)
            value = step(value, array.astype(jnp.float32))
        return value

    def kernel_name(self, *, has_residual: bool, has_dropout: bool) -> str:
        """The kernel's name in traces and HLO."""
        if has_dropout:
            return f"dropout_residual_{self.name}"
        return f"{self.name}_residual" if has_residual else self.name

    def drop(self, values: RowValues, words: Words, row, columns: tuple[jax.Array, ...], features: int) -> RowValues:
        """Applies dropout to a row."""
        return map_row(lambda v, c: dropped(v, words, row, c, features=features, rate=self.rate), values, columns)


def center(values: RowValues, means: Sequence[jax.Array]) -> RowValues:
    """Subtracts means from a row, one after the other."""
    for mean in means:
        values = map_row(lambda v, mean=mean: v - mean, values)
    return values
