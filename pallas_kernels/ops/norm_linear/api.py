"""The public function: checks and dispatch. It uses the kernels and gradients of the norms and the linear layer."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels.arguments import Norm
from pallas_kernels.dispatch import Implementation, choose, partly_by_xla
from pallas_kernels.ops._products.checks import (
    check_linear,
    check_operands,
    optional_activation,
    result_dtype,
)
from pallas_kernels.ops._products.norm import as_rows, can_fuse_norm, check_norm, norm_unsupported, prologue, row_norm
from pallas_kernels.ops.linear import api as linear_api
from pallas_kernels.ops.linear.config import Config, problem
from pallas_kernels.ops.linear.mosaic_gpu import linear_forward
from pallas_kernels.ops.norm_linear.config import FEWEST_ROWS, is_preferred, normed_config
from pallas_kernels.ops.norm_linear.reference import norm_linear_reference
from pallas_kernels.primitives.checks import as_arrays, optional_arrays
from pallas_kernels.primitives.odd_sizes import matmul
from pallas_kernels.primitives.platform import varying_alike
from pallas_kernels.primitives.settings import usual_promotion


@usual_promotion
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
        x: (..., features), bfloat16 or float16 (float32 with "triton", any floating dtype with "xla"). The leading
            dimensions are rows.
        w: (features, outputs), of x's dtype.
        norm: the norm of x.
        bias, activation, residual, out_dtype: as in `linear`.
        implementation: one of the names below, a sequence of them in order of preference, or None.
            "mosaic": Mosaic GPU kernels, for Hopper GPUs or `plgpu.force_gpu_interpret_mode`; sizes as for `linear`,
            and at least 128 features.
            "triton": through jax_triton, which the extra `triton` installs, for NVIDIA GPUs. The norm must be "rms",
            with a scale and without given mean squares; the product's launch computes it. The result has x's dtype.
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
    x, w = as_arrays("norm_linear", x=x, w=w)
    bias, residual = optional_arrays("norm_linear", bias=bias, residual=residual)
    dtype = result_dtype("norm_linear", x, out_dtype)
    check_operands("norm_linear", x=x, w=w)
    check_linear("norm_linear", x, w.shape, bias=bias, activation=activation, residual=residual, dtype=dtype)
    if norm is None:
        raise TypeError("norm_linear: norm must be a pallas_kernels.Norm, got None; without one, call linear.")
    check_norm("norm_linear", norm, x)
    support = {
        "mosaic": partial(mosaic_unsupported, x, w, norm, bias, dtype),
        "triton": partial(triton_unsupported, x, norm, dtype),
        "xla": lambda: None,
    }
    rows = as_rows(x)
    sizes = (rows.shape[0], w.shape[1], w.shape[0])
    is_best = is_preferred(*sizes, has_activation=activation is not None)
    has_best_gradient = norm.mean_square is None and residual is None and rows.shape[0] >= FEWEST_ROWS
    order = ("mosaic",) if is_best or has_best_gradient else ()
    chosen = choose("norm_linear", implementation, support, preferred=order)
    if chosen == "xla" or x.size == 0 or w.size == 0:
        given = {"bias": bias, "activation": activation, "residual": residual, "out_dtype": dtype}
        multiply = matmul if implementation is None else jnp.matmul
        return norm_linear_reference(x, w, norm=norm, **given, multiply=multiply).astype(dtype)
    residual = None if residual is None else as_rows(residual)
    rows, norm, *others = varying_alike((rows, norm, w, bias, residual))
    if chosen == "triton":
        from pallas_kernels.ops.linear.triton import linear_triton  # imports Triton

        weights, *rest = others
        y: jax.Array = linear_triton(activation, norm.epsilon, rows, weights, norm.scale, *rest)  # pyright: ignore
        return y.reshape(*x.shape[:-1], w.shape[1])
    config = normed_config(problem(rows, w, bias, activation, residual, dtype), rows.shape[0])
    product = partial(_with_fused_norm, config) if can_fuse_norm(config, norm, rows) else _with_norm_before

    def reference(x, norm, w, bias, residual):
        given = {"bias": bias, "activation": activation, "residual": residual, "out_dtype": dtype}
        return norm_linear_reference(x, w, norm=norm, **given).astype(dtype)

    by_xla = implementation is None and not is_best
    y = partly_by_xla(partial(product, activation, dtype), reference, forward=by_xla)(rows, norm, *others)
    return y.reshape(*x.shape[:-1], w.shape[1])


def _with_norm_before(activation: str | None, out_dtype: jnp.dtype, x, norm, w, bias, residual):
    normed, row_scale = prologue(norm, x)
    return linear_api.linear_mosaic(activation, out_dtype, normed, w, bias, residual, row_scale)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _with_fused_norm(config: Config, activation: str | None, out_dtype: jnp.dtype, x, norm, w, bias, residual):
    forms = {"activation": optional_activation("norm_linear", activation), "out_dtype": out_dtype, "config": config}
    return linear_forward(x, w, bias, residual, norm=row_norm(norm), **forms)[0]


def _fused_fwd(config, activation, out_dtype, *operands):
    return jax.vjp(partial(_with_norm_before, activation, out_dtype), *operands)


def _fused_bwd(config, activation, out_dtype, pullback, cotangent):
    return pullback(cotangent)


_with_fused_norm.defvjp(_fused_fwd, _fused_bwd)


def mosaic_unsupported(
    x: jax.Array, w: jax.Array, norm: Norm, bias: jax.Array | None, out_dtype: jnp.dtype
) -> str | None:
    """Returns why the Mosaic GPU kernels cannot take these arguments here, or None if they can."""
    return linear_api.mosaic_unsupported(x, w, bias, out_dtype) or norm_unsupported(norm, x)


def triton_unsupported(x: jax.Array, norm: Norm, out_dtype: jnp.dtype) -> str | None:
    """Returns why the Triton kernel cannot take these arguments here, or None if it can."""
    if norm.kind != "rms" or norm.scale is None or norm.mean_square is not None:
        return "the kernel's norm is of kind 'rms', with a scale, and computes the mean squares itself"
    return linear_api.triton_unsupported(x, out_dtype)
