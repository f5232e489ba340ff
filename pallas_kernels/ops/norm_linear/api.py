"""The public function. It shares its checks, kernels and gradients with `linear`."""

from __future__ import annotations

import jax
from jax.typing import DTypeLike

from pallas_kernels.arguments import Norm
from pallas_kernels.dispatch import Implementation
from pallas_kernels.ops.linear.api import apply_linear
from pallas_kernels.ops.norm_linear.config import preference
from pallas_kernels.primitives.dimensions import shares
from pallas_kernels.primitives.settings import operation


@shares("x: ... k, w: k n, norm.scale: !e, norm.bias: e, norm.mean_square: ..., bias: n, residual: ... n -> ... n")
@operation
def norm_linear(
    x: jax.Array,
    w: jax.Array,
    *,
    norm: Norm,
    bias: jax.Array | None = None,
    activation: str | None = None,
    residual: jax.Array | None = None,
    out_dtype: DTypeLike | None = None,
    implementation: Implementation = None,
) -> jax.Array:
    """Applies a norm and a linear layer with optional bias, activation and residual.

    Equivalent to this, with the product accumulated in float32 and float32 between the casts:

        y = activation(norm(x) @ w + bias) + residual

    One launch computes the product and all that follows. The norm is a launch before it, unless it has no scale and its
    mean squares are given (see `Norm`). A norm with its own launch, and "xla", round norm(x) to x's dtype.

    Args:
        x: (..., features), bfloat16 or float16 (any floating dtype with "xla"). The leading dimensions are rows.
        w: (features, outputs), of x's dtype.
        norm: the norm of x.
        bias, activation, residual, out_dtype: as in `linear`.
        implementation: one of the names below, a sequence of them in order of preference, or None.
            "mosaic": Mosaic GPU kernels, for Hopper GPUs or `plgpu.force_gpu_interpret_mode`; sizes as for `linear`,
            and at least 128 features.
            "xla": always runs.
            None: "mosaic" if it can run, for few rows where it was measured to be faster, for more than 64 rows if it
                is estimated to be, and without a residual for 512 rows or more where a gradient is taken through the
                norm; else "xla", with zeros added to odd sizes as in `linear`.

    Returns:
        y, (..., outputs), of `out_dtype`.

    Raises:
        TypeError, ValueError: the arguments do not fit together, or the activation or implementation is unknown.
        NotImplementedError: the requested implementation cannot run; the message says why.

    Source: division after the product as in Graef et al., "FlashNorm", 2024, https://arxiv.org/abs/2407.09577
    """
    if norm is None:
        raise TypeError("norm_linear: norm must be a pallas_kernels.Norm, got None; without one, call linear.")

    def prefer(x, w, bias, activation, residual, dtype):
        return preference(x, w, norm, activation, residual)

    options = {"bias": bias, "activation": activation, "residual": residual, "out_dtype": out_dtype}
    return apply_linear("norm_linear", x, w, norm, **options, implementation=implementation, preference=prefer)
