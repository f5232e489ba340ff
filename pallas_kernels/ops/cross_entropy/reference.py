"""Cross-entropy in plain `jax.numpy`: the definition, and the implementation `"xla"`."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.primitives.cuts import Sums


def cross_entropy_reference(
    logits: jax.Array,
    labels: jax.Array,
    *,
    ignore_index: int | None = -1,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    reduction: str = "none",
    vocabulary: Sums | None = None,
) -> jax.Array:
    """See `pallas_kernels.cross_entropy`. Computes in float32 (float64 for float64 logits).

    vocabulary: sums over the devices that have the other columns of the logits, if any do.
    """
    columns, labels = logits.shape[-1], wide_labels(labels)
    devices = vocabulary.axes if vocabulary else ()
    first, size = (lax.axis_index(devices) * columns, lax.axis_size(devices) * columns) if devices else (0, columns)

    def total(own: jax.Array) -> jax.Array:
        return vocabulary.total(own) if vocabulary else own

    wide = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
    maximum = lax.stop_gradient(jnp.max(wide, axis=-1))
    maximum = lax.pmax(maximum, devices) if devices else maximum
    shifted = wide - maximum[..., None]
    log_sum = jnp.log(total(jnp.sum(jnp.exp(shifted), axis=-1)))
    is_ignored, is_valid = label_kinds(labels, size, ignore_index)
    own = jnp.where(is_valid, labels, 0).astype(jnp.int32) - first
    target = jnp.take_along_axis(shifted, jnp.clip(own, 0, columns - 1)[..., None], axis=-1)[..., 0]
    target = total(jnp.where((own >= 0) & (own < columns), target, 0)) if devices else target
    loss = log_sum - (1 - label_smoothing) * target
    if ignore_index is None:  # a label outside the vocabulary is a row of zeros
        loss = jnp.where(is_valid, loss, label_smoothing * log_sum)
    if label_smoothing:
        loss -= label_smoothing * (total(jnp.sum(shifted, axis=-1)) / size)
    if z_loss:
        loss += z_loss * jnp.square(maximum + log_sum)
    if ignore_index is not None:
        loss = _where_labelled(loss, is_ignored, is_valid)
    if reduction == "none":
        return loss
    count = jnp.maximum(1, jnp.sum(~is_ignored)) if reduction == "mean" else 1
    return jnp.sum(loss) * (1 / jnp.asarray(count, loss.dtype))


@jax.jit
def _where_labelled(loss: jax.Array, is_ignored: jax.Array, is_valid: jax.Array) -> jax.Array:
    """Replaces the loss by 0 for ignored labels and by NaN for invalid ones.

    Under jit, because `jax_debug_nans` would stop at a separate NaN.
    """
    return jnp.where(is_valid, loss, jnp.where(is_ignored, 0, jnp.nan))


def wide_labels(labels: jax.Array) -> jax.Array:
    """Returns the labels as int32 or a wider integer: fewer bits may not hold the vocabulary's size."""
    return labels.astype(jnp.int32) if labels.dtype.itemsize < 4 else labels


def label_kinds(labels: jax.Array, vocabulary: int, ignore_index: int | None) -> tuple[jax.Array, jax.Array]:
    """Returns which labels are ignored, and which name a token."""
    if ignore_index is None:
        return jnp.zeros(labels.shape, bool), (labels >= 0) & (labels < vocabulary)
    is_ignored = labels == np.asarray(ignore_index).astype(labels.dtype)  # -1 becomes the largest unsigned label
    return is_ignored, ~is_ignored & (labels >= 0) & (labels < vocabulary)
