"""The public function: checks, dispatch, and the gradient of the Mosaic GPU kernels."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels.dispatch import Implementation, choose
from pallas_kernels.ops._products.checks import (
    check_linear,
    check_operands,
    linear_unsupported,
    optional_activation,
    result_dtype,
)
from pallas_kernels.ops._products.norm import as_rows, scaled_rows
from pallas_kernels.ops.linear.config import preferred
from pallas_kernels.ops.linear.mosaic_gpu import linear_forward
from pallas_kernels.ops.linear.mosaic_gpu_vjp import linear_backward
from pallas_kernels.ops.linear.reference import linear_reference
from pallas_kernels.primitives.checks import as_arrays, optional_arrays
from pallas_kernels.primitives.gemm.operands import operands_unsupported
from pallas_kernels.primitives.odd_sizes import matmul
from pallas_kernels.primitives.platform import varying_alike
from pallas_kernels.primitives.settings import usual_promotion
from pallas_kernels.primitives.triton_calls import triton_missing


@usual_promotion
def linear(
    x: jax.Array,
    w: jax.Array,
    *,
    bias: jax.Array | None = None,
    activation: str | None = None,
    residual: jax.Array | None = None,
    out_dtype: DTypeLike | None = None,
    implementation: Implementation = None,
) -> jax.Array:
    """Applies a linear layer with optional bias, activation and residual, in one launch.

    Equivalent to this, with the product accumulated in float32 and float32 between the casts:

        y = activation(x @ w + bias) + residual

    "xla" also rounds the product, to the wider of x's dtype and `out_dtype`.

    The backward pass needs x and w. With an activation it also needs x @ w, which the forward pass writes in x's dtype.
    With "mosaic" it is one kernel for activation and bias, and XLA's products. If x has 16 bits and the result is
    float32, XLA computes all of it, and computes x @ w again for an activation.

    Args:
        x: (..., features), bfloat16 or float16 (float32 with "triton", any floating dtype with "xla"). The leading
            dimensions are rows.
        w: (features, outputs), of x's dtype.
        bias: (outputs,), any floating dtype (at most float32 with "mosaic"), or None.
        activation: a name from `pallas_kernels.primitives.activations.ACTIVATIONS`, or None.
        residual: (..., outputs), of the result's dtype, or None.
        out_dtype: the result's floating dtype; None: x's.
        implementation: one of the names below, a sequence of them in order of preference, or None.
            "mosaic": one Mosaic GPU kernel, for Hopper GPUs or `plgpu.force_gpu_interpret_mode`. Features and outputs
            must be multiples of 64, with at least 128 outputs, and the result must have x's dtype or float32.
            "triton": through jax_triton, which the extra `triton` installs, for NVIDIA GPUs. The result has x's dtype.
            "xla": always runs.
            None: the entry of the GPU's tuned table (`pallas_kernels.tuning`). Without an entry, "mosaic" for up to 64
            rows with at least 2048 features and 4096 outputs, and for more than 64 rows with an activation or residual
            if it is estimated to be faster. "xla" otherwise, and if "mosaic" cannot run; then with zeros added to
            features and outputs that are no multiples of 8 where that is estimated to be faster.

    Returns:
        y, (..., outputs), of `out_dtype`.

    Raises:
        TypeError, ValueError: the arguments do not fit together, or the activation or implementation is unknown.
        NotImplementedError: the requested implementation cannot run; the message says why.
    """
    x, w = as_arrays("linear", x=x, w=w)
    bias, residual = optional_arrays("linear", bias=bias, residual=residual)
    dtype = result_dtype("linear", x, out_dtype)
    check_operands("linear", x=x, w=w)
    check_linear("linear", x, w.shape, bias=bias, activation=activation, residual=residual, dtype=dtype)
    support = {
        "mosaic": partial(mosaic_unsupported, x, w, bias, dtype),
        "triton": partial(triton_unsupported, x, dtype),
        "xla": lambda: None,
    }
    order = partial(preferred, x, w, bias, activation, residual, dtype)
    chosen = choose("linear", implementation, support, preferred=order)
    if chosen == "xla" or x.size == 0 or w.size == 0:
        given = {"bias": bias, "activation": activation, "residual": residual, "out_dtype": dtype}
        multiply = matmul if implementation is None else jnp.matmul
        return linear_reference(x, w, **given, multiply=multiply).astype(dtype)
    operands = (as_rows(x), w, bias, None if residual is None else as_rows(residual))
    rows, w, bias, residual = varying_alike(operands)
    if chosen == "triton":
        from pallas_kernels.ops.linear.triton import linear_triton  # imports Triton

        y: jax.Array = linear_triton(activation, 0.0, rows, w, None, bias, residual)  # pyright: ignore
        return y.reshape(*x.shape[:-1], w.shape[1])
    y: jax.Array = linear_mosaic(activation, dtype, rows, w, bias, residual, None)  # pyright: ignore
    return y.reshape(*x.shape[:-1], w.shape[1])


def mosaic_unsupported(x: jax.Array, w: jax.Array, bias: jax.Array | None, out_dtype: jnp.dtype) -> str | None:
    """Returns why the Mosaic GPU kernels cannot take these arguments here, or None if they can."""
    return operands_unsupported(x, w) or linear_unsupported(x, bias, out_dtype)


def triton_unsupported(x: jax.Array, out_dtype: jnp.dtype) -> str | None:
    """Returns why the Triton kernel cannot take these arguments here, or None if it can."""
    if out_dtype != x.dtype:
        return f"the result is {out_dtype.name}, the kernel gives x's {x.dtype.name}"
    return triton_missing(x)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def linear_mosaic(
    activation: str | None,
    out_dtype: jnp.dtype,
    x: jax.Array,
    w: jax.Array,
    bias: jax.Array | None,
    residual: jax.Array | None,
    row_scale: jax.Array | None,
) -> jax.Array:
    """Computes activation((row_scale * x) @ w + bias) + residual with the Mosaic GPU kernel; differentiable.

    x: (rows, features), w: (features, outputs), bias: (outputs,), residual: (rows, outputs), row_scale: (rows,).
    """
    function = optional_activation("linear", activation)
    return linear_forward(x, w, bias, residual, activation=function, row_scale=row_scale, out_dtype=out_dtype)[0]


def _mosaic_fwd(activation, out_dtype, x, w, bias, residual, row_scale):
    function = optional_activation("linear", activation)
    keeps = function is not None and out_dtype == x.dtype
    y, product = linear_forward(
        x, w, bias, residual, activation=function, row_scale=row_scale, out_dtype=out_dtype, keeps_product=keeps
    )
    return y, (x, w, bias, product, row_scale, residual is not None)


def _mosaic_bwd(activation, out_dtype, saved, dy):
    x, w, bias, product, row_scale, has_residual = saved
    dresidual = dy if has_residual else None
    if out_dtype != x.dtype:  # the tensor cores would round a float32 cotangent

        def forward(x, w, bias, row_scale):
            rows = scaled_rows(x, row_scale)
            return linear_reference(rows, w, bias=bias, activation=activation, out_dtype=out_dtype)

        dx, dw, dbias, drow_scale = jax.vjp(forward, x, w, bias, row_scale)[1](dy)
        return dx, dw, dbias, dresidual, drow_scale
    function = optional_activation("linear", activation)
    dx, dw, dbias, drow_scale = linear_backward(x, w, bias, product, dy, activation=function, row_scale=row_scale)
    return dx, dw, dbias, dresidual, drow_scale


linear_mosaic.defvjp(_mosaic_fwd, _mosaic_bwd)
