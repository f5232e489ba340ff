"""The low-rank corrected linear layer forward on Mosaic GPU.

The correction is additional depth of the product: [x | alpha x a] @ [w ; b]. x @ a is computed either by a launch
before, or by a few blocks of the same launch.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp

from pallas_kernels.ops.lora_linear.config import DEPTH, LoraConfig, default_config
from pallas_kernels.ops.lora_linear.one_launch import lora_linear_in_one_launch
from pallas_kernels.primitives.gemm.kernel import gemm
from pallas_kernels.primitives.platform import varying_like


@partial(jax.jit, static_argnames=("alpha", "config"))
def lora_linear_forward(
    x: jax.Array,
    w: jax.Array,
    a: jax.Array,
    b: jax.Array,
    bias: jax.Array | None,
    *,
    alpha: float,
    config: LoraConfig | None = None,
) -> jax.Array:
    """Returns x @ w + alpha (x @ a) @ b + bias, (rows, outputs) in x's dtype.

    x: (rows, features), w: (features, outputs), a: (features, rank), b: (rank, outputs), of one 16-bit dtype. bias:
    (outputs,).
    """
    (rows, _), outputs, rank = x.shape, w.shape[1], a.shape[1]
    config = config or default_config(rows, outputs, rank)
    multiple = 8 if config.is_one_launch else DEPTH
    a, b = jnp.pad(a, ((0, 0), (0, -rank % multiple))), jnp.pad(b, ((0, -rank % multiple), (0, 0)))
    if config.is_one_launch:
        y = lora_linear_in_one_launch(x, w, a, b, bias, alpha=float(alpha), config=config.product)
        return varying_like(y, *(value for value in (x, w, a, b, bias) if value is not None))
    low = (alpha * jnp.matmul(x, a, preferred_element_type=jnp.float32)).astype(x.dtype)
    return gemm([x, low], [w, b], is_along_depth=True, bias=bias, config=config.product, name="lora_linear")[0]
