"""The public function: checks, dispatch, and the gradient of the Mosaic GPU kernels."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.dispatch import Implementation, choose
from pallas_kernels.ops.softmax.masking import Masking, mask_rows
from pallas_kernels.ops.softmax.mosaic_gpu import softmax_backward, softmax_forward, xla_gradient
from pallas_kernels.ops.softmax.reference import softmax_reference
from pallas_kernels.primitives.checks import (
    as_arrays,
    check_floating,
    finite_number,
    optional_arrays,
    static_flag,
    static_integer,
)
from pallas_kernels.primitives.operation import operation
from pallas_kernels.primitives.platform import dtypes_unsupported, mosaic_gpu_unsupported, varying_alike
from pallas_kernels.primitives.rows import THREADS
from pallas_kernels.primitives.triton_calls import triton_unsupported


def _dimensions(arguments: Mapping[str, Any]) -> str:
    x, axis = arguments["x"], arguments["axis"] % arguments["x"].ndim
    whole = {axis, x.ndim - 2} if arguments["is_causal"] else {axis}
    names = " ".join(f"!n{place}" if place in whole else f"n{place}" for place in range(x.ndim))
    return f"x: {names}, mask: {names} -> {names}"


@operation(_dimensions)
def softmax(
    x: jax.Array,
    *,
    axis: int = -1,
    scale: float | None = None,
    mask: jax.Array | None = None,
    is_causal: bool = False,
    implementation: Implementation = None,
) -> jax.Array:
    """Computes the softmax of scaled and masked scores along an axis.

    Equivalent to this, in float32 between the casts:

        score = scale * x + mask                # boolean mask: where(mask, scale * x, -inf)
        y = jax.nn.softmax(score, axis)

    If all scores along the axis are -inf, the result is zeros instead of NaN.

    Args:
        x: floating, of any shape with an axis.
        axis: the axis along which the weights sum to one.
        scale: a Python number, or None for 1.
        mask: broadcastable to x, boolean (True keeps) or floating (added), or None. For "mosaic", XLA converts a
            boolean mask to bytes, in the kernel that makes the mask if there is one. A floating mask has a gradient,
            which XLA computes.
        is_causal: keep column j of row i, of the last two axes, only if j <= i. `axis` must be the last one. For
            "mosaic" it is a boolean mask.
        implementation: one of the names below, a sequence of them in order of preference, or None.
            "mosaic": one Mosaic GPU kernel, for Hopper GPUs or `plgpu.force_gpu_interpret_mode`; along the last axis,
            with a size of at least 128. XLA computes the gradients of more than 8192 values that are no multiple of 512
            or fill more than 110 KiB.
            "triton": through jax_triton, which the extra `triton` installs, for NVIDIA GPUs; along the last axis, with
            a size of 128 to 32768 and no mask.
            "xla": always runs.
            None: "mosaic" if it can run, else "xla".

    Returns:
        The weights, with x's shape and dtype.

    Raises:
        TypeError, ValueError: the arguments do not fit together, or the implementation is unknown.
        NotImplementedError: the requested implementation cannot run; the message says why.
    """
    (x,) = as_arrays("softmax", x=x)
    axis = static_integer("softmax", "axis", axis)
    is_causal = static_flag("softmax", "is_causal", is_causal)
    (mask,) = optional_arrays("softmax", mask=mask)
    axis, scale = _check(x, axis, scale, mask, is_causal)
    support = {
        "mosaic": partial(mosaic_unsupported, x, axis=axis, mask=mask),
        "triton": partial(_triton_unsupported, x, axis=axis, mask=mask),
        "xla": lambda: None,
    }
    chosen = choose("softmax", implementation, support, preferred=("mosaic",))
    if chosen == "xla" or x.size == 0:
        return softmax_reference(x, axis=axis, scale=scale, mask=mask, is_causal=is_causal)
    rows = x.reshape(-1, x.shape[-1])
    if chosen == "triton":
        from pallas_kernels.ops.softmax.triton import softmax_rows  # imports Triton

        weights = softmax_rows(rows, 1.0 if scale is None else scale, x.shape[-2] if is_causal else 0)  # pyright: ignore
        return weights.reshape(x.shape)
    masking, mask = masking_of(x, scale=scale, mask=mask, is_causal=is_causal)
    rows, mask = varying_alike((rows, mask))
    weights: jax.Array = _softmax_mosaic(masking, rows, mask)  # pyright: ignore
    return weights.reshape(x.shape)


def masking_of(
    x: jax.Array, *, scale: float | None = None, mask: jax.Array | None = None, is_causal: bool = False
) -> tuple[Masking, jax.Array | None]:
    """Converts the arguments of `softmax` to the kernels' arguments: the static masking, and the mask as rows."""
    if is_causal:
        kept = jnp.tri(*x.shape[-2:], dtype=bool)
        mask = kept if mask is None else kept & mask if mask.dtype == jnp.bool_ else jnp.where(kept, mask, -jnp.inf)
    if mask is None:
        return Masking(scale=scale), None
    is_boolean = mask.dtype == jnp.bool_
    mask, index = mask_rows(mask, x.shape)
    # Mosaic GPU would load booleans as bits; XLA keeps them as bytes.
    mask = mask.astype(jnp.int8) if is_boolean else mask
    return Masking(scale=scale, is_boolean=is_boolean, mask_index=index), mask


