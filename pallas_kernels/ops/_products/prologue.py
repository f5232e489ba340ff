"""A norm in front of a product: as a pass of its own over x, or as a factor of the product's rows.

A scale per feature stands inside the product's sum. It is multiplied in by a row kernel, which then may as well divide
by the root mean square: on an H200 32 µs for 8192 rows of 4096, at the speed of a copy. With no scale the division is a
factor of each row that the product's epilogue multiplies: what is left is the pass that reads x for the factor, and
none where the mean squares are given.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.arguments import Norm
from pallas_kernels.ops._norms import apply
from pallas_kernels.ops._norms.norm import Norm as RowNorm
from pallas_kernels.ops.layer_norm.reference import layer_norm_reference
from pallas_kernels.ops.rms_norm.reference import rms_norm_reference
from pallas_kernels.primitives.checks import added_number


def check_norm(operation: str, norm: Norm | None, x: jax.Array | jax.ShapeDtypeStruct) -> None:
    """Raises TypeError or ValueError for a norm that does not belong to x (..., features)."""
    if norm is None:
        return
    if not isinstance(norm, Norm):
        raise TypeError(f"{operation}: norm must be a pallas_kernels.Norm or None, got {type(norm).__name__}.")
    if norm.kind not in ("rms", "layer"):
        raise ValueError(f"{operation}: a norm's kind is 'rms' or 'layer', got {norm.kind!r}.")
    added_number(operation, "the norm's epsilon", norm.epsilon)
    for name, array in (("scale", norm.scale), ("bias", norm.bias), ("mean_square", norm.mean_square)):
        if array is None:
            continue
        if not hasattr(array, "dtype"):
            raise TypeError(f"{operation}: the norm's {name} must be an array, got {type(array).__name__}.")
        if not jnp.issubdtype(jnp.asarray(array).dtype, jnp.floating):
            raise TypeError(f"{operation}: the norm's {name} must be floating, got {jnp.asarray(array).dtype.name}.")
        if name != "mean_square" and jnp.shape(array) != x.shape[-1:]:
            raise ValueError(
                f"{operation}: the norm's {name} must be ({x.shape[-1]},), one value a feature of x {x.shape}, got "
                f"{jnp.shape(array)}."
            )
    if norm.kind == "rms" and norm.bias is not None:
        raise ValueError(f"{operation}: an 'rms' norm has no bias; add it behind the product.")
    if norm.mean_square is None:
        return
    if norm.kind != "rms":
        raise ValueError(f"{operation}: mean squares are of use to an 'rms' norm only; leave them out.")
    if jnp.shape(norm.mean_square) != x.shape[:-1]:
        raise ValueError(
            f"{operation}: the norm's mean_square must be one a row, {x.shape[:-1]}, got {jnp.shape(norm.mean_square)}."
        )


def norm_unsupported(norm: Norm | None, x: jax.Array) -> str | None:
    """Why the row kernels cannot take the norm's arrays, or None."""
    if norm is None:
        return None
    return apply.mosaic_unsupported(x, norm.scale, norm.bias)


def prologue(norm: Norm | None, x: jax.Array) -> tuple[jax.Array, jax.Array | None]:
    """Returns what to multiply by the weights, and factors (rows,) of the products' rows, or None. Differentiable.

    x: (rows, features). The norm has been checked.
    """
    if norm is None:
        return x, None
    scale = None if norm.scale is None else jnp.asarray(norm.scale)
    if norm.mean_square is not None:
        factor = lax.rsqrt(jnp.asarray(norm.mean_square, jnp.float32).reshape(-1) + norm.epsilon)
        if scale is None:
            return x, factor
        wide = x.astype(jnp.float32) * factor[:, None] * scale.astype(jnp.float32)
        return wide.astype(x.dtype), None
    bias = None if norm.bias is None else jnp.asarray(norm.bias)
    row_norm = RowNorm(name="rms_norm" if norm.kind == "rms" else "layer_norm", epsilon=float(norm.epsilon))
    return apply.apply_norm(row_norm, x, scale=scale, bias=bias)[0], None


def norm_reference(norm: Norm | None, x: jax.Array) -> jax.Array:
    """The normalised x in plain `jax.numpy`, rounded to x's dtype: what `"xla"` multiplies."""
    if norm is None:
        return x
    wide = jnp.promote_types(x.dtype, jnp.float32)
    scale = jnp.ones(x.shape[-1], wide) if norm.scale is None else norm.scale
    if norm.mean_square is not None:
        factor = lax.rsqrt(norm.mean_square.astype(wide) + norm.epsilon)[..., None]
        return (x.astype(wide) * factor * scale.astype(wide)).astype(x.dtype)
    if norm.kind == "layer":
        y = layer_norm_reference(x, scale, norm.bias, epsilon=norm.epsilon)
    else:
        y = rms_norm_reference(x, scale, epsilon=norm.epsilon)
    assert isinstance(y, jax.Array)
    return y


def as_rows(x: jax.Array) -> jax.Array:
    """(..., features) with all leading dimensions as one."""
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
