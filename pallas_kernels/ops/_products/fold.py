"""A norm's scale multiplied into the weights behind it, once."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp

from pallas_kernels.arguments import Norm
from pallas_kernels.primitives.checks import as_arrays
from pallas_kernels.primitives.settings import usual_promotion


@usual_promotion
def fold_scale(norm: Norm, *weights: jax.Array) -> tuple[Norm, tuple[jax.Array, ...]]:
    """The norm without its scale, and the weights behind it with that scale in their rows.

    For weights that do not change from call to call, as in decoding: done once, the pass over x that multiplies by the
    scale is left out of every call. In a training step it would be a pass over the weights, and longer.

    Args:
        norm: with a scale (features,) and no bias.
        weights: (features, outputs) each.

    Returns:
        `norm` with `scale=None`, and the weights, rounded to their dtypes.

    Raises:
        TypeError: norm is no `Norm`, or a weight is no array or not floating.
        ValueError: a norm without scale or with a bias, a scale that is not floating and (features,), or a weight of
            another number of rows.
    """
    if not isinstance(norm, Norm):
        raise TypeError(f"fold_scale: norm must be a pallas_kernels.Norm, got {type(norm).__name__}.")
    if norm.scale is None or norm.bias is not None:
        raise ValueError(f"fold_scale: the norm must have a scale and no bias, got {norm}.")
    (scale,) = as_arrays("fold_scale", **{"the norm's scale": norm.scale})
    if scale.ndim != 1 or not jnp.issubdtype(scale.dtype, jnp.floating):
        raise ValueError(
            f"fold_scale: the norm's scale must be floating, (features,), got {scale.dtype.name}{list(scale.shape)}."
        )
    folded = []
    for weight in as_arrays("fold_scale", **{f"weight {i}": weight for i, weight in enumerate(weights)}):
        if not jnp.issubdtype(weight.dtype, jnp.floating):
            raise TypeError(f"fold_scale: weights must be floating, got {weight.dtype.name}; fold before quantizing.")
        if weight.ndim != 2 or weight.shape[0] != scale.shape[0]:
            raise ValueError(f"fold_scale: a weight must be ({scale.shape[0]}, outputs), got {weight.shape}.")
        wide = jnp.promote_types(weight.dtype, jnp.float32)
        folded.append((weight.astype(wide) * scale.astype(wide)[:, None]).astype(weight.dtype))
    return replace(norm, scale=None), tuple(folded)
