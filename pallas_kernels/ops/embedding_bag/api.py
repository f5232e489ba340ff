"""The public function: checks, dispatch, and the gradient of the Mosaic GPU kernel, which is XLA's."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp

from pallas_kernels.dispatch import Implementation, choose
from pallas_kernels.ops.embedding_bag.config import is_preferred
from pallas_kernels.ops.embedding_bag.mosaic_gpu import MOST_FEATURES, embedding_bag_forward
from pallas_kernels.ops.embedding_bag.reference import embedding_bag_reference
from pallas_kernels.primitives.checks import as_arrays, as_int32, check_lookup, optional_arrays
from pallas_kernels.primitives.dimensions import shares
from pallas_kernels.primitives.platform import dtypes_unsupported, mosaic_gpu_unsupported, varying_alike
from pallas_kernels.primitives.rows import THREADS
from pallas_kernels.primitives.settings import usual_promotion

MODES = ("sum", "mean")


@shares("table: r d, indices: ... i, weights: ... i -> ... d")
@usual_promotion
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

    "mosaic" does not write the rows to memory. XLA computes the gradients: the table's is a scatter-add in float32, and
    on a GPU need not repeat bit for bit.

    Indices are those of `jnp.take`: a negative index counts from the last row. Any other index out of range makes its
    bag NaN and adds nothing to the table's gradient. Pad a short bag with a valid index and weight zero.

    Args:
        table: (rows, features), bfloat16, float16 or float32 (float64 with "xla").
        indices: (..., bag), of any integer dtype.
        weights: like indices, any floating dtype (at most float32 with "mosaic"), or None for ones; only for "sum".
        mode: "sum" or "mean".
        implementation: one of the names below, a sequence of them in order of preference, or None.
            "mosaic": one Mosaic GPU kernel, for Hopper GPUs or `plgpu.force_gpu_interpret_mode`; 128 to 4096 features.
            "xla": always runs.
            None: "mosaic", if it can run, for 64 to 1024 bags, for more of at least 512 features, and for most bags of
                at least 24 indices; else "xla", which is up to 2.3 times as fast.

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
    size = indices.shape[-1]
    is_best = is_preferred(indices.size // max(1, size), size, table.shape[1], table.dtype.itemsize)
    support = {"mosaic": partial(mosaic_unsupported, table, indices, weights), "xla": lambda: None}
    chosen = choose("embedding_bag", implementation, support, preferred=("mosaic",) if is_best else ())
    if chosen == "xla" or table.size == 0 or indices.size == 0:
        return embedding_bag_reference(table, indices, weights=weights, mode=mode)
    bags = indices.reshape(-1, indices.shape[-1])
    operands = varying_alike((table, bags, None if weights is None else weights.reshape(bags.shape)))
    y: jax.Array = _embedding_bag_mosaic(mode, *operands)  # pyright: ignore
    return y.reshape(*indices.shape[:-1], table.shape[1])


def mosaic_unsupported(table: jax.Array, indices: jax.Array, weights: jax.Array | None) -> str | None:
    """Returns why the Mosaic GPU kernel cannot take these arguments here, or None if it can."""
    if reason := dtypes_unsupported(table=table, weights=weights):
        return reason
    features = table.shape[1]
    if indices.size and not THREADS <= features <= MOST_FEATURES:
        return f"rows have {features} features, the kernel takes {THREADS} to {MOST_FEATURES}"
    return mosaic_gpu_unsupported()


def _check(indices: jax.Array, weights: jax.Array | None, mode: str) -> None:
    if not indices.ndim:
        raise ValueError("embedding_bag: indices must be (..., bag), got a scalar; reshape it to (1,).")
    if weights is None:
        return
    if mode == "mean":
        raise ValueError("embedding_bag: weights need mode='sum'; divide them by their sum for a weighted mean.")
    if not jnp.issubdtype(weights.dtype, jnp.floating):
        raise TypeError(f"embedding_bag: weights must be floating, got {weights.dtype.name}; cast them first.")
    if weights.shape != indices.shape:
        raise ValueError(
            f"embedding_bag: weights must have the shape of indices, {indices.shape}, got {weights.shape}."
        )


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _embedding_bag_mosaic(mode: str, table: jax.Array, indices: jax.Array, weights: jax.Array | None) -> jax.Array:
    return embedding_bag_forward(table, indices, weights, is_mean=mode == "mean")


def _mosaic_fwd(mode, table, indices, weights):
    return embedding_bag_forward(table, indices, weights, is_mean=mode == "mean"), (table, indices, weights)


def embedding_bag_backward(mode, saved, dy):
    """Computes the gradients of table, indices (None) and weights by XLA; the table's sums are float32."""
    table, indices, weights = saved

    def reference(table, weights):
        return embedding_bag_reference(table, indices, weights=weights, mode=mode)

    dtable, dweights = jax.vjp(reference, table, weights)[1](dy)
    return dtable, None, dweights


_embedding_bag_mosaic.defvjp(_mosaic_fwd, embedding_bag_backward)
