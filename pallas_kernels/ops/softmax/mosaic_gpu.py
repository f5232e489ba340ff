"""Softmax forward on Mosaic GPU: a warpgroup reads one row, or several short ones, to registers.

A row that fits in registers is read once. A longer row is read twice: first for maximum and sum together (online
softmax), then, from the L2 cache, for the weights.

Source: Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018, https://arxiv.org/abs/1805.02867
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.ops.softmax.config import DEFAULT_FORWARD, RowConfig
from pallas_kernels.ops.softmax.masking import Masking, columns_from, load_kept, load_mask, whole_row_segments
from pallas_kernels.ops.softmax.rounding import MOST_EXACT, normalise, online_add, sum_of_weights
from pallas_kernels.primitives import settings
from pallas_kernels.primitives.platform import varying_like
from pallas_kernels.primitives.rows import (
    LOWEST,
    RowValues,
    Segment,
    even_pieces,
    full_row,
    load_row,
    map_row,
    row_index,
    row_max,
    row_of_block,
    row_sum,
    split_row,
    store_row,
    sum_of,
    zeros_row,
)
from pallas_kernels.primitives.sharing import without_values


def compiler_params(dtype, **others: Any) -> plgpu.CompilerParams:
    """Returns the compiler parameters: approximate exponentials (2 ulp of float32) for 16-bit types only.

    There are no automatic barriers: each thread reads back only what it wrote itself, in the same layout.
    """
    return plgpu.CompilerParams(unsafe_no_auto_barriers=True, approx_math=jnp.dtype(dtype).itemsize < 4, **others)


def softmax_forward(
    x: jax.Array, mask: jax.Array | None, *, masking: Masking, config: RowConfig | None = None
) -> jax.Array:
    """Returns the weights, like x.

    x: (rows, features) of a floating dtype, features >= 128. mask: (rows of its own, features), int8 where
    `masking.is_boolean`, else floating.
    """
    config = config or DEFAULT_FORWARD
    is_whole = x.shape[1] <= config.register_columns
    rows, at_once = x.shape[0], masking.rows_at_once(x) if is_whole else 0
    parts = masking.parts(rows) if at_once else 1
    row_of = functools.partial(row_of_block, rows=rows, at_once=at_once, parts=parts)
    body = (_whole_row_body if is_whole else _online_body)(without_values(x), masking, config)

    def softmax(x_ref, y_ref):
        body(row_of(lax.axis_index("block")), x_ref, None, y_ref)

    def softmax_masked(x_ref, mask_ref, y_ref):
        row = row_of(lax.axis_index("block"))
        body(row, x_ref, mask_ref.at[masking.mask_rows(row)], y_ref)

    operands = (x,) if mask is None else (x, mask)
    y = settings.kernel(
        softmax if mask is None else softmax_masked,
        out_type=jax.ShapeDtypeStruct(x.shape, x.dtype),
        grid=(parts * pl.cdiv(rows // parts, at_once or 1),),
        grid_names=("block",),
        compiler_params=compiler_params(x.dtype),
    )(*operands)
    return varying_like(y, *operands)


def _whole_row_body(x, masking, config):
    del config
    is_exact = x.dtype.itemsize == 4
    segments = whole_row_segments(x, masking)

    def body(row, x_ref, mask_row, y_ref):
        columns = columns_from(segments, 0, masking)
        values = load_kept(x_ref.at[row], segments, masking, row)
        mask = None if mask_row is None else load_mask(mask_row, segments, masking, row)
        scores = masking.apply(values, mask, columns, row_index(row, segments))
        maximum = jnp.maximum(row_max(scores, segments), LOWEST)
        weights = map_row(lambda v: jnp.exp(v - maximum), scores)
        total = sum_of_weights(weights, segments, is_exact=is_exact and x.shape[1] <= MOST_EXACT)
        store_row(y_ref.at[row], normalise(weights, total, is_exact=is_exact), segments)

    return body


def _online_body(x, masking, config):
    features, itemsize = x.shape[1], x.dtype.itemsize
    is_exact = itemsize == 4
    chunk = min(config.chunk, features)
    trips = features // chunk
    segments = split_row(chunk, itemsize, stride=features)
    pieces = even_pieces(chunk, itemsize, stride=features)
    rest = split_row(features - trips * chunk, itemsize, offset=trips * chunk, stride=features)

    def body(row, x_ref, mask_row, y_ref):
        def scores(first, segments):
            """Computes the scores of segments whose columns count from `first`."""
            part = pl.ds(first, chunk) if segments is not rest else pl.ds(0, features)
            values = load_row(x_ref.at[row, part], segments)
            mask = None if mask_row is None else load_row(mask_row.at[part], segments)
            return masking.apply(values, mask, columns_from(segments, first, masking), row)

        needed = trips if masking.queries is None else jnp.minimum(trips, masking.query(row) // chunk + 1)

        def accumulate(i, state):
            return online_add(state, scores(i * chunk, pieces))

        highest, totals = lax.fori_loop(
            0, needed, accumulate, (full_row(pieces[:1], LOWEST)[0], zeros_row(pieces[:1])[0])
        )
        maximum = jnp.max(highest)
        tail = scores(0, rest) if rest else ()
        if rest:
            maximum = jnp.maximum(maximum, row_max(tail, rest))
        total = sum_of(totals * jnp.exp(highest - maximum))
        if rest:
            total += row_sum(map_row(lambda v: jnp.exp(v - maximum), tail), rest)

        def write(columns, segments: tuple[Segment, ...], values: RowValues):
            values = map_row(lambda v: jnp.exp(v - maximum), values)
            store_row(y_ref.at[row, columns], normalise(values, total, is_exact=is_exact), segments)

        if rest:
            write(pl.ds(0, features), rest, tail)

        @pl.loop(0, needed)
        def _(i):
            write(pl.ds(i * chunk, chunk), segments, scores(i * chunk, segments))

        if masking.queries is not None:

            @pl.loop(needed, trips)
            def _(i):
                store_row(y_ref.at[row, pl.ds(i * chunk, chunk)], zeros_row(segments), segments)

    return body
