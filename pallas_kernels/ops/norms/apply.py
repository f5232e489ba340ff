"""Shared by the public norms: argument checks, dispatch, and the kernels with their gradient."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from pallas_kernels.dispatch import Implementation, choose
from pallas_kernels.ops.norms.backward import norm_backward
from pallas_kernels.ops.norms.config import LONGEST_ROW
from pallas_kernels.ops.norms.forward import norm_forward
from pallas_kernels.ops.norms.norm import StaticNorm
from pallas_kernels.primitives.checks import as_arrays, check_features, optional_arrays
from pallas_kernels.primitives.platform import dtypes_unsupported, mosaic_gpu_unsupported, varying_alike
from pallas_kernels.primitives.rows import THREADS
from pallas_kernels.primitives.triton_calls import triton_unsupported


def mosaic_unsupported(x: jax.Array, scale: jax.Array | None, bias: jax.Array | None = None) -> str | None:
    """Returns why the Mosaic GPU kernels cannot take these arguments here, or None if they can."""
    if reason := dtypes_unsupported(x=x, scale=scale, bias=bias):
        return reason
    if x.size and not THREADS <= x.shape[-1] <= LONGEST_ROW:
        return f"rows have {x.shape[-1]} features, a warpgroup holds {THREADS} to {LONGEST_ROW}"
    return mosaic_gpu_unsupported()


def _triton_unsupported(x: jax.Array, is_plain: bool) -> str | None:
    if not is_plain:
        return "the kernels take a scale, and no residual, second result or rounding before the scale"
    return triton_unsupported(x)


def run_norm(
    operation: str,
    norm: StaticNorm,
    reference: Callable[..., Any],
    implementation: Implementation,
    x: jax.Array,
    scale: jax.Array | None,
    bias: jax.Array | None,
    residual: jax.Array | None,
    *,
    returns_total: bool = False,
    words: jax.Array | None = None,
) -> Any:
    """Implements the public norms: checks the arguments, then dispatches.

    reference: the implementation "xla", a function of x, scale and bias, and by keyword residual and options.
    words: the key of the dropout of x, or None.
    """
    (x,) = as_arrays(operation, x=x)
    scale, bias, residual = optional_arrays(operation, scale=scale, bias=bias, residual=residual)
    check_features(operation, x, scale=scale, bias=bias)
    if x.ndim == 0:
        raise ValueError(f"{operation}: x must have a features axis, got a scalar; reshape it to (1,).")
    if residual is not None and (residual.shape, residual.dtype) != (x.shape, x.dtype):
        raise ValueError(
            f"{operation}: residual must be like x, {x.dtype.name}{list(x.shape)}, got "
            f"{residual.dtype.name}{list(residual.shape)}; broadcast or cast it first."
        )
    plain = residual is None and scale is not None and not (returns_total or norm.rounds_before_scale)
    triton = {"triton": partial(_triton_unsupported, x, plain)} if operation == norm.name else {}  # without dropout
    support = {"mosaic": partial(mosaic_unsupported, x, scale, bias), **triton, "xla": lambda: None}
    chosen = choose(operation, implementation, support, preferred=("mosaic",))
    if chosen == "xla" or x.size == 0:
        options = {"epsilon": norm.epsilon, "rounds_before_scale": norm.rounds_before_scale}
        options |= {"returns_total": True} if returns_total else {}
        return reference(x, scale, bias, residual=residual, **options)
    rows = x.reshape(-1, x.shape[-1])
    operands = varying_alike((rows, scale, bias, None if residual is None else residual.reshape(rows.shape), words))
    y, total = apply_norm(norm, chosen, returns_total, *operands)  # pyright: ignore[reportGeneralTypeIssues]
    return y.reshape(x.shape) if total is None else (y.reshape(x.shape), total.reshape(x.shape))


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def apply_norm(
    norm: StaticNorm,
    implementation: Literal["mosaic", "triton"],
    returns_total: bool,
    x: jax.Array,
    scale: jax.Array | None = None,
    bias: jax.Array | None = None,
    residual: jax.Array | None = None,
    words: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array | None]:
    """Returns y and the sum that was normalised; without a residual x, or None if not `returns_total`.

    x, residual: (rows, features). words: (2,) uint32, the key of the dropout of x, or None for none. Differentiable:
    the backward kernel adds the sum's cotangent to the gradient.
    """
    forward, _ = _kernels(implementation)
    y, total, _ = forward(norm, x, scale=scale, bias=bias, residual=residual, words=words)
    return y, x if total is None and returns_total else total


def _kernels(implementation: Literal["mosaic", "triton"]) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Returns the implementation's functions of the signatures of `norm_forward` and `norm_backward`."""
    if implementation == "mosaic":
        return norm_forward, norm_backward
    from pallas_kernels.ops.norms.triton import triton_backward, triton_forward  # imports Triton

    return triton_forward, triton_backward


def _apply_fwd(norm, implementation, returns_total, x, *others):
    x, (scale, bias, residual, words) = x.value, (None if a is None else a.value for a in others)
    forward, _ = _kernels(implementation)
    given = {"scale": scale, "bias": bias, "residual": residual, "words": words}
    y, total, statistics = forward(norm, x, **given, with_statistics=True)
    normed = x if total is None else total
    # Saved values are arrays, or a structure without any: of the residual only whether there is one.
    saved = (normed, statistics, scale, bias, words, None if residual is None else ())
    return (y, normed if returns_total else total), saved


def _apply_bwd(norm, implementation, _, saved, cotangents):
    total, statistics, scale, bias, words, residual = saved
    # The sum may be unused, which saves reading an array.
    dy, dtotal = (None if isinstance(each, SymbolicZero) else each for each in cotangents)
    dy = jnp.zeros_like(total) if dy is None else dy
    _, backward = _kernels(implementation)
    given = {"scale": scale, "bias": bias, "dtotal": dtotal, "words": words}
    dtotal, dx, dscale, dbias = backward(norm, total, statistics, dy, **given)
    return dtotal if dx is None else dx, dscale, dbias, None if residual is None else dtotal, None


apply_norm.defvjp(_apply_fwd, _apply_bwd, symbolic_zeros=True)
