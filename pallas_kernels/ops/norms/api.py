"""The public functions: RMSNorm and LayerNorm with an optional residual sum in front, and with dropout before it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from pallas_kernels.dispatch import Implementation, choose
from pallas_kernels.ops.norms.backward import norm_backward
from pallas_kernels.ops.norms.config import LONGEST_ROW
from pallas_kernels.ops.norms.forward import norm_forward
from pallas_kernels.ops.norms.norm import NormName, StaticNorm
from pallas_kernels.ops.norms.reference import (
    dropout_residual_norm_reference,
    layer_norm_reference,
    norm_reference,
    rms_norm_reference,
)
from pallas_kernels.primitives.checks import (
    added_number,
    as_arrays,
    check_features,
    check_like,
    dropout_words,
    optional_arrays,
    static_flag,
)
from pallas_kernels.primitives.operation import operation
from pallas_kernels.primitives.platform import dtypes_unsupported, mosaic_gpu_unsupported, varying_alike
from pallas_kernels.primitives.rows import THREADS
from pallas_kernels.primitives.triton_calls import triton_unsupported

_NORMS = ("rms_norm", "layer_norm")


def _from_parts(is_centered: bool, arguments: Mapping[str, Any], sums: Mapping[str, Any]) -> Any:
    """Computes a norm where features are cut: means are over all parts."""
    given = {name: value for name, value in arguments.items() if name != "implementation"}
    return norm_reference(**given, is_centered=is_centered, mean=sums["d"].mean)


@operation("x: ... +d, scale: d, residual: ... d -> ... d, ... d", partial(_from_parts, False))
def rms_norm(
    x: jax.Array,
    scale: jax.Array,
    *,
    residual: jax.Array | None = None,
    returns_total: bool = False,
    epsilon: float = 1e-6,
    rounds_before_scale: bool = False,
    implementation: Implementation = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Divides each row by its root mean square and multiplies by a scale, after an optional residual sum.

    Equivalent to this, in float32 between the casts:

        total = x + residual                                    # rounded to x.dtype; x itself without a residual
        y = total * rsqrt(mean(total**2, axis=-1) + epsilon) * scale

    The norm takes the rounded sum, so that both outputs and their gradients are consistent.

    Args:
        x: (..., features), bfloat16, float16 or float32 (float64 with "xla").
        scale: (features,), any floating dtype.
        residual: an array of x's shape and dtype, or None.
        returns_total: also return total without a residual, where it is x itself. Take it for the residual stream: the
            backward kernel then adds the stream's cotangent, which otherwise is a pass over three arrays.
        epsilon: added to the mean square; a non-negative Python number.
        rounds_before_scale: whether the normalised rows are rounded to x.dtype before they are multiplied by the scale,
            as Llama and T5 do: `(total * rsqrt(...)).astype(x.dtype) * scale`.
        implementation: one of the names below, a sequence of them in order of preference, or None.
            "mosaic": one Mosaic GPU kernel, for Hopper GPUs or `plgpu.force_gpu_interpret_mode`; 128 to 16384 features.
            XLA computes the gradients of rows too long for registers.
            "triton": through jax_triton, which the extra `triton` installs, for NVIDIA GPUs; 128 to 32768 features, a
            scale, no residual, `returns_total` or `rounds_before_scale`.
            "xla": always runs.
            None: "mosaic" if it can run, else "xla".

    Returns:
        y, with x's shape and dtype; with a residual or `returns_total`, the pair (y, total).

    Raises:
        TypeError, ValueError: the arguments do not fit together, or the implementation is unknown.
        NotImplementedError: the requested implementation cannot run; the message says why.

    Source: Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019, https://arxiv.org/abs/1910.07467
    """
    (scale,) = as_arrays("rms_norm", scale=scale)
    norm = _static("rms_norm", "rms_norm", epsilon, rounds_before_scale)
    returns_total = static_flag("rms_norm", "returns_total", returns_total)
    arrays = (x, scale, None, residual)
    return run_norm("rms_norm", norm, rms_norm_reference, implementation, *arrays, returns_total=returns_total)


