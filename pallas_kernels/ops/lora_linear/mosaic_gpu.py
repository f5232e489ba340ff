"""The low-rank corrected linear layer on Mosaic GPU.

Forward the correction is additional depth of the product: [x | alpha x a] @ [w ; b]. x @ a is computed either by a
launch before, or by a few blocks of the same launch. Backward, plain products by XLA; if w is not trained, as usual,
XLA removes its gradient.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp

from pallas_kernels.ops.lora_linear.config import DEPTH, takes_one_launch
from pallas_kernels.ops.lora_linear.one_launch import lora_linear_in_one_launch
from pallas_kernels.primitives.gemm.config import GemmConfig, choose_config
from pallas_kernels.primitives.gemm.kernel import gemm
from pallas_kernels.primitives.platform import varying_like


@partial(jax.jit, static_argnames=("alpha", "config", "one_launch"))
def lora_linear_forward(
    x: jax.Array,
    w: jax.Array,
    a: jax.Array,
    b: jax.Array,
    bias: jax.Array | None,
    *,
    alpha: float,
    config: GemmConfig | None = None,
    one_launch: bool | None = None,
) -> jax.Array:
    """Returns x @ w + alpha (x @ a) @ b + bias, (rows, outputs) in x's dtype.

    x: (rows, features), w: (features, outputs), a: (features, rank), b: (rank, outputs), of one 16-bit dtype. bias:
    (outputs,). config: of x @ w; only one launch supports tiles of several widths. None: the default of both.
    """
    (rows, _), outputs, rank = x.shape, w.shape[1], a.shape[1]
    one_launch = takes_one_launch(rows, rank) if one_launch is None else one_launch
    config = config or choose_config(rows, outputs, is_mixed=one_launch)
    extra = -rank % (8 if one_launch else DEPTH)
    a, b = jnp.pad(a, ((0, 0), (0, extra))), jnp.pad(b, ((0, extra), (0, 0)))
    if one_launch:
        y = lora_linear_in_one_launch(x, w, a, b, bias, alpha=float(alpha), config=config)
        return varying_like(y, *(value for value in (x, w, a, b, bias) if value is not None))
    low = (alpha * jnp.matmul(x, a, preferred_element_type=jnp.float32)).astype(x.dtype)
    return gemm([x, low], [w, b], is_along_depth=True, bias=bias, config=config, name="lora_linear")[0]


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
    """Returns (dx, dw, da, db, dbias), dbias None without a bias. Arguments as in `lora_linear_forward`."""
    low = jnp.matmul(dy, b.T, preferred_element_type=jnp.float32)
    correction = jnp.matmul((alpha * low).astype(x.dtype), a.T, preferred_element_type=jnp.float32)
    dx = (jnp.matmul(dy, w.T, preferred_element_type=jnp.float32) + correction).astype(x.dtype)
    da = x.T @ (alpha * low).astype(x.dtype)
    inner = (alpha * jnp.matmul(x, a, preferred_element_type=jnp.float32)).astype(x.dtype)
    db = inner.T @ dy
    dbias = None if bias is None else jnp.sum(dy, axis=0, dtype=jnp.float32).astype(bias.dtype)
    return dx, x.T @ dy, da, db, None if dbias is None else varying_like(dbias, dy)
