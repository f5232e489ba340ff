"""The public function: checks and dispatch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax

from pallas_kernels.dispatch import Implementation
from pallas_kernels.ops._norms.apply import run_norm
from pallas_kernels.ops._norms.reference import rms_norm_reference
from pallas_kernels.primitives.checks import as_arrays
from pallas_kernels.primitives.dimensions import shares
from pallas_kernels.primitives.settings import operation


def _from_parts(arguments: Mapping[str, Any], sums: Mapping[str, Any]) -> Any:
    """Computes the norm where features are cut: means are over all parts."""
    given = {name: value for name, value in arguments.items() if name != "implementation"}
    return rms_norm_reference(**given, mean=sums["d"].mean)


@shares("x: ... +d, scale: d, residual: ... d -> ... d, ... d", _from_parts)
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
    return run_norm(
        "rms_norm",
        "rms_norm",
        x,
        scale,
        None,
        residual,
        epsilon=epsilon,
        rounds_before_scale=rounds_before_scale,
        returns_total=returns_total,
        reference=rms_norm_reference,
        implementation=implementation,
    )
