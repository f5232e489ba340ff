"""A loss with optax's signature."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from xlafuse.errors import check_left_to_xla
from xlafuse.kernels import cross_entropy

__all__ = ["softmax_cross_entropy_with_integer_labels"]


def softmax_cross_entropy_with_integer_labels(
    logits: jax.Array,
    labels: jax.Array,
    axis: int | tuple[int, ...] = -1,
    where: jax.Array | None = None,
    *,
    implementation: str | Sequence[str] | None = None,
) -> jax.Array:
    """Computes `optax.softmax_cross_entropy_with_integer_labels` with `xlafuse.kernels.cross_entropy`.

    If you take the mean of the losses, call that operation with `reduction="mean"`: it computes the gradient in the
    forward pass, which saves a third of the bytes.

    Args:
        logits: (..., classes), floating. If the classes are not on the last axis, they are moved there, which copies
            the logits.
        labels: (...), integers from 0 to classes - 1. Negative ones count from the end; others give NaN.
        axis: axis of the classes; with several axes, a label is an index into all of them.
        where: which rows count, (...), others have a loss of 0; or which logits count, shaped like logits, which XLA
            computes.
        implementation: that of `cross_entropy`.

    Returns:
        The losses (...), in the logits' dtype, computed in float32 or wider.

    Raises:
        TypeError, ValueError: arguments that do not belong together, or an unknown implementation.
        NotImplementedError: the requested implementation cannot run, with the reason.
    """
    logits, labels = jnp.asarray(logits), jnp.asarray(labels)
    if not jnp.issubdtype(logits.dtype, jnp.floating):
        raise TypeError(
            f"softmax_cross_entropy_with_integer_labels: logits must be floating, got {logits.dtype.name}; cast them "
            "first."
        )
    axes = _axes(axis, logits.ndim)
    order = [each for each in range(logits.ndim) if each not in axes] + list(axes)
    where = None if where is None else jnp.asarray(where, bool)
    if where is not None and where.ndim == logits.ndim:
        where = _flattened(jnp.broadcast_to(where, logits.shape), order, len(axes))
    rows = _flattened(logits, order, len(axes))
    labels = _from_start(labels, rows.shape[-1])
    if where is None or where.ndim < rows.ndim:
        ignored = int(jnp.iinfo(labels.dtype).min)
        labels = labels if where is None else jnp.where(where, labels, ignored)
        loss = cross_entropy(rows, labels, ignore_index=ignored, implementation=implementation)
        return loss.astype(logits.dtype)
    reason = "the operation leaves out rows, not single logits"
    check_left_to_xla("softmax_cross_entropy_with_integer_labels", implementation, reason)
    wide = rows.astype(jnp.promote_types(rows.dtype, jnp.float32))
    target = jnp.take_along_axis(wide, labels[..., None], axis=-1)[..., 0]
    loss = jax.nn.logsumexp(wide, axis=-1, where=where) - target
    return jnp.where(jnp.any(where, axis=-1), loss, 0).astype(logits.dtype)


def _axes(axis: int | tuple[int, ...], rank: int) -> tuple[int, ...]:
    given = axis if isinstance(axis, tuple) else (axis,)
    axes = tuple(each + rank if each < 0 else each for each in given)
    if len({*axes}) != len(given) or not all(0 <= each < rank for each in axes):
        raise ValueError(
            f"softmax_cross_entropy_with_integer_labels: axis must name some of {rank} axes, each once, got {axis}."
        )
    return axes


def _flattened(array: jax.Array, order: Sequence[int], count: int) -> jax.Array:
    """Transposes the axes into this order and merges the last `count` of them."""
    array = array.transpose(order)
    return array.reshape(*array.shape[: array.ndim - count], -1)


def _from_start(labels: jax.Array, classes: int) -> jax.Array:
    """Returns signed labels of at least 32 bits; labels that count from the end become indices from the start."""
    if not jnp.issubdtype(labels.dtype, jnp.integer):
        raise TypeError(
            f"softmax_cross_entropy_with_integer_labels: labels must be integers, got {labels.dtype.name}; of "
            "distributions, call optax.softmax_cross_entropy."
        )
    if labels.dtype.itemsize < 4:
        labels = labels.astype(jnp.int32)
    if jnp.issubdtype(labels.dtype, jnp.unsignedinteger):
        return jnp.minimum(labels, classes).astype(jnp.int32)
    return jnp.where(labels < 0, labels + classes, labels)


def __dir__() -> list[str]:
    return sorted(__all__)
