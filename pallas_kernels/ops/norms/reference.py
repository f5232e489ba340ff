"""The norms in plain `jax.numpy`: the definition, and the implementation `"xla"`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.ops.norms.norm import NormName
from pallas_kernels.primitives.random import array_dropped

_mean = partial(jnp.mean, axis=-1, keepdims=True)


def norm_reference(
    x: jax.Array,
    scale: jax.Array | None = None,
    bias: jax.Array | None = None,
    *,
    is_centered: bool,
    residual: jax.Array | None = None,
    returns_total: bool = False,
    epsilon: float = 1e-6,
    rounds_before_scale: bool = False,
    mean: Callable[[jax.Array], jax.Array] = _mean,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """See `pallas_kernels.layer_norm`. Accumulates in float32 (float64 for float64 inputs).

    is_centered: whether each row's mean is subtracted. mean: of rows.
    """
    total = x if residual is None else x + residual
    wide = jnp.promote_types(x.dtype, jnp.float32)
    value = total.astype(wide)
    if is_centered:
        value = value - mean(value)
    y = value * jax.lax.rsqrt(mean(jnp.square(value)) + epsilon)
    if rounds_before_scale:
        y = y.astype(x.dtype)
    else:
        scale, bias = (None if each is None else each.astype(wide) for each in (scale, bias))
    y = y if scale is None else y * scale
    y = (y if bias is None else y + bias).astype(x.dtype)
    return (y, total) if returns_total or residual is not None else y


rms_norm_reference = partial(norm_reference, is_centered=False)
layer_norm_reference = partial(norm_reference, is_centered=True)


def dropout_residual_norm_reference(
    x: jax.Array,
    scale: jax.Array | None = None,
    bias: jax.Array | None = None,
    *,
    residual: jax.Array,
    rate: float,
    key: jax.Array | None,
    norm: NormName = "rms_norm",
    **options: Any,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """See `pallas_kernels.dropout_residual_norm`. Draws the same mask as the kernels. options: of `norm_reference`."""
    wide = jnp.promote_types(x.dtype, jnp.float32)
    value = array_dropped(x.astype(wide), key, rate=rate) if rate and key is not None else x.astype(wide)
    total = (value + residual.astype(wide)).astype(x.dtype)
    return norm_reference(total, scale, bias, is_centered=norm == "layer_norm", returns_total=True, **options)
