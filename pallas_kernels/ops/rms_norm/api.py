"""The public function: checks, dispatch, and the gradient of the Mosaic GPU kernels."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from pallas_kernels.dispatch import Implementation, choose
from pallas_kernels.ops.rms_norm.mosaic_gpu import rms_norm_forward
from pallas_kernels.ops.rms_norm.mosaic_gpu_vjp import rms_norm_backward
from pallas_kernels.ops.rms_norm.reference import rms_norm_reference
from pallas_kernels.primitives.platform import mosaic_gpu_unsupported, varying_like
from pallas_kernels.primitives.rows import LANES

MOSAIC_DTYPES = ("bfloat16", "float16", "float32")


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
        epsilon: added to the mean square.
        implementation: "mosaic" (one Mosaic GPU kernel; Hopper GPUs, or `plgpu.force_gpu_interpret_mode`; at least 128
            features), "xla", a sequence of them in order of preference, or None: "mosaic" where it runs, else "xla".

    Returns:
        y like x; with a residual the pair (y, x + residual).

    Raises:
        TypeError, ValueError: arguments that do not belong together, or an unknown implementation.
        NotImplementedError: the requested implementation cannot run, with the reason.

    Source: Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019, https://arxiv.org/abs/1910.07467
    """
    x, scale = jnp.asarray(x), jnp.asarray(scale)
    residual = None if residual is None else jnp.asarray(residual)
    _check(x, scale, residual)
    support = {"mosaic": partial(mosaic_unsupported, x, scale), "xla": lambda: None}
    chosen = choose("rms_norm", implementation, support, preferred=("mosaic",))
    if chosen == "xla" or x.size == 0:
        return rms_norm_reference(x, scale, residual=residual, epsilon=epsilon)
    rows = x.reshape(-1, x.shape[-1])
    residual_rows = None if residual is None else varying_like(residual.reshape(rows.shape), x)
    # Marked as varying like x, so that shard_map sums its gradient over the devices that x is spread over.
    scale = varying_like(scale, rows) if residual_rows is None else varying_like(scale, rows, residual_rows)
    rows = rows if residual_rows is None else varying_like(rows, residual_rows)
    y, total = _rms_norm_mosaic(float(epsilon), rows, scale, residual_rows)  # pyright: ignore[reportGeneralTypeIssues]
    y = y.reshape(x.shape)
    return y if total is None else (y, total.reshape(x.shape))


def mosaic_unsupported(x: jax.Array, scale: jax.Array) -> str | None:
    """Why the Mosaic GPU kernels cannot take these arguments here, or None where they can."""
    for name, array in (("x", x), ("scale", scale)):
        if array.dtype.name not in MOSAIC_DTYPES:
            return f"{name} is {array.dtype.name}, the kernels take {', '.join(MOSAIC_DTYPES)}"
    if x.shape[-1] < LANES and x.size:
        return f"rows have {x.shape[-1]} features, a warpgroup shares at least {LANES}"
    return mosaic_gpu_unsupported()


def _check(x: jax.Array, scale: jax.Array, residual: jax.Array | None) -> None:
    for name, array in (("x", x), ("scale", scale)):
        if not jnp.issubdtype(array.dtype, jnp.floating):
            raise TypeError(f"rms_norm: {name} must be floating, got {array.dtype.name}; cast it first.")
    if x.ndim == 0:
        raise ValueError("rms_norm: x must have a features axis, got a scalar; reshape it to (1,).")
    if scale.shape != x.shape[-1:]:
        raise ValueError(
            f"rms_norm: scale must be ({x.shape[-1]},), one value a feature of x {x.shape}, got {scale.shape}."
        )
    if residual is not None and (residual.shape, residual.dtype) != (x.shape, x.dtype):
        raise ValueError(
            f"rms_norm: residual must be like x, {x.dtype.name}{list(x.shape)}, got "
            f"{residual.dtype.name}{list(residual.shape)}; broadcast or cast it first."
        )


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _rms_norm_mosaic(
    epsilon: float, x: jax.Array, scale: jax.Array, residual: jax.Array | None
) -> tuple[jax.Array, jax.Array | None]:
    return rms_norm_forward(x, scale, residual, epsilon=epsilon)


def _mosaic_fwd(epsilon, x, scale, residual):
    x, scale = x.value, scale.value
    residual = None if residual is None else residual.value
    y, total = rms_norm_forward(x, scale, residual, epsilon=epsilon)
    return (y, total), (x if total is None else total, scale)


def _mosaic_bwd(epsilon, saved, cotangents):
    total, scale = saved
    dy, dtotal = cotangents
    has_residual = dtotal is not None
    if isinstance(dtotal, SymbolicZero):  # the sum is not used: one array less to read
        dtotal = None
    if isinstance(dy, SymbolicZero):
        dtotal = jnp.zeros_like(total) if dtotal is None else dtotal
        return dtotal, jnp.zeros_like(scale), dtotal if has_residual else None
    dx, dscale = rms_norm_backward(total, scale, dy, dtotal, epsilon=epsilon)
    return dx, dscale, dx if has_residual else None


_rms_norm_mosaic.defvjp(_mosaic_fwd, _mosaic_bwd, symbolic_zeros=True)
