"""Softmax backward on Mosaic GPU, from the weights that the forward pass returned.

With p the weights and dy their cotangents, a row's gradient is

    dx = p * (dy - sum(p * dy) / sum(p)) * scale

The division makes up for p's rounding to the dtype of x. Without it a row with one large weight, where the two terms
nearly cancel, gets 20 times the error of a gradient from float32 weights; with it the error is that of rounding dx.
The mask plays no part: p is zero where it hides.
"""

from __future__ import annotations

import functools

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import lax

from pallas_kernels.ops.softmax.config import RowConfig, default_backward
from pallas_kernels.ops.softmax.masking import Masking, columns_from, load_kept, whole_row_segments
from pallas_kernels.ops.softmax.mosaic_gpu import compiler_params
from pallas_kernels.ops.softmax.rounding import quotient, remainder
from pallas_kernels.ops.softmax.shared_rows import fits_shared_memory, shared_row_gradient
from pallas_kernels.primitives import settings
from pallas_kernels.primitives.platform import varying_like
from pallas_kernels.primitives.rows import (
    load_row,
    map_row,
    row_sum,
    split_row,
    store_row,
    to_float32,
    zeros_row,
)


def softmax_backward(
    weights: jax.Array, dy: jax.Array, *, masking: Masking, config: RowConfig | None = None
) -> jax.Array:
    """Returns dx. weights (what `softmax_forward` returned) and dy: (rows, features), features >= 128."""
    config = config or default_backward(weights.dtype.itemsize)
    rows, features = weights.shape
    is_long = features > config.register_columns
    if is_long and masking.queries is None and fits_shared_memory(features, weights.dtype.itemsize, config):
        return varying_like(shared_row_gradient(weights, dy, masking=masking, config=config), weights, dy)
    make_body = _chunked_body if is_long else _whole_row_body
    body = make_body(weights, masking, config)

    def softmax_gradient(weights_ref, dy_ref, dx_ref):
        body(lax.axis_index("row"), weights_ref, dy_ref, dx_ref)

    dx = settings.kernel(
        softmax_gradient,
        out_type=jax.ShapeDtypeStruct(weights.shape, weights.dtype),
        grid=(rows,),
        grid_names=("row",),
        compiler_params=compiler_params(weights.dtype),
    )(weights, dy)
    return varying_like(dx, weights, dy)


def _gradient(p, centered, scale):
    return p * centered if scale is None else p * (centered * jnp.float32(scale))


def _whole_row_body(weights, masking, config):
    itemsize = weights.dtype.itemsize
    segments = whole_row_segments(weights.shape[1], itemsize, masking)
    is_exact = itemsize == 4

    def body(row, weights_ref, dy_ref, dx_ref):
        columns = columns_from(segments, 0, masking)

        def load(row):
            p = load_kept(weights_ref.at[row], segments, masking, row)
            dy = load_kept(dy_ref.at[row], segments, masking, row)
            return masking.limit(to_float32(p), columns, row, 0.0), to_float32(dy)

        def center(dy, mean):
            return map_row(lambda d: d - mean, dy)

        p, dy = load(row)
        total = row_sum(p, segments)

        def mean_of(values):
            return quotient(row_sum(map_row(jnp.multiply, p, values), segments), total)

        means = [mean_of(dy)]
        centered = center(dy, means[0])
        if is_exact:
            means.append(remainder(mean_of(centered), means[0]))
            centered = center(centered, means[1])
        if config.second_read == "reload":
            # A row the compiler cannot see through; else it keeps the first read's values in registers.
            p, dy = load(lax.optimization_barrier(row))
            centered = functools.reduce(center, means, dy)
        store_row(dx_ref.at[row], map_row(lambda p, c: _gradient(p, c, masking.scale), p, centered), segments)

    return body


def _chunked_body(weights, masking, config):
    features, itemsize = weights.shape[1], weights.dtype.itemsize
    chunk = min(config.chunk, features)
    trips = features // chunk
    segments = split_row(chunk, itemsize, stride=features)
    rest = split_row(features - trips * chunk, itemsize, offset=trips * chunk, stride=features)

    def body(row, weights_ref, dy_ref, dx_ref):
        whole = pl.ds(0, features)
        needed = trips if masking.queries is None else jnp.minimum(trips, masking.query(row) // chunk + 1)

        def load(columns, segments):
            return tuple(to_float32(load_row(ref.at[row, columns], segments)) for ref in (weights_ref, dy_ref))

        def accumulate(i, sums):
            p, dy = load(pl.ds(i * chunk, chunk), segments)
            return map_row(lambda s, p, d: s + p * d, sums[0], p, dy), map_row(jnp.add, sums[1], p)

        sums = lax.fori_loop(0, needed, accumulate, (zeros_row(segments), zeros_row(segments)))
        product, total = (row_sum(values, segments) for values in sums)
        if rest:
            p, dy = load(whole, rest)
            product, total = product + row_sum(map_row(jnp.multiply, p, dy), rest), total + row_sum(p, rest)
        product = quotient(product, total)

        def write(columns, segments):
            dx = map_row(lambda p, d: _gradient(p, d - product, masking.scale), *load(columns, segments))
            store_row(dx_ref.at[row, columns], dx, segments)

        @pl.loop(0, needed)
        def _(i):
            write(pl.ds(i * chunk, chunk), segments)

        if rest:
            write(whole, rest)
        if masking.queries is not None:

            @pl.loop(needed, trips)
            def _(i):
                store_row(dx_ref.at[row, pl.ds(i * chunk, chunk)], zeros_row(segments), segments)

    return body
