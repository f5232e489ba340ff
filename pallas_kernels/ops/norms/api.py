"""The public functions: RMSNorm and LayerNorm with an optional residual sum in front, and with dropout before it."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax

from pallas_kernels.dispatch import Implementation
from pallas_kernels.ops.norms.apply import run_norm
from pallas_kernels.ops.norms.norm import NormName, StaticNorm
from pallas_kernels.ops.norms.reference import (
    dropout_residual_norm_reference,
    layer_norm_reference,
    norm_reference,
    rms_norm_reference,
)
from pallas_kernels.primitives.checks import added_number, as_arrays, dropout_words, static_flag
from pallas_kernels.primitives.dimensions import shares
from pallas_kernels.primitives.settings import operation

_NORMS = ("rms_norm", "layer_norm")


def _from_parts(is_centered: bool, arguments: Mapping[str, Any], sums: Mapping[str, Any]) -> Any:
    """Computes a norm where features are cut: means are over all parts."""
    given = {name: value for name, value in arguments.items() if name != "implementation"}
    return norm_reference(**given, is_centered=is_centered, mean=sums["d"].mean)


@shares("x: ... +d, scale: d, residual: ... d -> ... d, ... d", partial(_from_parts, False))
@operation
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


@shares("x: ... +d, scale: d, bias: d, residual: ... d -> ... d, ... d", partial(_from_parts, True))
@operation
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


@shares("x: ... !d, scale: d, bias: d, residual: ... d, key: key of ... d -> ... d, ... d")
@operation
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
