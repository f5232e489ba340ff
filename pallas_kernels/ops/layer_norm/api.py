"""The public function: checks and dispatch."""

from __future__ import annotations

from functools import partial

import jax

from pallas_kernels.dispatch import Implementation, choose
from pallas_kernels.ops._norms.apply import apply_norm, check_arguments, mosaic_unsupported
from pallas_kernels.ops._norms.norm import Norm
from pallas_kernels.ops.layer_norm.reference import layer_norm_reference
from pallas_kernels.primitives.checks import added_number, as_arrays, optional_arrays
from pallas_kernels.primitives.settings import usual_promotion
from pallas_kernels.primitives.triton_calls import triton_unsupported


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
            features), "triton" (through jax_triton, which the extra `triton` installs; NVIDIA GPUs, 128 to 32768
            features), "xla", a sequence of them in order of preference, or None: "mosaic" where it runs, else "xla".

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
    support = {
        "mosaic": partial(mosaic_unsupported, x, scale, bias),
        "triton": partial(triton_unsupported, x),
        "xla": lambda: None,
    }
    chosen = choose("layer_norm", implementation, support, preferred=("mosaic",))
    if chosen == "xla" or x.size == 0:
        return layer_norm_reference(x, scale, bias, residual=residual, epsilon=epsilon)
    norm = Norm(name="layer_norm", epsilon=epsilon)
    if chosen == "triton":
        from pallas_kernels.ops._norms.triton import apply_norm as apply_norm_triton  # imports Triton

        y, total = apply_norm_triton(norm, x, scale=scale, bias=bias, residual=residual)
        return y if total is None else (y, total)
    y, total = apply_norm(norm, x, scale=scale, bias=bias, residual=residual)
    return y if total is None else (y, total)
