"""Batch normalisation by the statistics of the batch, which are results, too."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import jax

from pallas_kernels.ops.batch_norm.reference import batch_norm_reference
from xlafuse.fusion.graph import Value
from xlafuse.fusion.spelling import Proposal, Spelling, fast_normed, is_rows, struct, wide


def _batches(value: Value) -> Iterator[Proposal]:
    rank = len(value.shape)
    if not is_rows(value) or rank < 2:
        return
    orders = [tuple(range(rank))]
    if rank >= 3:  # features second, as in "NCHW"
        orders.append((0, rank - 1, *range(1, rank - 1)))
    for order in orders:
        shape = tuple(value.shape[order.index(axis)] for axis in range(rank))
        column = struct(value, shape[-1], dtype=wide(value.dtype))
        yield Proposal(arrays={"x": struct(value, *shape), "scale": column, "bias": column}, order=order)


def _fast_variance(
    x: jax.Array, scale: jax.Array, bias: jax.Array, *, epsilon: float, clipped: bool
) -> tuple[jax.Array, jax.Array, jax.Array]:
    axes = tuple(range(x.ndim - 1))
    y, mean, variance = fast_normed(x.astype(wide(x.dtype)), axes, epsilon=epsilon, clipped=clipped)
    return (y * scale + bias).astype(x.dtype), mean, variance


def _spellings() -> Iterator[Spelling]:
    functions = (batch_norm_reference, partial(_fast_variance, clipped=True), partial(_fast_variance, clipped=False))
    for function in functions:
        yield Spelling(
            operation="batch_norm",
            function=function,
            propose=_batches,
            roots=frozenset(("add", "convert_element_type")),
            needs=frozenset(("sqrt", "reduce_sum")),
            unknowns={"epsilon": 0.0123454321},
            floating=frozenset(("scale", "bias")),
            further=2,
        )


SPELLINGS: tuple[Spelling, ...] = tuple(_spellings())
