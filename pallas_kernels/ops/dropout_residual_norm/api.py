"""The public function: checks and dispatch."""

from __future__ import annotations

from functools import partial

import jax

from pallas_kernels.dispatch import Implementation
from pallas_kernels.ops._norms.apply import run_norm
from pallas_kernels.ops._norms.norm import NormName
from pallas_kernels.ops.dropout_residual_norm.reference import dropout_residual_norm_reference
from pallas_kernels.primitives.checks import as_arrays, dropout_words
from pallas_kernels.primitives.dimensions import shares
from pallas_kernels.primitives.settings import operation

_NORMS = ("rms_norm", "layer_norm")


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
        implementation: one of the names below, a sequence of them in order of preference, or None.
            "mosaic": one Mosaic GPU kernel, for Hopper GPUs or `plgpu.force_gpu_interpret_mode`; 128 to 16384 features.
            XLA computes the gradients of rows too long for registers.
            "xla": always runs.
            None: "mosaic" if it can run, else "xla".

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
    return run_norm(
        "dropout_residual_norm",
        norm,
        x,
        scale,
        bias,
        residual,
        epsilon=epsilon,
        rounds_before_scale=rounds_before_scale,
        rate=rate,
        words=words,
        reference=partial(dropout_residual_norm_reference, rate=rate, key=words, norm=norm),
        implementation=implementation,
    )
