"""Norms forward on Mosaic GPU: a warpgroup reads one row, or several short ones, to registers.

The simple form is the fast one: with one row per block, enough blocks share a multiprocessor to hide memory latency
(97 to 99 % of the copy ceiling on an H200; TMA pipelines and persistent blocks reached 90 to 97 %).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.ops.norms.config import ForwardConfig, default_forward
from pallas_kernels.ops.norms.norm import StaticNorm, center
from pallas_kernels.primitives.elementwise import COMPILER_PARAMS
from pallas_kernels.primitives.platform import target_device
from pallas_kernels.primitives.random import mixed_words
from pallas_kernels.primitives.row_kernel import HeldRows, held_segments, row_kernel
from pallas_kernels.primitives.rows import (
    cut_row,
    load_columns,
    load_row,
    map_row,
    row_index,
    short_rows_at_once,
    store_row,
    to_float32,
)
from pallas_kernels.primitives.sharing import without_values


def norm_forward(
    norm: StaticNorm,
    x: jax.Array,
    *,
    scale: jax.Array | None = None,
    bias: jax.Array | None = None,
    residual: jax.Array | None = None,
    words: jax.Array | None = None,
    with_statistics: bool = False,
    config: ForwardConfig | None = None,
) -> tuple[jax.Array, jax.Array | None, jax.Array | None]:
    """Returns (y, total, statistics).

    total is the sum that was normalised, None without a residual; statistics, those of `StaticNorm.statistics`, are for
    the backward pass, None unless `with_statistics`.

    x and residual: (rows, features) of one floating dtype, 128 to `LONGEST_ROW` features. scale, bias: (features,), or
    None. words: (2,) uint32, the key of the dropout of x; None for none. With words there must be a residual.
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
    outputs = {"y": jax.ShapeDtypeStruct(x.shape, x.dtype)}
    outputs |= {} if residual is None else {"total": outputs["y"]}
    outputs |= {"statistics": norm.statistics(x.shape[0], x.dtype)} if with_statistics else {}
    results = row_kernel(
        _whole_row(norm, without_values(x), config),
        {"x": x, "scale": scale, "bias": bias, "residual": residual, "words": words},
        outputs,
        name=norm.kernel_name(has_residual=residual is not None, has_dropout=words is not None),
        compiler_params=COMPILER_PARAMS,
        rows=x.shape[0],
        at_once=short_rows_at_once(x.shape, x.dtype.itemsize),
    )
    return results["y"], results.get("total"), results.get("statistics")


def _sum_of(norm, row, refs, words, segments, features):
    """Returns a row of x after dropout and residual sum, rounded as it is stored."""
    x = load_row(refs["x"].at[row], segments)
    if "residual" not in refs:
        return x
    value = to_float32(x)
    if words is not None:
        places = tuple(s.columns(jnp.uint32) for s in segments)
        value = norm.drop(value, words, row_index(row, segments), places, features)
    residual = to_float32(load_row(refs["residual"].at[row], segments))
    total = map_row(lambda a, b: (a + b).astype(refs["total"].dtype), value, residual)
    store_row(refs["total"].at[row], total, segments)
    return total


def _load_gain(refs, segments):
    """Returns the scale and the bias, by name, if there are any."""
    return {name: load_columns(refs[name], segments) for name in ("scale", "bias") if name in refs}


def _store_output(norm, row, refs, segments, value, inverse, gain):
    """Scales and stores a segment at a time, so that registers hold the scale and bias of only one.

    gain: the whole scale and bias if they have been read.
    """
    for i, (segment, part) in enumerate(zip(segments, value, strict=True)):
        own = {name: each[i : i + 1] for name, each in gain.items()} if gain else _load_gain(refs, (segment,))
        scale, bias = (own[name][0] if name in own else None for name in ("scale", "bias"))
        part = norm.scaled(part * inverse, scale, bias, refs["y"].dtype)
        store_row(refs["y"].at[row], (part,), (segment,))


def _whole_row(norm, x, config):
    features = x.shape[1]
    at_once, segments = held_segments(x.shape, x.dtype.itemsize)
    if config.piece and not at_once:
        segments = cut_row(segments, config.piece)

    def body(row, refs):
        words = mixed_words(refs["words"]) if "words" in refs else None
        gain = _load_gain(refs, segments) if config.reads_ahead else None
        value = to_float32(_sum_of(norm, row, refs, words, segments, features))
        held, statistics = HeldRows(at=row, segments=segments), []
        for _ in range(norm.mean_passes(x.dtype)):
            statistics.append(held.sum(value) * (1.0 / features))
            value = center(value, (held.spread(statistics[-1]),))
        mean_squares = held.sum(map_row(jnp.square, value)) * (1.0 / features)
        statistics.insert(0, lax.rsqrt(mean_squares + norm.epsilon))
        _store_output(norm, row, refs, segments, value, held.spread(statistics[0]), gain)
        if "statistics" in refs:
            for i, value in enumerate(statistics):
                held.store_value(refs["statistics"].at[i], value)

    return body
