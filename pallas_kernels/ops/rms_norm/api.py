"""The public function: checks and dispatch."""

from __future__ import annotations

import jax

from pallas_kernels.dispatch import Implementation
from pallas_kernels.ops._norms.apply import check_arguments, dispatch_norm
from pallas_kernels.ops._norms.norm import Norm
from pallas_kernels.ops.rms_norm.reference import rms_norm_reference
from pallas_kernels.primitives.checks import added_number, as_arrays, optional_arrays
from pallas_kernels.primitives.settings import usual_promotion


@usual_promotion
def rms_norm(
    x: jax.Array,
    scale: jax.Array,
    *,
    residual: jax.Array | None = None,
    epsilon: float = 1e-6,
    implementation: Implementation = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Divides rows by their root mean square and multiplies by a scale, after an optional residual sum.

    The same as, in float32 between the casts,

        total = x + residual                                    # rounded to x.dtype; x itself without a residual
        y = total * rsqrt(mean(total**2, axis=-1) + epsilon) * scale

    The rounded sum is what is normalised, so that the two outputs and their gradients belong together.

    Args:
        x: (..., features), bfloat16, float16 or float32 (float64 with "xla").
        scale: (features,), any floating dtype.
        residual: like x, or None.
        epsilon: added to the mean square; a Python number from 0 on.
        implementation: "mosaic" (one Mosaic GPU kernel; Hopper GPUs, or `plgpu.force_gpu_interpret_mode`; at least 128
            features; gradients of rows too long for registers are left to XLA), "triton" (through jax_triton, which the
            extra `triton` installs; NVIDIA GPUs, 128 to 32768 features), "xla", a sequence of them in order of
            preference, or None: "mosaic" where it runs, else "xla".

    Returns:
        y like x; with a residual the pair (y, x + residual).

    Raises:
        TypeError, ValueError: arguments that do not belong together, or an unknown implementation.
        NotImplementedError: the requested implementation cannot run, with the reason.

    Source: Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019, https://arxiv.org/abs/1910.07467
    """
    x, scale = as_arrays("rms_norm", x=x, scale=scale)
    (residual,) = optional_arrays("rms_norm", residual=residual)
    check_arguments("rms_norm", x, scale, None, residual)
    epsilon = added_number("rms_norm", "epsilon", epsilon)
    return dispatch_norm(
        Norm(name="rms_norm", epsilon=epsilon),
        x,
        scale,
        None,
        residual,
        reference=lambda: rms_norm_reference(x, scale, residual=residual, epsilon=epsilon),
        implementation=implementation,
    )