def mosaic_unsupported(x: jax.Array, *, axis: int = -1, mask: jax.Array | None = None) -> str | None:
    """Returns why the Mosaic GPU kernels cannot take these arguments here, or None if they can."""
    if reason := dtypes_unsupported(x=x, mask=None if mask is None or mask.dtype == jnp.bool_ else mask):
        return reason
    if reason := _axis_unsupported(x, axis):
        return reason
    if x.shape[-1] < THREADS and x.size:
        return f"rows have {x.shape[-1]} features, a warpgroup shares at least {THREADS}"
    return mosaic_gpu_unsupported()


def _triton_unsupported(x: jax.Array, *, axis: int, mask: jax.Array | None) -> str | None:
    reason = _axis_unsupported(x, axis) or (None if mask is None else "the kernels take no mask")
    return reason or triton_unsupported(x)


def _axis_unsupported(x: jax.Array, axis: int) -> str | None:
    if axis % x.ndim == x.ndim - 1:
        return None
    return f"axis {axis} is not the last of {x.ndim}, along which the kernels go; move it there first"


def _check(
    x: jax.Array, axis: int, scale: float | None, mask: jax.Array | None, is_causal: bool
) -> tuple[int, float | None]:
    check_floating("softmax", x=x)
    if not -x.ndim <= axis < x.ndim:
        raise ValueError(f"softmax: axis must name one of the {x.ndim} axes of x {x.shape}, got {axis}.")
    if isinstance(scale, jax.Array):
        raise TypeError("softmax: scale must be a Python number, got an array; multiply x by it instead.")
    if is_causal and (x.ndim < 2 or axis % x.ndim != x.ndim - 1):
        raise ValueError(
            f"softmax: is_causal needs x (..., queries, keys) and the last axis, got x {x.shape} and axis {axis}."
        )
    if mask is not None:
        if mask.dtype != jnp.bool_ and not jnp.issubdtype(mask.dtype, jnp.floating):
            raise TypeError(f"softmax: mask must be boolean (True keeps) or floating (added), got {mask.dtype.name}.")
        pairs = zip(reversed(mask.shape), reversed(x.shape), strict=False)
        if mask.ndim > x.ndim or any(m not in (1, n) for m, n in pairs):
            raise ValueError(f"softmax: mask must broadcast to x {x.shape}, got {mask.shape}.")
    return axis % x.ndim, None if scale is None else finite_number("softmax", "scale", scale)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _softmax_mosaic(masking: Masking, x: jax.Array, mask: jax.Array | None) -> jax.Array:
    return softmax_forward(x, mask, masking=masking)


def _mosaic_fwd(masking, x, mask):
    weights = softmax_forward(x.value, None if mask is None else mask.value, masking=masking)
    # The backward pass needs only the mask's shape and dtype. A mask without a gradient is not saved.
    return weights, (weights, mask.value if mask is not None and mask.perturbed else None)


def _mosaic_bwd(masking, saved, dy):
    weights, mask = saved
    dx = softmax_backward(weights, dy, scale=masking.scale)
    return dx, None if mask is None else _mask_gradient(weights, dy, mask, masking)


def _mask_gradient(weights: jax.Array, dy: jax.Array, mask: jax.Array, masking: Masking) -> jax.Array:
    """Computes the gradient of the scores, summed over the rows that share a row of the mask."""
    dscores = xla_gradient(weights.astype(jnp.float32), dy)
    rows = jnp.arange(weights.shape[0])
    own = jnp.broadcast_to(masking.mask_row(rows), rows.shape)  # scalar if all rows share one mask row
    return jnp.zeros(mask.shape, jnp.float32).at[own].add(dscores).astype(mask.dtype)


_softmax_mosaic.defvjp(_mosaic_fwd, _mosaic_bwd, symbolic_zeros=True)