@operation("x: ... +d, scale: d, bias: d, residual: ... d -> ... d, ... d", partial(_from_parts, True))
def layer_norm(
    x: jax.Array,
    scale: jax.Array | None = None,
    bias: jax.Array | None = None,
    *,
    residual: jax.Array | None = None,
    returns_total: bool = False,
    epsilon: float = 1e-6,
    rounds_before_scale: bool = False,
    implementation: Implementation = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Subtracts each row's mean and divides by its standard deviation, after an optional residual sum.

    Equivalent to this, in float32 between the casts:

        total = x + residual                                    # rounded to x.dtype; x itself without a residual
        centered = total - mean(total, axis=-1)
        y = centered * rsqrt(mean(centered**2, axis=-1) + epsilon) * scale + bias

    The norm takes the rounded sum, so that both outputs and their gradients are consistent.

    Args:
        x: (..., features), bfloat16, float16 or float32 (float64 with "xla").
        scale, bias: (features,), any floating dtype, or None.
        epsilon: added to the variance; a non-negative Python number.
        rounds_before_scale: whether the normalised rows are rounded to x.dtype before scale and bias are applied:
            `(centered * rsqrt(...)).astype(x.dtype) * scale + bias`, which is also rounded after the product if scale
            and x have the same dtype.
        residual, returns_total, implementation: as in `rms_norm`.

    Returns:
        y, with x's shape and dtype; with a residual or `returns_total`, the pair (y, total).

    Raises:
        TypeError, ValueError: the arguments do not fit together, or the implementation is unknown.
        NotImplementedError: the requested implementation cannot run; the message says why.

    Source: Ba, Kiros and Hinton, "Layer Normalization", 2016, https://arxiv.org/abs/1607.06450
    """
    norm = _static("layer_norm", "layer_norm", epsilon, rounds_before_scale)
    returns_total = static_flag("layer_norm", "returns_total", returns_total)
    arrays = (x, scale, bias, residual)
    return run_norm("layer_norm", norm, layer_norm_reference, implementation, *arrays, returns_total=returns_total)


@operation("x: ... !d, scale: d, bias: d, residual: ... d, key: key of ... d -> ... d, ... d")
def dropout_residual_norm(
    x: jax.Array,
    scale: jax.Array | None = None,
    bias: jax.Array | None = None,
    *,
    residual: jax.Array,
    rate: float,
    key: jax.Array | None,
    norm: NormName = "rms_norm",
    epsilon: float = 1e-6,
    rounds_before_scale: bool = False,
    implementation: Implementation = None,
) -> tuple[jax.Array, jax.Array]:
    """Applies dropout to a branch, adds the residual and normalises the sum.

    Equivalent to this, in float32 between the casts:

        total = residual + where(keep, x / (1 - rate), 0)       # rounded to x.dtype
        y = rms_norm(total, scale)                              # or layer_norm(total, scale, bias)

    `keep` depends only on the key and the element's position. It is the same for every implementation and is never
    stored: the backward pass computes it again. Members of a `jax.vmap`, and devices of a `jax.shard_map`, that share a
    key get the same mask. Give each its own key if they must differ.

    Args:
        x: (..., features), the branch; bfloat16, float16 or float32 (float64 with "xla").
        scale, bias: (features,), any floating dtype, or None. "rms_norm" has no bias.
        residual: an array of x's shape and dtype.
        rate: the share of x that is set to zero, a Python number, 0 <= rate < 1.
        key: one key from `jax.random.key` or `jax.random.PRNGKey`. None is allowed only with a rate of 0.
        norm: "rms_norm" or "layer_norm".
        epsilon: added to the mean square or variance; a non-negative Python number.
        rounds_before_scale: whether the normalised rows are rounded to x.dtype before scale and bias; see `rms_norm`
            and `layer_norm`.
        implementation: as in `rms_norm`, but there is no "triton".

    Returns:
        (y, total), both with x's shape and dtype.

    Raises:
        TypeError, ValueError: the arguments do not fit together, or the norm or implementation is unknown.
        NotImplementedError: the requested implementation cannot run; the message says why.

    Source: Srivastava et al., "Dropout", 2014, https://jmlr.org/papers/v15/srivastava14a.html. The mask's generator is
    in `pallas_kernels.primitives.random`.
    """
    (residual,) = as_arrays("dropout_residual_norm", residual=residual)
    if norm not in _NORMS:
        raise ValueError(f"dropout_residual_norm: unknown norm {norm!r}; it has {' and '.join(map(repr, _NORMS))}.")
    if norm == "rms_norm" and bias is not None:
        raise ValueError("dropout_residual_norm: 'rms_norm' has no bias; pass bias=None, or norm='layer_norm'.")
    words = dropout_words("dropout_residual_norm", rate, key, rate_name="rate", key_name="key")
    static = _static("dropout_residual_norm", norm, epsilon, rounds_before_scale, rate=float(rate))
    reference = partial(dropout_residual_norm_reference, rate=rate, key=words, norm=norm)
    arrays = (x, scale, bias, residual)
    return run_norm("dropout_residual_norm", static, reference, implementation, *arrays, words=words)


def _static(operation: str, name: NormName, epsilon: Any, rounds_before_scale: Any, rate: float = 0.0) -> StaticNorm:
    epsilon = added_number(operation, "epsilon", epsilon)
    rounds_before_scale = static_flag(operation, "rounds_before_scale", rounds_before_scale)
    return StaticNorm(name=name, epsilon=epsilon, rate=rate, rounds_before_scale=rounds_before_scale)


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
    if x.ndim == 0:
        raise ValueError(f"{operation}: x must have a features axis, got a scalar; reshape it to (1,).")
    check_features(operation, x, scale=scale, bias=bias)
    check_like(operation, "residual", residual, "x", x)
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
