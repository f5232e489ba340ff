"""Integer weights with scales, and how they are made."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Literal, cast

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels.primitives.checks import static_integer
from pallas_kernels.primitives.integer_gemm.packing import SPAN, is_packed_dtype, pack, unpack
from pallas_kernels.primitives.settings import usual_promotion

GROUP_SIZES = (64, 128)
"""Weights along the features that may share a scale; or all of an output's."""
DTYPES = {8: ("int8", "uint8"), 4: ("int4",)}
"""Of the values, for each number of bits."""


@partial(jax.tree_util.register_dataclass, data_fields=("values", "scales"), meta_fields=("bits", "group_size"))
@dataclass(frozen=True, kw_only=True)
class QuantizedWeight:
    """The weights (features, outputs) of a linear layer as integers: w[k, n] = integers[n, k] * scales[k // group, n].

    values: (outputs, features), the integers as int8 or int4: the other way round than w, as tensor cores take integers
        on their left. XLA keeps int4 arrays two to a byte on GPUs, the even feature in the low half. Or as uint8, from
        -127 to 127 in sign and magnitude and in another order within every 16 features, in which kernels need fewer
        instructions: `pallas_kernels.primitives.integer_gemm.packing` says which. They may be cut anywhere along the
        outputs, and along the features between such 16.
    scales: (features / group_size, outputs) float32; (1, outputs) where an output has one scale. They are constants: no
        gradient goes to them, nor to the values.
    bits: 8 or 4.
    group_size: 64, 128 or None.
    """

    values: jax.Array
    scales: jax.Array
    bits: Literal[8, 4]
    group_size: int | None

    @property
    def shape(self) -> tuple[int, int]:
        """(features, outputs), as of the weights that these stand for; of one layer, where layers are stacked."""
        return self.values.shape[-1], self.values.shape[-2]

    @property
    def integers(self) -> jax.Array:
        """The integers (outputs, features), int8 or int4."""
        return unpack(self.values) if is_packed_dtype(self.values.dtype) else self.values

    @usual_promotion
    def dequantized(self, dtype: DTypeLike) -> jax.Array:
        """The weights (features, outputs) in a floating dtype; multiplied in float32, or in float64."""
        wide = jnp.promote_types(dtype, jnp.float32)
        outputs, features = self.values.shape
        groups = self.scales.shape[0]
        values = self.integers.astype(wide).reshape(outputs, groups, features // groups)
        scaled = values * self.scales.astype(wide).T[:, :, None]
        return scaled.reshape(outputs, features).T.astype(dtype)


@usual_promotion
def quantize(w: jax.Array, *, bits: Literal[8, 4] = 8, group_size: int | None = None) -> QuantizedWeight:
    """Rounds the weights of a linear layer to integers, once, outside the step.

    Symmetric, without a zero point: the largest magnitude under a scale becomes 127, or 7, and 0 where it is below
    2e-36. Where a weight is not finite, its scale is NaN. Integers of eight bits are kept as uint8 (see
    `QuantizedWeight`) where there are a multiple of 16 features.

    Args:
        w: (features, outputs), any floating dtype.
        bits: of an integer.
        group_size: weights along the features that share a scale, 64 or 128; None: all of an output.

    Returns:
        The weights; values (outputs, features), scales (groups, outputs) float32.

    Raises:
        TypeError, ValueError: w is not a floating matrix, or bits or group_size are none of those.
    """
    w = jnp.asarray(w)
    bits = cast(Literal[8, 4], static_integer("quantize", "bits", bits))
    group_size = None if group_size is None else static_integer("quantize", "group_size", group_size)
    if not jnp.issubdtype(w.dtype, jnp.floating):
        raise TypeError(f"quantize: w must be floating, got {w.dtype.name}.")
    if w.ndim != 2:
        raise ValueError(f"quantize: w must be (features, outputs), got shape {w.shape}.")
    if bits not in DTYPES:
        raise ValueError(f"quantize: bits must be 8 or 4, got {bits}.")
    if group_size is not None and (group_size not in GROUP_SIZES or not w.shape[0] or w.shape[0] % group_size):
        raise ValueError(
            f"quantize: group_size must be None, 64 or 128 and divide the {w.shape[0]} features, got {group_size}."
        )
    features, outputs = w.shape
    groups = 1 if group_size is None else features // group_size
    limit = 2 ** (bits - 1) - 1
    wide = w.astype(jnp.float32).T.reshape(outputs, groups, features // groups)
    largest = jnp.max(jnp.abs(wide), axis=-1, initial=0.0)
    # Smaller scales would be flushed to zero.
    has_scale = largest >= limit * jnp.finfo(jnp.float32).smallest_normal
    scales = jnp.where(has_scale, largest / limit, 1.0)
    # Asked for by itself: the CPU's maximum passes over NaN.
    scales = jnp.where(jnp.all(jnp.isfinite(wide), axis=-1), scales, jnp.nan)
    values = jnp.round(wide / scales[:, :, None]).astype(jnp.int8).reshape(outputs, features)
    values = pack(values) if bits == 8 and features % SPAN == 0 else values.astype(f"int{bits}")
    return QuantizedWeight(values=values, scales=scales.T, bits=bits, group_size=group_size)
