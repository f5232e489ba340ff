"""The public function: checks and dispatch."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.dispatch import Implementation, choose
from pallas_kernels.ops._products.layer import checked_layer
from pallas_kernels.ops.linear import api as linear_api
from pallas_kernels.ops.linear.reference import linear_reference
from pallas_kernels.ops.linear_residual_norm.config import is_preferred
from pallas_kernels.ops.linear_residual_norm.mosaic_gpu import linear_residual_norm_mosaic
from pallas_kernels.ops.linear_residual_norm.reference import linear_residual_norm_reference
from pallas_kernels.primitives.checks import as_arrays
from pallas_kernels.primitives.dimensions import shares
from pallas_kernels.primitives.platform import varying_alike
from pallas_kernels.primitives.settings import operation


def _from_parts(arguments: Mapping[str, Any], sums: Mapping[str, Any]) -> tuple[jax.Array, jax.Array]:
    """Computes the layer where features are cut: what follows the product follows the sum of the parts' products."""
    x, w = arguments["x"], arguments["w"]
    product = sums["k"].total(linear_api.linear(x, w))
    after = {name: arguments[name] for name in ("bias", "residual")}
    total = linear_reference(product, w, **after, multiply=lambda rows, *_, **__: rows)
    wide = jnp.promote_types(total.dtype, jnp.float32)
    return total, jnp.mean(jnp.square(total.astype(wide)), axis=-1)


@shares("x: ... +k, w: k !n, residual: ... n, bias: n -> ... n, ...", _from_parts, scatters=True)
@operation
def linear_residual_norm(
    x: jax.Array,
    w: jax.Array,
    *,
    residual: jax.Array,
    bias: jax.Array | None = None,
    implementation: Implementation = None,
) -> tuple[jax.Array, jax.Array]:
    """Adds a linear layer to the residual stream and computes the mean squares for the RMSNorm of the sum.

    Equivalent to this, with the product accumulated in float32 and float32 between the casts:

        total = x @ w + bias + residual                 # rounded to x.dtype
        mean_square = mean(total**2, axis=-1)           # of the rounded sum

    Pass the mean squares to the next layer as `Norm(None, mean_square=mean_square)`, and fold the norm's scale into
    that layer's weights (`fold_scale`). Then the norm needs no pass over the residual stream.

    The backward pass needs x, w and total. It is one pass over total and its cotangent, and XLA's products.

    Args:
        x: (..., features), bfloat16 or float16 (any floating dtype with "xla"). The leading dimensions are rows.
        w: (features, outputs), of x's dtype.
        residual: (..., outputs), of x's dtype.
        bias: (outputs,), any floating dtype (at most float32 with "mosaic"), or None.
        implementation: one of the names below, a sequence of them in order of preference, or None.
            "mosaic": Mosaic GPU kernels, for Hopper GPUs or `plgpu.force_gpu_interpret_mode`; sizes as for `linear`.
            "xla": always runs.
            None: "mosaic" if it can run, for 512 rows or more if it is estimated to be faster, and with 4096 outputs or
                more for up to 16 rows of 8192 features or more, or 33 to 64 rows of 4096 or more; else "xla".

    Returns:
        (total, mean_square): total (..., outputs), of x's dtype; mean_square (...), float32 (float64 for float64 x).

    Raises:
        TypeError, ValueError: the arguments do not fit together, or the implementation is unknown.
        NotImplementedError: the requested implementation cannot run; the message says why.

    Source: the next layer divides by the norm, as in Graef et al., "FlashNorm", 2024, https://arxiv.org/abs/2407.09577
    """
    (residual,) = as_arrays("linear_residual_norm", residual=residual)
    layer, arrays = checked_layer("linear_residual_norm", x, w, bias=bias, residual=residual)
    outputs, shape = arrays.w.shape[1], arrays.x.shape
    support = {"mosaic": partial(linear_api.mosaic_unsupported, layer, arrays), "xla": lambda: None}
    rows = arrays.by_rows()
    chosen = choose(
        "linear_residual_norm",
        implementation,
        support,
        preferred=lambda: ("mosaic",) if is_preferred(rows.x.shape[0], outputs, shape[-1]) else (),
    )
    if chosen == "xla" or not arrays.has_work:
        return linear_residual_norm_reference(arrays.x, arrays.w, residual=residual, bias=arrays.bias)
    results: tuple[jax.Array, jax.Array] = linear_residual_norm_mosaic(*varying_alike(rows))  # pyright: ignore
    total, mean_square = results
    return total.reshape(residual.shape), mean_square.reshape(shape[:-1])
