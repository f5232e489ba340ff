"""The projections in plain `jax.numpy`: the definition, and the implementation `"xla"`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.arguments import Norm, Rope
from pallas_kernels.ops._products.norm import as_rows, norm_reference
from pallas_kernels.ops.norms.reference import rms_norm_reference
from pallas_kernels.ops.rope.reference import rope_reference
from pallas_kernels.ops.rope.tables import row_tables


def qkv_projection_reference(
    x: jax.Array,
    w_q: jax.Array,
    w_k: jax.Array,
    w_v: jax.Array,
    *,
    bias: Sequence[jax.Array] | None = None,
    head_size: int | None = None,
    norm: Norm | None = None,
    rope: Rope | None = None,
    q_norm: Norm | None = None,
    k_norm: Norm | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """See `pallas_kernels.qkv_projection`.

    Rounds to x's dtype: the normalised x, each product with its bias, the normalised heads, and the rotated heads.
    """
    rows = as_rows(norm_reference(norm, x))
    projected = [jnp.matmul(rows, w) for w in (w_q, w_k, w_v)]
    if bias is not None:
        wide = jnp.promote_types(x.dtype, jnp.float32)
        projected = [(y.astype(wide) + b.astype(wide)).astype(y.dtype) for y, b in zip(projected, bias, strict=True)]
    if head_size is None:
        q, k, v = (y.reshape(*x.shape[:-1], y.shape[-1]) for y in projected)
        return q, k, v
    q, k, v = (y.reshape(1, y.shape[0], y.shape[1] // head_size, head_size) for y in projected)
    q, k = _head_norm(q_norm, q), _head_norm(k_norm, k)
    if rope is not None:
        angles: dict[str, Any] = _of_rows(rope, x)
        q, k = rope_reference(q, k, **angles, theta=rope.theta, interleaved=rope.interleaved)
    q, k, v = (y.reshape(*x.shape[:-1], *y.shape[2:]) for y in (q, k, v))
    return q, k, v


def _of_rows(rope: Rope, x: jax.Array) -> dict[str, jax.Array]:
    """Returns the positions of x's rows, or their cosines and sines, (1, rows, columns)."""
    if rope.positions is not None:
        return {"positions": jnp.broadcast_to(jnp.asarray(rope.positions), x.shape[:-1]).reshape(-1)}
    cos, sin = row_tables(None, rope.cos, rope.sin, x.shape[:-1], size=0, theta=rope.theta)
    return {"cos": cos[None], "sin": sin[None]}


def _head_norm(norm: Norm | None, y: jax.Array) -> jax.Array:
    if norm is None:
        return y
    scale = jnp.ones(y.shape[-1:], jnp.float32) if norm.scale is None else norm.scale
    normed = rms_norm_reference(y, scale, epsilon=norm.epsilon, rounds_before_scale=norm.rounds_before_scale)
    assert isinstance(normed, jax.Array)
    return normed
