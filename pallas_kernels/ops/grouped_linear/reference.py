"""Grouped linear layers in plain `jax.numpy`: the definition, and the implementation `"xla"`."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.ops._products.checks import optional_activation
from pallas_kernels.ops.gated_activation.reference import gated_activation_reference


def group_of_rows(group_sizes: jax.Array, rows: int) -> jax.Array:
    """Returns each row's group, (rows,) int32; the number of groups for rows of none. Negative sizes count as zero."""
    ends = jnp.cumsum(jnp.clip(group_sizes.astype(jnp.int32), 0, rows))
    return jnp.searchsorted(ends, jnp.arange(rows, dtype=jnp.int32), side="right").astype(jnp.int32)


def grouped_linear_reference(
    x: jax.Array,
    w: jax.Array,
    group_sizes: jax.Array,
    *,
    bias: jax.Array | None = None,
    activation: str | None = None,
    transpose: bool = False,
    multiply: Callable[..., jax.Array] = lax.ragged_dot,
) -> jax.Array:
    """See `pallas_kernels.grouped_linear`. The product is rounded to x's dtype, what follows is in float32."""
    y, is_own = _product(x, w, group_sizes, bias=bias, transpose=transpose, multiply=multiply)
    if function := optional_activation("grouped_linear", activation):
        y = function.reference(y.astype(jnp.promote_types(x.dtype, jnp.float32)))
    return jnp.where(is_own, y, 0).astype(x.dtype)


def _product(
    x: jax.Array,
    w: jax.Array,
    group_sizes: jax.Array,
    *,
    bias: jax.Array | None = None,
    transpose: bool = False,
    multiply: Callable[..., jax.Array] = lax.ragged_dot,
) -> tuple[jax.Array, jax.Array]:
    """Returns the product of x's dtype, or with a bias in at least float32, and which rows (rows, 1) have a group."""
    wide = jnp.promote_types(x.dtype, jnp.float32)
    group = group_of_rows(group_sizes, x.shape[0])
    sizes = jnp.bincount(group, length=w.shape[0] + 1)[:-1].astype(jnp.int32)
    y = multiply(x, w.swapaxes(1, 2) if transpose else w, sizes, preferred_element_type=x.dtype)
    if bias is not None:
        y = y.astype(wide) + bias.astype(wide)[group]  # rows of no group take the last one's
    return y, (group < w.shape[0])[:, None]


def grouped_gated_linear_reference(
    x: jax.Array,
    w_gate: jax.Array,
    w_up: jax.Array,
    group_sizes: jax.Array,
    *,
    bias_gate: jax.Array | None = None,
    bias_up: jax.Array | None = None,
    activation: str = "silu",
) -> jax.Array:
    """See `pallas_kernels.grouped_gated_linear`. The products are rounded to x's dtype, what follows is in float32."""
    gate, is_own = _product(x, w_gate, group_sizes, bias=bias_gate)
    up, _ = _product(x, w_up, group_sizes, bias=bias_up)
    y = gated_activation_reference(gate, up, activation=activation)
    return jnp.where(is_own, y, 0).astype(x.dtype)
