"""The linear layers in plain `jax.numpy`: the definition, and the implementation `"xla"`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels.arguments import Norm
from pallas_kernels.ops._products.checks import optional_activation
from pallas_kernels.ops._products.layer import Layer, LayerArrays
from pallas_kernels.ops._products.norm import as_rows, norm_reference


def linear_reference(
    x: jax.Array,
    w: jax.Array,
    *,
    norm: Norm | None = None,
    bias: jax.Array | None = None,
    activation: str | None = None,
    residual: jax.Array | None = None,
    out_dtype: DTypeLike | None = None,
    multiply: Callable[..., jax.Array] = jnp.matmul,
) -> jax.Array:
    """See `pallas_kernels.linear` and `norm_linear`. multiply: computes the product of two matrices.

    The normalised x is rounded to x's dtype, and the product to the wider of x's and the result's; what follows is in
    float32. With float64 inputs all is float64, the result too.
    """
    out_dtype = jnp.dtype(x.dtype if out_dtype is None or x.dtype == jnp.float64 else out_dtype)
    wide = jnp.promote_types(jnp.promote_types(x.dtype, out_dtype), jnp.float32)
    y = multiply(as_rows(norm_reference(norm, x)), w, preferred_element_type=jnp.promote_types(x.dtype, out_dtype))
    y = y.reshape(*x.shape[:-1], y.shape[-1])  # a device may keep some of the columns of a sum
    if bias is not None or activation is not None or residual is not None:
        y = y.astype(wide)
    if bias is not None:
        y = y + bias.astype(wide)
    if function := optional_activation("linear", activation):
        y = function.reference(y)
    if residual is not None:
        y = y + residual.astype(wide)
    return y.astype(out_dtype)


def layer_reference(
    layer: Layer, arrays: LayerArrays, *, norm: Norm | None = None, multiply: Callable[..., jax.Array] = jnp.matmul
) -> jax.Array:
    """Computes a checked layer by `linear_reference`, with a result of its dtype."""
    x, w, bias, residual = arrays
    activation = None if layer.activation is None else layer.activation.name
    options = {"bias": bias, "activation": activation, "residual": residual, "out_dtype": layer.out_dtype}
    return linear_reference(x, w, norm=norm, **options, multiply=multiply).astype(layer.out_dtype)


def linear_residual_norm_reference(
    x: jax.Array,
    w: jax.Array,
    *,
    residual: jax.Array,
    bias: jax.Array | None = None,
    multiply: Callable[..., jax.Array] = jnp.matmul,
) -> tuple[jax.Array, jax.Array]:
    """See `pallas_kernels.linear_residual_norm`. The mean squares are in float32 (float64 for float64 inputs)."""
    total = linear_reference(x, w, bias=bias, residual=residual, multiply=multiply)
    wide = jnp.promote_types(total.dtype, jnp.float32)
    return total, jnp.mean(jnp.square(total.astype(wide)), axis=-1)


def given_product(product: jax.Array, *_: Any, **__: Any) -> jax.Array:
    """Returns its first argument: `multiply` of a reference whose x is the product already."""
    return product
