"""The public function: checks, dispatch, and the gradient of the Mosaic GPU kernel."""

from __future__ import annotations

from functools import partial

import jax

from pallas_kernels.dispatch import Implementation, choose
from pallas_kernels.ops._products.checks import check_linear, check_operands
from pallas_kernels.ops._products.norm import as_rows
from pallas_kernels.ops.linear import api as linear_api
from pallas_kernels.ops.linear_residual_norm.config import is_preferred
from pallas_kernels.ops.linear_residual_norm.mosaic_gpu import linear_residual_norm_forward
from pallas_kernels.ops.linear_residual_norm.mosaic_gpu_vjp import linear_residual_norm_backward
from pallas_kernels.ops.linear_residual_norm.reference import linear_residual_norm_reference
from pallas_kernels.primitives.checks import as_arrays, optional_arrays
from pallas_kernels.primitives.platform import varying_alike
from pallas_kernels.primitives.settings import usual_promotion


@usual_promotion
def linear_residual_norm(
    x: jax.Array,
    w: jax.Array,
    *,
    residual: jax.Array,
    bias: jax.Array | None = None,
    implementation: Implementation = None,
) -> tuple[jax.Array, jax.Array]:
    """A linear layer added to the residual stream, and the mean squares that the RMSNorm of the sum needs.

    The same as, with the product accumulated in float32 and float32 between the casts,

        total = x @ w + bias + residual                 # rounded to x.dtype
        mean_square = mean(total**2, axis=-1)

    Given to the next layer as `Norm(None, mean_square=mean_square)`, with the norm's scale folded into that layer's
    weights (`fold_scale`), they leave no pass over the residual stream between the two. The mean squares are of the
    sum as it is rounded. A gradient needs x, w and total again; it is XLA's products, after a pass over total and its
    cotangent.

    Args:
        x: (..., features), bfloat16 or float16 (any floating dtype with "xla"). The leading dimensions are rows.
        w: (features, outputs), of x's dtype.
        residual: (..., outputs), of x's dtype.
        bias: (outputs,), any floating dtype (at most float32 with "mosaic"), or None.
        implementation: "mosaic" (Mosaic GPU; Hopper GPUs, or `plgpu.force_gpu_interpret_mode`; sizes as for `linear`),
            "xla", a sequence of them in order of preference, or None: "mosaic" for 512 rows or more whose tiles keep
            the GPU busy, where it can run; "xla" elsewhere.

    Returns:
        total, (..., outputs) of x's dtype, and mean_square, (...) float32 (float64 for float64 x).

    Raises:
        TypeError, ValueError: arguments that do not belong together, or an unknown implementation.
        NotImplementedError: the requested implementation cannot run, with the reason.

    Source: the norm's division left to the next layer, as in Graef et al., "FlashNorm", 2024,
    https://arxiv.org/abs/2407.09577
    """
    x, w, residual = as_arrays("linear_residual_norm", x=x, w=w, residual=residual)
    (bias,) = optional_arrays("linear_residual_norm", bias=bias)
    check_operands("linear_residual_norm", x=x, w=w)
    check_linear("linear_residual_norm", x, w.shape, bias=bias, residual=residual, dtype=x.dtype)
    support = {"mosaic": partial(linear_api.mosaic_unsupported, x, w, bias, x.dtype), "xla": lambda: None}
    rows = as_rows(x)
    chosen = choose(
        "linear_residual_norm",
        implementation,
        support,
        preferred=lambda: ("mosaic",) if is_preferred(rows.shape[0], w.shape[1]) else (),
    )
    if chosen == "xla" or x.size == 0 or w.size == 0:
        return linear_residual_norm_reference(x, w, residual=residual, bias=bias)
    operands = varying_alike((rows, w, bias, as_rows(residual)))
    results: tuple[jax.Array, jax.Array] = _linear_residual_norm_mosaic(*operands)  # pyright: ignore
    total, mean_square = results
    return total.reshape(residual.shape), mean_square.reshape(x.shape[:-1])


@jax.custom_vjp
def _linear_residual_norm_mosaic(
    x: jax.Array, w: jax.Array, bias: jax.Array | None, residual: jax.Array
) -> tuple[jax.Array, jax.Array]:
    return linear_residual_norm_forward(x, w, bias, residual)


def _mosaic_fwd(x, w, bias, residual):
    total, mean_square = linear_residual_norm_forward(x, w, bias, residual)
    return (total, mean_square), (x, w, bias, total)


def _mosaic_bwd(saved, cotangents):
    return linear_residual_norm_backward(*saved, *cotangents)


_linear_residual_norm_mosaic.defvjp(_mosaic_fwd, _mosaic_bwd)
