"""The public function: checks and dispatch."""

from __future__ import annotations

from functools import partial

import jax

from pallas_kernels.dispatch import Implementation, choose
from pallas_kernels.ops._norms.apply import apply_norm, check_arguments, mosaic_unsupported
from pallas_kernels.ops._norms.norm import Norm, NormName
from pallas_kernels.ops.dropout_residual_norm.reference import dropout_residual_norm_reference
from pallas_kernels.primitives.checks import added_number, as_arrays, dropout_words, optional_arrays
from pallas_kernels.primitives.settings import usual_promotion

_NORMS = ("rms_norm", "layer_norm")


@usual_promotion
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
    implementation: Implementation = None,
) -> tuple[jax.Array, jax.Array]:
    """Adds a dropped-out branch to the residual stream and normalises the sum.

    The same as, in float32 between the casts,

        total = residual + where(keep, x / (1 - rate), 0)       # rounded to x.dtype
        y = rms_norm(total, scale)                              # or layer_norm(total, scale, bias)

    `keep` depends on the key and on an element's place in its array alone: it is the same for every implementation, and
    the backward pass draws it again and stores nothing. Under `jax.vmap` with one key and under `shard_map` each member
    or device has the same mask: split or fold in the key where that is not wanted.

    Args:
        x: (..., features), the branch; bfloat16, float16 or float32 (float64 with "xla").
        scale, bias: (features,), any floating dtype, or None. "rms_norm" has no bias.
        residual: like x.
        rate: the share of x that is set to zero, 0 <= rate < 1; static.
        key: of `jax.random.key` or `jax.random.PRNGKey`; None only with a rate of 0, for evaluation.
        norm: "rms_norm" or "layer_norm".
        epsilon: added to the mean square, or variance; a Python number from 0 on.
        implementation: "mosaic" (one Mosaic GPU kernel; Hopper GPUs, or `plgpu.force_gpu_interpret_mode`; at least 128
            features; gradients of rows too long for registers are left to XLA), "xla", a sequence of them in order of
            preference, or None: "mosaic" where it runs, else "xla".

    Returns:
        (y, total), both like x.

    Raises:
        TypeError, ValueError: arguments that do not belong together, or an unknown norm or implementation.
        NotImplementedError: the requested implementation cannot run, with the reason.

    Source: Srivastava et al., "Dropout", 2014, https://jmlr.org/papers/v15/srivastava14a.html; the mask's generator is
    that of `pallas_kernels.primitives.random`.
    """
    x, residual = as_arrays("dropout_residual_norm", x=x, residual=residual)
    scale, bias = optional_arrays("dropout_residual_norm", scale=scale, bias=bias)
    check_arguments("dropout_residual_norm", x, scale, bias, residual)
    _check(norm, bias)
    words = dropout_words("dropout_residual_norm", rate, key, rate_name="rate", key_name="key")
    epsilon = added_number("dropout_residual_norm", "epsilon", epsilon)
    support = {"mosaic": partial(mosaic_unsupported, x, scale, bias), "xla": lambda: None}
    chosen = choose("dropout_residual_norm", implementation, support, preferred=("mosaic",))
    if chosen == "xla" or x.size == 0:
        return dropout_residual_norm_reference(
            x, scale, bias, residual=residual, rate=rate, key=words, norm=norm, epsilon=epsilon
        )
    settings = Norm(name=norm, epsilon=epsilon, rate=float(rate))
    y, total = apply_norm(settings, x, scale=scale, bias=bias, residual=residual, words=words)
    assert total is not None
    return y, total


def _check(norm: str, bias: jax.Array | None) -> None:
    if norm not in _NORMS:
        raise ValueError(f"dropout_residual_norm: unknown norm {norm!r}; it has {' and '.join(map(repr, _NORMS))}.")
    if norm == "rms_norm" and bias is not None:
        raise ValueError("dropout_residual_norm: 'rms_norm' has no bias; pass bias=None, or norm='layer_norm'.")
