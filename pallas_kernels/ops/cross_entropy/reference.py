"""Cross-entropy in plain `jax.numpy`: the definition, and the implementation `"xla"`."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np


def cross_entropy_reference(
    logits: jax.Array,
    labels: jax.Array,
    *,
    ignore_index: int | None = -1,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    reduction: str = "none",
) -> jax.Array:
    """See `pallas_kernels.cross_entropy`. Computes in float32 (float64 for float64 logits)."""
    vocabulary = logits.shape[-1]
    wide = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
    maximum = jax.lax.stop_gradient(jnp.max(wide, axis=-1))
    shifted = wide - maximum[..., None]
    log_sum = jnp.log(jnp.sum(jnp.exp(shifted), axis=-1))
    target = jnp.take_along_axis(shifted, jnp.clip(labels, 0, vocabulary - 1)[..., None], axis=-1)[..., 0]
    kinds = label_kinds(labels, vocabulary, ignore_index)
    mean = jnp.mean(shifted, axis=-1) if label_smoothing else None
    terms = {"ignore_index": ignore_index, "label_smoothing": label_smoothing, "z_loss": z_loss}
    loss = loss_of_rows(log_sum, maximum, target, mean, kinds, **terms)
    return reduce_loss(loss, kinds[0], reduction)


def loss_of_rows(
    log_sum: jax.Array,
    maximum: jax.Array,
    target: jax.Array,
    mean: jax.Array | None,
    kinds: tuple[jax.Array, jax.Array],
    *,
    ignore_index: int | None,
    label_smoothing: float,
    z_loss: float,
) -> jax.Array:
    """Returns the loss of each row.

    log_sum: of the exponentials of the row's logits less their maximum. target, mean: the label's of these logits, and
    their mean, which only label smoothing takes. kinds: of the labels, by `label_kinds`.
    """
    is_ignored, is_valid = kinds
    loss = log_sum - (1 - label_smoothing) * target
    if ignore_index is None:  # a label outside the vocabulary is a row of zeros
        loss = jnp.where(is_valid, loss, label_smoothing * log_sum)
    if mean is not None:
        loss -= label_smoothing * mean
    if z_loss:
        loss += z_loss * jnp.square(maximum + log_sum)
    return loss if ignore_index is None else _where_labelled(loss, is_ignored, is_valid)


@jax.jit
def _where_labelled(loss: jax.Array, is_ignored: jax.Array, is_valid: jax.Array) -> jax.Array:
    """Replaces the loss by 0 for ignored labels and by NaN for invalid ones.

    Under jit, because `jax_debug_nans` would stop at a separate NaN.
    """
    return jnp.where(is_valid, loss, jnp.where(is_ignored, 0, jnp.nan))


def label_kinds(labels: jax.Array, vocabulary: int, ignore_index: int | None) -> tuple[jax.Array, jax.Array]:
    """Returns which labels are ignored, and which name a token."""
    if ignore_index is None:
        return jnp.zeros(labels.shape, bool), (labels >= 0) & (labels < vocabulary)
    is_ignored = labels == np.asarray(ignore_index).astype(labels.dtype)  # -1 becomes the largest unsigned label
    return is_ignored, ~is_ignored & (labels >= 0) & (labels < vocabulary)


def reduce_loss(loss: jax.Array, is_ignored: jax.Array, reduction: str) -> jax.Array:
    """Returns the losses, their sum, or their mean over the labels that are not ignored (0 if all are)."""
    if reduction == "none":
        return loss
    total = jnp.sum(loss)
    return total * mean_factor(is_ignored, loss.dtype) if reduction == "mean" else total


def mean_factor(is_ignored: jax.Array, dtype) -> jax.Array:
    """Returns 1 / the number of labels that are not ignored."""
    return 1 / jnp.maximum(1, jnp.sum(~is_ignored)).astype(dtype)
