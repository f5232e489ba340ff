"""The low-rank corrected linear layer backward: plain products by XLA.

If w is not trained, as usual, XLA removes its gradient.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp

from pallas_kernels.primitives.platform import varying_like


@partial(jax.jit, static_argnames=("alpha",))
def lora_linear_backward(
    x: jax.Array,
    w: jax.Array,
    a: jax.Array,
    b: jax.Array,
    bias: jax.Array | None,
    dy: jax.Array,
    *,
    alpha: float,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array | None]:
    """Returns (dx, dw, da, db, dbias), dbias None without a bias. Arguments as in `mosaic_gpu.lora_linear_forward`."""
    low = jnp.matmul(dy, b.T, preferred_element_type=jnp.float32)
    correction = jnp.matmul((alpha * low).astype(x.dtype), a.T, preferred_element_type=jnp.float32)
    dx = (jnp.matmul(dy, w.T, preferred_element_type=jnp.float32) + correction).astype(x.dtype)
    da = x.T @ (alpha * low).astype(x.dtype)
    inner = (alpha * jnp.matmul(x, a, preferred_element_type=jnp.float32)).astype(x.dtype)
    db = inner.T @ dy
    dbias = None if bias is None else jnp.sum(dy, axis=0, dtype=jnp.float32).astype(bias.dtype)
    return dx, x.T @ dy, da, db, None if dbias is None else varying_like(dbias, dy)
