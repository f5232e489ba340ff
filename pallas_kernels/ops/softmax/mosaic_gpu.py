"""Softmax forward on Mosaic GPU: a warpgroup reads one row, or several short ones, to registers.

A row that fits in registers is read once. A longer row is read twice: first for maximum and sum together (online
softmax), then, from the L2 cache, for the weights.

Source: Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018, https://arxiv.org/abs/1805.02867
"""

from __future__ import annotations

from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import lax

from pallas_kernels.ops.softmax.masking import Masking, load_mask
from pallas_kernels.ops.softmax.rounding import MOST_EXACT, exact_sum, normalise, online_add
from pallas_kernels.primitives.exponents import LOWEST
from pallas_kernels.primitives.row_kernel import HeldRows, RowChunks, compiler_params, held_segments, row_kernel
from pallas_kernels.primitives.rows import (
    Row,
    cut_row,
    full_row,
    load_row,
    map_row,
    row_max,
    row_sum,
    store_row,
    sum_of,
    zeros_row,
)

REGISTER_COLUMNS = 16384
"""The longest row held in registers: 64 KiB of float32 weights fill half of them."""


def softmax_forward(
    x: jax.Array,
    mask: jax.Array | None,
    *,
    masking: Masking,
    register_columns: int = REGISTER_COLUMNS,
    chunk: int = 4096,
) -> jax.Array:
    """Returns the weights, like x.

    x: (rows, features) of a floating dtype, features >= 128. mask: (rows of its own, features), int8 where
    `masking.is_boolean`, else floating. register_columns: the longest row held in registers. chunk: columns in
    registers at a time in a longer row, which is read again from the L2 cache.
    """
    shape, itemsize = x.shape, x.dtype.itemsize
    is_whole = shape[1] <= register_columns
    at_once, segments = held_segments(shape, itemsize, masking.rows_at_once(x) if is_whole else 0)
    chunks = RowChunks.make(shape[1], itemsize, chunk)

    def compute(row, refs):
        mask_row = refs["mask"].at[masking.mask_rows(row)] if "mask" in refs else None
        if is_whole:
            _held_rows(HeldRows(at=row, segments=segments), refs["x"], mask_row, refs["y"], masking)
        else:
            _online(row, chunks, refs["x"], mask_row, refs["y"], masking)

    results = row_kernel(
        compute,
        {"x": x, "mask": mask},
        {"y": jax.ShapeDtypeStruct(shape, x.dtype)},
        name="softmax" if mask is None else "softmax_masked",
        compiler_params=compiler_params(x.dtype),
        rows=shape[0],
        at_once=at_once,
        parts=masking.parts(shape[0]) if at_once else 1,
    )
    return results["y"]


def _held_rows(held: HeldRows, x_ref: Any, mask_row: Any, y_ref: Any, masking: Masking) -> None:
    """Computes the weights of rows in registers."""
    is_exact = x_ref.dtype.itemsize == 4
    values = load_row(x_ref.at[held.at], held.segments)
    mask = None if mask_row is None else load_mask(mask_row, held.segments, held.at)
    scores = masking.apply(values, mask)
    maximum = held.spread(jnp.maximum(held.max(scores), LOWEST))
    weights = map_row(lambda v: jnp.exp(v - maximum), scores)
    total = exact_sum(weights, held.sum) if is_exact and x_ref.shape[1] <= MOST_EXACT else held.sum(weights)
    held.store(y_ref, normalise(weights, held.spread(total), is_exact=is_exact))


def _online(row: Row, chunks: RowChunks, x_ref: Any, mask_row: Any, y_ref: Any, masking: Masking) -> None:
    """Computes the weights of a row that registers do not hold, chunk by chunk."""
    pieces, rest = cut_row(chunks.segments, 1), chunks.rest  # pieces of one shape, which `online_add` folds into one

    def scores(columns, segments):
        mask = None if mask_row is None else load_row(mask_row.at[columns], segments)
        return masking.apply(load_row(x_ref.at[row, columns], segments), mask)

    start = full_row(pieces[:1], LOWEST)[0], zeros_row(pieces[:1])[0]
    add = lambda i, state: online_add(state, scores(chunks.columns(i), pieces))  # noqa: E731
    highest, totals = lax.fori_loop(0, chunks.trips, add, start)
    tail = scores(chunks.whole, rest)
    maximum = row_max((highest, *tail))
    total = sum_of(totals * jnp.exp(highest - maximum))
    if rest:
        total += row_sum(map_row(lambda v: jnp.exp(v - maximum), tail), rest)

    def write(columns: pl.Slice, segments):
        values = tail if segments is rest else scores(columns, segments)
        weights = map_row(lambda v: jnp.exp(v - maximum), values)
        store_row(y_ref.at[row, columns], normalise(weights, total, is_exact=x_ref.dtype.itemsize == 4), segments)

    chunks.each(write)
