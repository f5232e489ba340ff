"""Norms forward on Mosaic GPU: a warpgroup reads one row, or several short ones, to registers.

The simple form is the fast one: with one row per block, enough blocks share a multiprocessor to hide memory latency
(97 to 99 % of the copy ceiling on an H200; TMA pipelines and persistent blocks reached 90 to 97 %).
"""

from __future__ import annotations

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import lax

from pallas_kernels.ops._norms.config import ForwardConfig, default_forward
from pallas_kernels.ops._norms.norm import COMPILER_PARAMS, Norm
from pallas_kernels.primitives import settings
from pallas_kernels.primitives.platform import target_device, varying_like
from pallas_kernels.primitives.random import mixed_words
from pallas_kernels.primitives.rows import (
    cut_row,
    load_columns,
    load_row,
    map_row,
    row_index,
    row_of_block,
    row_sum,
    short_rows_at_once,
    split_row,
    split_short_rows,
    store_row,
    to_float32,
    zeros_row,
)
from pallas_kernels.primitives.sharing import without_values


def norm_forward(
    norm: Norm,
    x: jax.Array,
    *,
    scale: jax.Array | None = None,
    bias: jax.Array | None = None,
    residual: jax.Array | None = None,
    words: jax.Array | None = None,
    config: ForwardConfig | None = None,
) -> tuple[jax.Array, jax.Array | None]:
    """Returns (y, the sum that was normalised), or (y, None) without a residual.

    x and residual: (rows, features) of one floating dtype, features >= 128. scale, bias: (features,), or None.
    words: (2,) uint32, the key of the dropout of x; None for none. With words there must be a residual.
    """
    if config is None:
        config = default_forward(
            x.shape[0],
            x.shape[1],
            x.dtype.itemsize,
            gain_bytes=sum(array.dtype.itemsize for array in (scale, bias) if array is not None),
            centered=norm.centered,
            cores=target_device().core_count,
        )
    is_whole = x.shape[1] <= config.register_columns
    rows, at_once = x.shape[0], short_rows_at_once(x.shape, x.dtype.itemsize) if is_whole else 0
    body = (_whole_row if is_whole else _chunked_row)(norm, without_values(x), config)
    operands = {"x": x, "scale": scale, "bias": bias, "residual": residual, "words": words}
    operands = {name: operand for name, operand in operands.items() if operand is not None}
    names = (*operands, "y", *(() if residual is None else ("total",)))

    def kernel(*refs):
        body(row_of_block(lax.axis_index("block"), rows, at_once), dict(zip(names, refs, strict=True)))

    outputs = settings.kernel(
        kernel,
        out_type=(jax.ShapeDtypeStruct(x.shape, x.dtype),) * (len(names) - len(operands)),
        grid=(pl.cdiv(rows, at_once or 1),),
        grid_names=("block",),
        compiler_params=COMPILER_PARAMS,
        kernel_name=norm.kernel_name(has_residual=residual is not None, has_dropout=words is not None),
    )(*operands.values())
    outputs = tuple(varying_like(output, *operands.values()) for output in outputs)
    return outputs[0], (None if residual is None else outputs[1])


def _sum_of(norm, row, refs, words, columns, segments, features):
    """Returns part of a row of x after dropout and residual sum, rounded as it is stored."""
    x = load_row(refs["x"].at[row, columns], segments)
    if "residual" not in refs:
        return x
    value = to_float32(x)
    if words is not None:
        start = jnp.asarray(columns.start).astype(jnp.uint32)
        places = tuple(s.columns(jnp.uint32) + start for s in segments)
        value = norm.drop(value, words, row_index(row, segments), places, features)
    residual = to_float32(load_row(refs["residual"].at[row, columns], segments))
    total = map_row(lambda a, b: (a + b).astype(refs["total"].dtype), value, residual)
    store_row(refs["total"].at[row, columns], total, segments)
    return total


def _load_gain(refs, columns, segments):
    """Returns the scale and the bias, by name, if there are any."""
    return {name: load_columns(refs[name].at[columns], segments) for name in ("scale", "bias") if name in refs}


def _store_output(row, refs, columns, segments, value, inverse, gain=None):
    """Scales and stores a segment at a time, so that registers hold the scale and bias of only one.

    gain: the whole scale and bias if they have been read.
    """
    for i, (segment, part) in enumerate(zip(segments, value, strict=True)):
        own = {name: each[i : i + 1] for name, each in gain.items()} if gain else _load_gain(refs, columns, (segment,))
        part *= inverse
        if "scale" in own:
            part *= own["scale"][0].astype(jnp.float32)
        if "bias" in own:
            part += own["bias"][0].astype(jnp.float32)
        store_row(refs["y"].at[row, columns], (part,), (segment,))


def _whole_row(norm, x, config):
    features, at_once = x.shape[1], short_rows_at_once(x.shape, x.dtype.itemsize)
    if at_once:
        segments = split_short_rows(features, x.dtype.itemsize, rows=at_once)
    else:
        segments = split_row(features, x.dtype.itemsize)
        segments = cut_row(segments, config.piece) if config.piece else segments
    whole = pl.ds(0, features)

    def body(row, refs):
        words = mixed_words(refs["words"]) if "words" in refs else None
        gain = _load_gain(refs, whole, segments) if config.reads_ahead else None
        value = to_float32(_sum_of(norm, row, refs, words, whole, segments, features))
        for _ in range(norm.mean_passes(x.dtype)):
            mean = row_sum(value, segments) * (1.0 / features)
            value = map_row(lambda v, mean=mean: v - mean, value)
        mean_square = row_sum(map_row(jnp.square, value), segments) * (1.0 / features)
        _store_output(row, refs, whole, segments, value, lax.rsqrt(mean_square + norm.epsilon), gain)

    return body


def _chunked_row(norm, x, config):
    features, chunk = x.shape[1], config.chunk
    trips = features // chunk
    segments = split_row(chunk, x.dtype.itemsize, stride=features)
    rest = split_row(features - trips * chunk, x.dtype.itemsize, offset=trips * chunk, stride=features)
    whole = pl.ds(0, features)

    def body(row, refs):
        words = mixed_words(refs["words"]) if "words" in refs else None

        def sum_over_row(part):
            """Sums over the row the values that `part` computes for some columns."""
            accumulate = lambda i, sums: map_row(jnp.add, sums, part(pl.ds(i * chunk, chunk), segments))  # noqa: E731
            total = row_sum(lax.fori_loop(0, trips, accumulate, zeros_row(segments)), segments)
            return total + row_sum(part(whole, rest), rest) if rest else total

        def first_read(columns, segments):
            return to_float32(_sum_of(norm, row, refs, words, columns, segments, features))

        def read_again(columns, segments):
            source = refs["x" if "residual" not in refs else "total"]
            value = to_float32(load_row(source.at[row, columns], segments))
            for mean in means:
                value = map_row(lambda v, mean=mean: v - mean, value)
            return value

        means = []
        for _ in range(norm.mean_passes(x.dtype)):
            means.append(sum_over_row(read_again if means else first_read) * (1.0 / features))
        read = read_again if means else first_read
        squares = sum_over_row(lambda columns, segments: map_row(jnp.square, read(columns, segments)))
        inverse = lax.rsqrt(squares * (1.0 / features) + norm.epsilon)

        def write(columns, segments):
            _store_output(row, refs, columns, segments, read_again(columns, segments), inverse)

        @pl.loop(0, trips)
        def loop(i):
            write(pl.ds(i * chunk, chunk), segments)

        if rest:
            write(whole, rest)

    return body
