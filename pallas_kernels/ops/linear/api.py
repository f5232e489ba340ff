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
    """A linear layer and what follows it, in one launch.

    The same as, with the product accumulated in float32 and float32 between the casts,

        y = activation(x @ w + bias) + residual

    "xla" also rounds the product, to the wider of x's dtype and `out_dtype`. A gradient needs x and w again, and with
    an activation x @ w, which the forward pass then writes, too, in x's dtype. Behind "mosaic" it is one kernel for the
    activation and bias, and XLA's products. Where 16-bit x gives a float32 result it is all XLA's, which multiplies x @
    w once more for an activation.

    Args:
        x: (..., features), bfloat16 or float16 (float32 with "triton", any floating dtype with "xla"). The leading
            dimensions are rows.
        w: (features, outputs), of x's dtype.
        bias: (outputs,), any floating dtype (at most float32 with "mosaic"), or None.
        activation: a name of `pallas_kernels.primitives.activations.ACTIVATIONS`, or None.
        residual: (..., outputs) of the result's dtype, or None.
        out_dtype: the result's dtype, floating; None: x's.
        implementation: "mosaic" (one Mosaic GPU kernel; Hopper GPUs, or `plgpu.force_gpu_interpret_mode`; features and
            outputs multiples of 64, at least 128 outputs; a result of x's dtype or float32), "triton" (through
            jax_triton, which the extra `triton` installs; NVIDIA GPUs; a result of x's dtype), "xla", a sequence of
            them in order of preference, or None: what the tuned table of this GPU has for the sizes
            (`pallas_kernels.tuning`), else "mosaic" for up to 64 rows of at least 2048 features and 4096 outputs, and
            for 512 rows or more with an activation or residual whose tiles keep the GPU busy; "xla" elsewhere, and
            where that cannot run.

    Returns:
        y, (..., outputs), of `out_dtype`.

    Raises:
        TypeError, ValueError: arguments that do not belong together, or an unknown activation or implementation.
        NotImplementedError: the requested implementation cannot run, with the reason.
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
        y = linear_reference(x, w, bias=bias, activation=activation, residual=residual, out_dtype=dtype)
        return y.astype(dtype)
    operands = (as_rows(x), w, bias, None if residual is None else as_rows(residual))
    rows, w, bias, residual = varying_alike(operands)
    if chosen == "triton":
        from pallas_kernels.ops.linear.triton import linear_triton  # imports Triton

        y: jax.Array = linear_triton(activation, 0.0, rows, w, None, bias, residual)  # pyright: ignore
        return y.reshape(*x.shape[:-1], w.shape[1])
    y: jax.Array = linear_mosaic(activation, dtype, rows, w, bias, residual, None)  # pyright: ignore
    return y.reshape(*x.shape[:-1], w.shape[1])


def mosaic_unsupported(x: jax.Array, w: jax.Array, bias: jax.Array | None, out_dtype: jnp.dtype) -> str | None:
    """Why the Mosaic GPU kernels cannot take these arguments here, or None where they can."""
    return operands_unsupported(x, w) or linear_unsupported(x, bias, out_dtype)


def triton_unsupported(x: jax.Array, out_dtype: jnp.dtype) -> str | None:
    """Why the Triton kernel cannot take these arguments here, or None where it can."""
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
    """activation((row_scale * x) @ w + bias) + residual by the Mosaic GPU kernel; differentiable.

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
    if out_dtype != x.dtype:  # a cotangent of float32, which tensor cores would round

        def forward(x, w, bias, row_scale):
            rows = scaled_rows(x, row_scale)
            return linear_reference(rows, w, bias=bias, activation=activation, out_dtype=out_dtype)

        dx, dw, dbias, drow_scale = jax.vjp(forward, x, w, bias, row_scale)[1](dy)
        return dx, dw, dbias, dresidual, drow_scale
    function = optional_activation("linear", activation)
    dx, dw, dbias, drow_scale = linear_backward(x, w, bias, product, dy, activation=function, row_scale=row_scale)
    return dx, dw, dbias, dresidual, drow_scale


linear_mosaic.defvjp(_mosaic_fwd, _mosaic_bwd)
