"""Shared by the public norms: argument checks, dispatch, and the kernels with their gradient."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from pallas_kernels.dispatch import Implementation, choose, partly_by_xla
from pallas_kernels.ops._norms.backward import norm_backward
from pallas_kernels.ops._norms.forward import norm_forward
from pallas_kernels.ops._norms.norm import Norm
from pallas_kernels.primitives.platform import dtypes_unsupported, mosaic_gpu_unsupported, varying_alike
from pallas_kernels.primitives.rows import THREADS
from pallas_kernels.primitives.triton_calls import triton_unsupported


def check_arguments(
    operation: str, x: jax.Array, scale: jax.Array | None, bias: jax.Array | None, residual: jax.Array | None
) -> None:
    """Raises a TypeError or ValueError, in the operation's name, if the arguments do not fit together."""
    affine = {name: array for name, array in (("scale", scale), ("bias", bias)) if array is not None}
    for name, array in {"x": x, **affine}.items():
        if not jnp.issubdtype(array.dtype, jnp.floating):
            raise TypeError(f"{operation}: {name} must be floating, got {array.dtype.name}; cast it first.")
    if x.ndim == 0:
        raise ValueError(f"{operation}: x must have a features axis, got a scalar; reshape it to (1,).")
    for name, array in affine.items():
        if array.shape != x.shape[-1:]:
            raise ValueError(
                f"{operation}: {name} must be ({x.shape[-1]},), one value a feature of x {x.shape}, got {array.shape}."
            )
    if residual is not None and (residual.shape, residual.dtype) != (x.shape, x.dtype):
        raise ValueError(
            f"{operation}: residual must be like x, {x.dtype.name}{list(x.shape)}, got "
            f"{residual.dtype.name}{list(residual.shape)}; broadcast or cast it first."
        )


def mosaic_unsupported(x: jax.Array, scale: jax.Array | None, bias: jax.Array | None = None) -> str | None:
    """Returns why the Mosaic GPU kernels cannot take these arguments here, or None if they can."""
    if reason := dtypes_unsupported(x=x, scale=scale, bias=bias):
        return reason
    if x.shape[-1] < THREADS and x.size:
        return f"rows have {x.shape[-1]} features, a warpgroup shares at least {THREADS}"
    return mosaic_gpu_unsupported()


def dispatch_norm(
    norm: Norm,
    x: jax.Array,
    scale: jax.Array | None,
    bias: jax.Array | None,
    residual: jax.Array | None,
    *,
    returns_total: bool,
    reference: Callable[..., Any],
    implementation: Implementation,
) -> Any:
    """Runs `rms_norm` or `layer_norm` on checked arguments.

    reference: the implementation "xla", a function of x, scale, bias and residual.
    """
    support = {
        "mosaic": partial(mosaic_unsupported, x, scale, bias),
        "triton": partial(triton_unsupported, x),
        "xla": lambda: None,
    }
    chosen = choose(norm.name, implementation, support, preferred=("mosaic",))
    arrays = (x, scale, bias, residual)
    if chosen == "xla" or x.size == 0:
        return reference(*arrays)
    apply = apply_norm
    if chosen == "triton":
        from pallas_kernels.ops._norms.triton import apply_norm as apply  # imports Triton
    # Without sums over rows, on an H200, µs of the kernels and of XLA with the forward pass: 27328x128 10.3 and 9.3,
    # 8192x256 6.9 and 6.2, 2000x512 4.6 and 4.4.
    is_short = norm.centered and x.shape[-1] <= 512 and all(array is None for array in arrays[1:])
    if implementation is None and is_short:

        def kernel(*arrays):
            y, total = apply(norm, *arrays, returns_total=returns_total)
            return y if total is None else (y, total)

        return partly_by_xla(kernel, reference, gradient=True)(*varying_alike(arrays))
    y, total = apply(norm, *arrays, returns_total=returns_total)
    return y if total is None else (y, total)


def apply_norm(
    norm: Norm,
    x: jax.Array,
    scale: jax.Array | None,
    bias: jax.Array | None = None,
    residual: jax.Array | None = None,
    *,
    words: jax.Array | None = None,
    returns_total: bool = False,
) -> tuple[jax.Array, jax.Array | None]:
    """Returns y and the sum that was normalised; without a residual x, or None if not `returns_total`.

    x: (..., features). words: (2,) uint32, the key of the dropout of x, or None for none. Differentiable: the backward
    kernel adds the sum's cotangent to the gradient.
    """
    shape = (math.prod(x.shape[:-1]), x.shape[-1])
    operands = (x.reshape(shape), scale, bias, None if residual is None else residual.reshape(shape), words)
    y, total = _norm_rows(norm, returns_total, *varying_alike(operands))  # pyright: ignore[reportGeneralTypeIssues]
    return y.reshape(x.shape), None if total is None else total.reshape(x.shape)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _norm_rows(norm, returns_total, x, scale, bias, residual, words):
    y, total, _ = norm_forward(norm, x, scale=scale, bias=bias, residual=residual, words=words)
    return y, x if total is None and returns_total else total


def _norm_rows_fwd(norm, returns_total, x, *arguments):
    x = x.value
    scale, bias, residual, words = (None if a is None else a.value for a in arguments)
    y, total, statistics = norm_forward(
        norm, x, scale=scale, bias=bias, residual=residual, words=words, with_statistics=True
    )
    normed = x if total is None else total
    # Saved values are arrays, or a structure without any: of the residual only whether there is one.
    saved = (normed, statistics, scale, bias, words, None if residual is None else ())
    return (y, normed if returns_total else total), saved


def _norm_rows_bwd(norm, _, saved, cotangents):
    total, statistics, scale, bias, words, residual = saved
    dy, dtotal = cotangents
    has_residual = residual is not None
    if isinstance(dtotal, SymbolicZero):  # the sum is not used, which saves reading an array
        dtotal = None
    if isinstance(dy, SymbolicZero):  # only the sum is used
        if words is None:
            dtotal = jnp.zeros_like(total) if dtotal is None else dtotal
            dscale, dbias = (None if a is None else jnp.zeros_like(a) for a in (scale, bias))
            return dtotal, dscale, dbias, dtotal if has_residual else None, None
        dy = jnp.zeros_like(total)
    gradients = norm_backward(norm, total, statistics, dy, scale=scale, bias=bias, dtotal=dtotal, words=words)
    dx = gradients.dtotal if gradients.dx is None else gradients.dx
    return dx, gradients.dscale, gradients.dbias, gradients.dtotal if has_residual else None, None


_norm_rows.defvjp(_norm_rows_fwd, _norm_rows_bwd, symbolic_zeros=True)
