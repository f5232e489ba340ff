"""The public function: checks and dispatch."""

from __future__ import annotations

import jax

from pallas_kernels.dispatch import Implementation
from pallas_kernels.ops._norms.apply import check_arguments, dispatch_norm
from pallas_kernels.ops._norms.norm import Norm
from pallas_kernels.ops.layer_norm.reference import layer_norm_reference
from pallas_kernels.primitives.checks import added_number, as_arrays, optional_arrays
from pallas_kernels.primitives.settings import usual_promotion


@usual_promotion
def layer_norm(
    x: jax.Array,
    scale: jax.Array | None = None,
    bias: jax.Array | None = None,
    *,
    residual: jax.Array | None = None,
    epsilon: float = 1e-6,
    implementation: Implementation = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Takes rows' means off and divides by their standard deviation, after an optional residual sum.

    The same as, in float32 between the casts,

        total = x + residual                                    # rounded to x.dtype; x itself without a residual
        centered = total - mean(total, axis=-1)
        y = centered * rsqrt(mean(centered**2, axis=-1) + epsilon) * scale + bias

    The rounded sum is what is normalised, so that the two outputs and their gradients belong together.

    Args:
        x: (..., features), bfloat16, float16 or float32 (float64 with "xla").
        scale, bias: (features,), any floating dtype, or None.
        residual: like x, or None.
        epsilon: added to the variance; a Python number from 0 on.
        implementation: "mosaic" (one Mosaic GPU kernel; Hopper GPUs, or `plgpu.force_gpu_interpret_mode`; at least 128
            features; gradients of rows too long for registers are left to XLA), "triton" (through jax_triton, which the
            extra `triton` installs; NVIDIA GPUs, 128 to 32768 features), "xla", a sequence of them in order of
            preference, or None: "mosaic" where it runs, else "xla".

    Returns:
        y like x; with a residual the pair (y, x + residual).

    Raises:
        TypeError, ValueError: arguments that do not belong together, or an unknown implementation.
        NotImplementedError: the requested implementation cannot run, with the reason.

    Source: Ba, Kiros and Hinton, "Layer Normalization", 2016, https://arxiv.org/abs/1607.06450
    """
    (x,) = as_arrays("layer_norm", x=x)
    scale, bias, residual = optional_arrays("layer_norm", scale=scale, bias=bias, residual=residual)
    check_arguments("layer_norm", x, scale, bias, residual)
    epsilon = added_number("layer_norm", "epsilon", epsilon)
    return dispatch_norm(
        Norm(name="layer_norm", epsilon=epsilon),
        x,
        scale,
        bias,
        residual,
        reference=lambda: layer_norm_reference(x, scale, bias, residual=residual, epsilon=epsilon),
        implementation=implementation,
    )
