"""Cross-entropy where devices have parts of the rows or of the vocabulary."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.ops.cross_entropy.reference import label_kinds, loss_of_rows, reduce_loss


def dimensions(arguments: Mapping[str, Any], inputs: str) -> str:
    """Returns the text for `shares`: a loss without reduction has rows, a reduced one is a sum over them.

    inputs: the dimensions of the arrays but labels.
    """
    return f"{inputs}, labels: ... -> ..." if arguments["reduction"] == "none" else f"{inputs}, labels: +... ->"


def loss_from_parts(
    losses: Callable[[str], jax.Array], arguments: Mapping[str, Any], sums: Mapping[str, Any]
) -> jax.Array:
    """Returns the loss, reduced over the rows of all devices. losses: one device's losses, with a given reduction."""
    if "..." not in sums:
        return losses(arguments["reduction"])
    total = sums["..."].total(losses("sum"))
    if arguments["reduction"] == "sum":
        return total
    is_ignored, _ = label_kinds(arguments["labels"], 1, arguments["ignore_index"])
    return total / jnp.maximum(1, sums["..."].total(jnp.sum(~is_ignored))).astype(total.dtype)


def cross_entropy_of_part(
    logits: jax.Array, arguments: Mapping[str, Any], vocabulary: Any, reduction: str
) -> jax.Array:
    """Computes `cross_entropy_reference` from this device's columns of the logits.

    arguments: of `cross_entropy`. vocabulary: the `Sums` over the devices that have the other columns.
    """
    labels = arguments["labels"]
    labels = labels.astype(jnp.int32) if labels.dtype.itemsize < 4 else labels
    part = logits.shape[-1]
    size = part * lax.axis_size(vocabulary.axes)
    wide = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
    maximum = lax.pmax(lax.stop_gradient(jnp.max(wide, axis=-1)), vocabulary.axes)
    shifted = wide - maximum[..., None]
    log_sum = jnp.log(vocabulary.total(jnp.sum(jnp.exp(shifted), axis=-1)))
    own = labels.astype(jnp.int32) - lax.axis_index(vocabulary.axes) * part
    found = jnp.take_along_axis(shifted, jnp.clip(own, 0, part - 1)[..., None], axis=-1)[..., 0]
    target = vocabulary.total(jnp.where((own >= 0) & (own < part), found, 0))
    mean = vocabulary.total(jnp.sum(shifted, axis=-1)) / size if arguments["label_smoothing"] else None
    kinds = label_kinds(labels, size, arguments["ignore_index"])
    terms = {name: arguments[name] for name in ("ignore_index", "label_smoothing", "z_loss")}
    return reduce_loss(loss_of_rows(log_sum, maximum, target, mean, kinds, **terms), kinds[0], reduction)
