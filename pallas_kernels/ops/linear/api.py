"""The public function: checks, dispatch, and the gradient of the Mosaic GPU kernels."""

from __future__ import annotations

import math
from functools import partial

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels.dispatch import Implementation, choose
from pallas_kernels.ops._products.row_scale import scaled_rows
from pallas_kernels.ops.linear.config import preferred
from pallas_kernels.ops.linear.mosaic_gpu import linear_forward
from pallas_kernels.ops.linear.mosaic_gpu_vjp import linear_backward
from pallas_kernels.ops.linear.reference import linear_reference
from pallas_kernels.primitives.activations import get_activation
from pallas_kernels.primitives.gemm.operands import operands_unsupported
from pallas_kernels.primitives.platform import mosaic_gpu_unsupported, varying_like
from pallas_kernels.primitives.triton_calls import triton_missing


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

    Args:
        x: (..., features), bfloat16 or float16 (any floating dtype with "xla").
        w: (features, outputs), of x's dtype.
        bias: (outputs,), any floating dtype, or None.
        activation: a name of `pallas_kernels.primitives.activations.ACTIVATIONS`, or None.
        residual: (..., outputs) of `out_dtype`, or None.
        out_dtype: the result's dtype; None: x's.
        implementation: "mosaic" (one Mosaic GPU kernel; Hopper GPUs, or `plgpu.force_gpu_interpret_mode`; features and
            outputs multiples of 64, at least 128 outputs; a result of x's dtype or float32), "triton" (through
            jax_triton, which the extra `triton` installs; NVIDIA GPUs; also float32; a result of x's dtype), "xla", a
            sequence of them in order of preference, or None: "mosaic" where it runs and is the faster one, else "xla".

    Returns:
        y, (..., outputs), of `out_dtype`.

    Raises:
        TypeError, ValueError: arguments that do not belong together, or an unknown activation or implementation.
        NotImplementedError: the requested implementation cannot run, with the reason.
    """
    x, w = jnp.asarray(x), jnp.asarray(w)
    bias = None if bias is None else jnp.asarray(bias)
    residual = None if residual is None else jnp.asarray(residual)
    dtype = jnp.dtype(out_dtype or x.dtype)
    if activation is not None:
        get_activation("linear", activation)
    check("linear", x, w, bias, residual, dtype)
    support = {
        "mosaic": partial(mosaic_unsupported, x, w, bias, dtype),
        "triton": partial(triton_unsupported, x, dtype),
        "xla": lambda: None,
    }
    rows = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    order = preferred(x, w, bias, activation, residual, dtype)
    chosen = choose("linear", implementation, support, preferred=order)
    if chosen == "xla" or x.size == 0 or w.size == 0:
        y = linear_reference(x, w, bias=bias, activation=activation, residual=residual, out_dtype=dtype)
        return y.astype(dtype)
    operands = [rows, w] + [value for value in (bias, residual) if value is not None]
    # Marked as varying like the others, so that shard_map sums gradients over the devices that those are spread over.
    rows, w = varying_like(rows, *operands), varying_like(w, *operands)
    bias = None if bias is None else varying_like(bias, *operands)
    residual = None if residual is None else varying_like(residual.reshape(-1, w.shape[1]), *operands)
    if chosen == "triton":
        from pallas_kernels.ops.linear.triton import linear_triton  # imports Triton

        y: jax.Array = linear_triton(activation, 0.0, rows, w, None, bias, residual)  # pyright: ignore
        return y.reshape(*x.shape[:-1], w.shape[1])
    y: jax.Array = linear_mosaic(activation, dtype, rows, w, bias, residual, None)  # pyright: ignore
    return y.reshape(*x.shape[:-1], w.shape[1])


def mosaic_unsupported(x: jax.Array, w: jax.Array, bias: jax.Array | None, out_dtype: jnp.dtype) -> str | None:
    """Why the Mosaic GPU kernels cannot take these arguments here, or None where they can."""
    reason = operands_unsupported(x, w)
    if reason:
        return reason
    if out_dtype not in (x.dtype, jnp.float32):
        return f"the result is {out_dtype.name}, the kernels give {x.dtype.name} or float32"
    if bias is not None and bias.dtype.itemsize > 4:
        return f"bias is {bias.dtype.name}, the kernels take at most float32"
    return mosaic_gpu_unsupported()


def triton_unsupported(x: jax.Array, out_dtype: jnp.dtype) -> str | None:
    """Why the Triton kernel cannot take these arguments here, or None where it can."""
    if out_dtype != x.dtype:
        return f"the result is {out_dtype.name}, the kernel gives x's {x.dtype.name}"
    return triton_missing(x)


def check(
    operation: str,
    x: jax.Array,
    w: jax.Array,
    bias: jax.Array | None,
    residual: jax.Array | None,
    dtype: jnp.dtype,
) -> None:
    """Raises TypeError or ValueError, in the operation's name, for arguments that do not belong together."""
    for name, array in (("x", x), ("w", w), ("bias", bias), ("residual", residual)):
        if array is not None and not jnp.issubdtype(array.dtype, jnp.floating):
            raise TypeError(f"{operation}: {name} must be floating, got {array.dtype.name}; cast it first.")
    if x.dtype != w.dtype:
        raise TypeError(f"{operation}: w must have x's dtype {x.dtype.name}, got {w.dtype.name}; cast one of them.")
    if x.ndim == 0 or w.ndim != 2 or w.shape[0] != x.shape[-1]:
        raise ValueError(f"{operation}: w must be (features, outputs) with the features of x {x.shape}, got {w.shape}.")
    if bias is not None and bias.shape != w.shape[1:]:
        raise ValueError(f"{operation}: bias must be one value an output, shape {w.shape[1:]}, got {bias.shape}.")
    expected = (*x.shape[:-1], w.shape[1])
    if residual is not None and (residual.shape, residual.dtype) != (expected, dtype):
        raise ValueError(
            f"{operation}: residual must be like the result, {dtype.name}{list(expected)}, got "
            f"{residual.dtype.name}{list(residual.shape)}; broadcast or cast it first."
        )


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
    function = None if activation is None else get_activation("linear", activation)
    return linear_forward(x, w, bias, residual, activation=function, row_scale=row_scale, out_dtype=out_dtype)[0]


def _mosaic_fwd(activation, out_dtype, x, w, bias, residual, row_scale):
    function = None if activation is None else get_activation("linear", activation)
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
    function = None if activation is None else get_activation("linear", activation)
    dx, dw, dbias, drow_scale = linear_backward(x, w, bias, product, dy, activation=function, row_scale=row_scale)
    return dx, dw, dbias, dresidual, drow_scale


linear_mosaic.defvjp(_mosaic_fwd, _mosaic_bwd)
