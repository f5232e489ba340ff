"""Softmax forward on Mosaic GPU: a warpgroup reads one row, or several short ones, to registers.

A row that fits in registers is read once. A longer row is read twice: first for maximum and sum together (online
softmax), then, from the L2 cache, for the weights.

Source: Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018, https://arxiv.org/abs/1805.02867
"""

from __future__ import annotations

from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.ops.softmax.masking import Masking, load_mask
from pallas_kernels.ops.softmax.rounding import MOST_EXACT, normalise, online_add, sum_of_weights
from pallas_kernels.primitives.exponents import LOWEST
from pallas_kernels.primitives.row_kernel import RowChunks, row_kernel
from pallas_kernels.primitives.rows import (
    Segment,
    cut_row,
    full_row,
    load_row,
    map_row,
    row_max,
    row_sum,
    split_row,
    split_short_rows,
    store_row,
    sum_of,
    zeros_row,
)
from pallas_kernels.primitives.sharing import without_values

REGISTER_COLUMNS = 16384
"""The longest row held in registers: 64 KiB of float32 weights fill half of them."""


def compiler_params(dtype, **others: Any) -> plgpu.CompilerParams:
    """Returns the compiler parameters: approximate exponentials (2 ulp of float32) for 16-bit types only.

    There are no automatic barriers: each thread reads back only what it wrote itself, in the same layout.
    """
    return plgpu.CompilerParams(unsafe_no_auto_barriers=True, approx_math=jnp.dtype(dtype).itemsize < 4, **others)


def row_segments(x: jax.Array, at_once: int) -> tuple[Segment, ...]:
    """Returns the segments of a row of x, or of the rows that a warpgroup takes at once."""
    features, itemsize = x.shape[1], x.dtype.itemsize
    return split_short_rows(features, itemsize, rows=at_once) if at_once else split_row(features, itemsize)


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
    is_whole = x.shape[1] <= register_columns
    at_once = masking.rows_at_once(x) if is_whole else 0
    own = without_values(x)
    body = _whole_row_body(own, masking, at_once) if is_whole else _online_body(own, masking, chunk)

    def compute(row, refs):
        mask_row = refs["mask"].at[masking.mask_rows(row)] if "mask" in refs else None
        body(row, refs["x"], mask_row, refs["y"])

    results = row_kernel(
        compute,
        {"x": x, "mask": mask},
        {"y": jax.ShapeDtypeStruct(x.shape, x.dtype)},
        name="softmax" if mask is None else "softmax_masked",
        compiler_params=compiler_params(x.dtype),
        rows=x.shape[0],
        at_once=at_once,
        parts=masking.parts(x.shape[0]) if at_once else 1,
    )
    return results["y"]


def _whole_row_body(x, masking, at_once):
    is_exact = x.dtype.itemsize == 4
    segments = row_segments(x, at_once)

    def body(row, x_ref, mask_row, y_ref):
        values = load_row(x_ref.at[row], segments)
        mask = None if mask_row is None else load_mask(mask_row, segments, row)
        scores = masking.apply(values, mask)
        maximum = jnp.maximum(row_max(scores, segments), LOWEST)
        weights = map_row(lambda v: jnp.exp(v - maximum), scores)
        total = sum_of_weights(weights, segments, is_exact=is_exact and x.shape[1] <= MOST_EXACT)
        store_row(y_ref.at[row], normalise(weights, total, is_exact=is_exact), segments)

    return body


def _online_body(x, masking, chunk):
    itemsize = x.dtype.itemsize
    is_exact = itemsize == 4
    chunks = RowChunks.make(x.shape[1], itemsize, chunk)
    pieces, rest = cut_row(chunks.segments, 1), chunks.rest  # of one shape, so that they can be folded into one

    def body(row, x_ref, mask_row, y_ref):
        def scores(first, segments):
            """Computes the scores of segments whose columns count from `first`."""
            part = pl.ds(first, chunks.chunk) if segments is not rest else chunks.whole
            values = load_row(x_ref.at[row, part], segments)
            mask = None if mask_row is None else load_row(mask_row.at[part], segments)
            return masking.apply(values, mask)

        start = full_row(pieces[:1], LOWEST)[0], zeros_row(pieces[:1])[0]
        add = lambda i, state: online_add(state, scores(i * chunks.chunk, pieces))  # noqa: E731
        highest, totals = lax.fori_loop(0, chunks.trips, add, start)
        maximum = jnp.max(highest)
        tail = scores(0, rest) if rest else ()
        if rest:
            maximum = jnp.maximum(maximum, row_max(tail, rest))
        total = sum_of(totals * jnp.exp(highest - maximum))
        if rest:
            total += row_sum(map_row(lambda v: jnp.exp(v - maximum), tail), rest)

        def write(columns, segments: tuple[Segment, ...]):
            values = tail if segments is rest else scores(columns.start, segments)
            values = map_row(lambda v: jnp.exp(v - maximum), values)
            store_row(y_ref.at[row, columns], normalise(values, total, is_exact=is_exact), segments)

        chunks.each(write)

    return body
