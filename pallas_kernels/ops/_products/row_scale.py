"""Factors of a product's rows in the backward pass: (r * x) @ w with one factor r a row."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def scaled_rows(x: jax.Array, row_scale: jax.Array | None) -> jax.Array:
    """The rows that the weights' gradient is of, rounded to x's dtype. x: (rows, features); row_scale: (rows,)."""
    return x if row_scale is None else (x.astype(jnp.float32) * row_scale[:, None]).astype(x.dtype)


def product_for(row_scale: jax.Array | None, dy: jax.Array, w: jax.Array) -> jax.Array:
    """dy @ w.T, a gradient of scaled rows; float32 where a factor's gradient is to be summed over it."""
    return jnp.matmul(dy, w.T, preferred_element_type=None if row_scale is None else jnp.float32)


def through_row_scale(
    dscaled: jax.Array, x: jax.Array, row_scale: jax.Array | None
) -> tuple[jax.Array, jax.Array | None]:
    """From the gradient of the scaled rows to those of x and of the factors."""
    if row_scale is None:
        return dscaled, None
    wide = dscaled.astype(jnp.float32)
    return (wide * row_scale[:, None]).astype(x.dtype), jnp.sum(wide * x.astype(jnp.float32), axis=1)
