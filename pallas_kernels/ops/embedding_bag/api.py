"""Sums or means of table rows by bags of indices, by XLA."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.dispatch import Implementation, choose
from pallas_kernels.primitives.checks import as_arrays, as_int32, check_floating, check_lookup, optional_arrays
from pallas_kernels.primitives.operation import operation

MODES = ("sum", "mean")


@operation("table: r d, indices: ... i, weights: ... i -> ... d")
def embedding_bag(
    table: jax.Array,
    indices: jax.Array,
    *,
    weights: jax.Array | None = None,
    mode: str = "sum",
    implementation: Implementation = None,
) -> jax.Array:
    """Sums, or averages, the rows of a table that each bag of indices names.

    Equivalent to this, in float32 between the casts:

        rows = jnp.take(table, indices, axis=0)               # (..., bag, features)
        y = (rows * weights[..., None]).sum(-2)               # mode="mean": rows.mean(-2)

    XLA computes it in one fusion, and the gradients: the table's is a scatter-add in float32, and on a GPU need not
    repeat bit for bit.

    Indices are those of `jnp.take`: a negative index counts from the last row. Any other index out of range makes its
    bag NaN and adds nothing to the table's gradient. Pad a short bag with a valid index and weight zero.

    Args:
        table: (rows, features), floating.
        indices: (..., bag), of any integer dtype.
        weights: like indices, any floating dtype, or None for ones; only for "sum".
        mode: "sum" or "mean".
        implementation: "xla" or None, which are the same.

    Returns:
        y, (..., features), of the table's dtype. An empty bag sums to zeros; its mean is NaN.

    Raises:
        TypeError, ValueError: the arguments do not fit together, or the mode or implementation is unknown.
        NotImplementedError: the requested implementation cannot run; the message says why.
    """
    table, indices = as_arrays("embedding_bag", table=table, indices=indices)
    (weights,) = optional_arrays("embedding_bag", weights=weights)
    check_lookup("embedding_bag", MODES, mode, table, indices=indices)
    _check(indices, weights, mode)
    indices = as_int32(indices)
    choose("embedding_bag", implementation, {"xla": lambda: None}, preferred=())
    wide = jnp.promote_types(table.dtype, jnp.float32)
    rows = jnp.take(table.astype(wide), indices, axis=0)
    if weights is not None:
        rows = rows * weights.astype(wide)[..., None]
    total = jnp.sum(rows, axis=-2)
    return (total / indices.shape[-1] if mode == "mean" else total).astype(table.dtype)


def _check(indices: jax.Array, weights: jax.Array | None, mode: str) -> None:
    if not indices.ndim:
        raise ValueError("embedding_bag: indices must be (..., bag), got a scalar; reshape it to (1,).")
    if weights is None:
        return
    if mode == "mean":
        raise ValueError("embedding_bag: weights need mode='sum'; divide them by their sum for a weighted mean.")
    check_floating("embedding_bag", weights=weights)
    if weights.shape != indices.shape:
        raise ValueError(
            f"embedding_bag: weights must have the shape of indices, {indices.shape}, got {weights.shape}."
        )
