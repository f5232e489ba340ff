"""The public function: checks and dispatch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax

from pallas_kernels.dispatch import Implementation
from pallas_kernels.ops._norms.apply import run_norm
from pallas_kernels.ops._norms.reference import layer_norm_reference
from pallas_kernels.primitives.dimensions import shares
from pallas_kernels.primitives.settings import operation


def _from_parts(arguments: Mapping[str, Any], sums: Mapping[str, Any]) -> Any:
    """Computes the norm where features are cut: means are over all parts."""
    given = {name: value for name, value in arguments.items() if name != "implementation"}
    return layer_norm_reference(**given, mean=sums["d"].mean)


@shares("x: ... +d, scale: d, bias: d, residual: ... d -> ... d, ... d", _from_parts)
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
        residual: an array of x's shape and dtype, or None.
        returns_total: also return total without a residual, where it is x itself. Take it for the residual stream: the
            backward kernel then adds the stream's cotangent, which otherwise is a pass over three arrays.
        epsilon: added to the variance; a non-negative Python number.
        rounds_before_scale: whether the normalised rows are rounded to x.dtype before scale and bias are applied:
            `(centered * rsqrt(...)).astype(x.dtype) * scale + bias`, which is also rounded after the product if scale
            and x have the same dtype.
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

    Source: Ba, Kiros and Hinton, "Layer Normalization", 2016, https://arxiv.org/abs/1607.06450
    """
    return run_norm(
        "layer_norm",
        "layer_norm",
        x,
        scale,
        bias,
        residual,
        epsilon=epsilon,
        rounds_before_scale=rounds_before_scale,
        returns_total=returns_total,
        reference=layer_norm_reference,
        implementation=implementation,
    )
