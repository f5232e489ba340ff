"""Integer weights with scales, and their quantization."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Literal, cast

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels.primitives.checks import static_integer
from pallas_kernels.primitives.integers import SPAN, is_packed_dtype, pack, unpack
from pallas_kernels.primitives.settings import usual_promotion

GROUP_SIZES = (64, 128)
"""How many weights along the features may share a scale."""
DTYPES = {8: ("int8", "uint8"), 4: ("int4",)}
"""The dtypes of `QuantizedWeight.values`, for each number of bits."""


@partial(jax.tree_util.register_dataclass, data_fields=("values", "scales"), meta_fields=("bits", "group_size"))
@dataclass(frozen=True, kw_only=True)
class QuantizedWeight:
    """The weights (features, outputs) of a linear layer as integers: w[k, n] = integers[n, k] * scales[k // group, n].

    values: (outputs, features), int8, int4 or uint8, transposed because the kernels take them as the product's left
        operand. On GPUs XLA stores two int4 values in a byte, the even feature in the low half. uint8 holds -127 to 127
        as sign and magnitude, reordered within every 16 features so that kernels need fewer instructions; see
        `pallas_kernels.primitives.integers`. uint8 values may be sliced anywhere along the outputs, and at
        multiples of 16 along the features.
    scales: (features / group_size, outputs) float32; (1, outputs) with one scale per output. Neither scales nor values
        have gradients.
    bits: 8 or 4.
    group_size: 64 or 128 features that share a scale, or None for all of an output.
    """

    values: jax.Array
    scales: jax.Array
    bits: Literal[8, 4]
    group_size: int | None

    @property
    def shape(self) -> tuple[int, int]:
        """The shape (features, outputs) of the weights; of one layer if layers are stacked."""
        return self.values.shape[-1], self.values.shape[-2]

    @property
    def integers(self) -> jax.Array:
        """The integers (outputs, features), int8 or int4."""
        return unpack(self.values) if is_packed_dtype(self.values.dtype) else self.values

    @usual_promotion()
    def dequantized(self, dtype: DTypeLike) -> jax.Array:
        """Returns the weights (features, outputs) in a floating dtype, multiplied in float32 or float64."""
        wide = jnp.promote_types(dtype, jnp.float32)
        outputs, features = self.values.shape
        groups = self.scales.shape[0]
        values = self.integers.astype(wide).reshape(outputs, groups, features // groups)
        scaled = values * self.scales.astype(wide).T[:, :, None]
        return scaled.reshape(outputs, features).T.astype(dtype)


@usual_promotion()
def quantize(w: jax.Array, *, bits: Literal[8, 4] = 8, group_size: int | None = None) -> QuantizedWeight:
    """Rounds the weights of a linear layer to integers. Call it once, outside the training or decoding step.

    The quantization is symmetric, without a zero point: the largest magnitude under a scale becomes 127 (8 bits) or 7
    (4 bits), and 0 if it is below 2e-36. If a weight is not finite, its scale is NaN. 8-bit integers are stored as
    uint8 (see `QuantizedWeight`) if the number of features is a multiple of 16.

    Args:
        w: (features, outputs), any floating dtype.
        bits: bits of an integer, 8 or 4.
        group_size: how many weights along the features share a scale, 64 or 128; None: all of an output.

    Returns:
        The weights: values (outputs, features), scales (groups, outputs) float32.

    Raises:
        TypeError, ValueError: w is not a floating matrix, or bits or group_size has another value.
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
    # A separate check, because the maximum on CPUs ignores NaN.
    scales = jnp.where(jnp.all(jnp.isfinite(wide), axis=-1), scales, jnp.nan)
    values = jnp.round(wide / scales[:, :, None]).astype(jnp.int8).reshape(outputs, features)
    values = pack(values) if bits == 8 and features % SPAN == 0 else values.astype(f"int{bits}")
    return QuantizedWeight(values=values, scales=scales.T, bits=bits, group_size=group_size)
