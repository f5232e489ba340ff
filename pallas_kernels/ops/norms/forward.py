"""Norms forward on Mosaic GPU: a warpgroup reads one row, or several short ones, to registers.

The simple form is the fast one: with one row per block, enough blocks share a multiprocessor to hide memory latency
(97 to 99 % of the copy ceiling on an H200; TMA pipelines and persistent blocks reached 90 to 97 %).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.ops.norms.config import reads_ahead
from pallas_kernels.ops.norms.norm import StaticNorm, center
from pallas_kernels.primitives.elementwise import COMPILER_PARAMS
from pallas_kernels.primitives.platform import target_device
from pallas_kernels.primitives.random import Words, mixed_words
from pallas_kernels.primitives.row_kernel import HeldRows, held_segments
from pallas_kernels.primitives.rows import (
    RowValues,
    Segment,
    load_columns,
    load_row,
    map_row,
    row_grid,
    row_of_block,
    store_row,
    to_float32,
)
from pallas_kernels.primitives.settings import named_kernel


def norm_forward(
    norm: StaticNorm,
    x: jax.Array,
    *,
    scale: jax.Array | None = None,
    bias: jax.Array | None = None,
    residual: jax.Array | None = None,
    words: jax.Array | None = None,
    with_statistics: bool = False,
    is_ahead: bool | None = None,
) -> tuple[jax.Array, jax.Array | None, jax.Array | None]:
    """Returns (y, total, statistics).

    total is the sum that was normalised, None without a residual; statistics, those of `StaticNorm.statistics`, are for
    the backward pass, None unless `with_statistics`.

    x and residual: (rows, features) of one floating dtype, 128 to `LONGEST_ROW` features. scale, bias: (features,), or
    None. words: (2,) uint32, the key of the dropout of x; None for none. With words there must be a residual.
    is_ahead: whether scale and bias are read before a row is summed; None: as `reads_ahead` has it.
    """
    (rows, features), dtype = x.shape, x.dtype
    if is_ahead is None:
        gain_bytes = sum(array.dtype.itemsize for array in (scale, bias) if array is not None)
        cores = target_device().core_count
        is_ahead = reads_ahead(rows, features, dtype.itemsize, gain_bytes=gain_bytes, cores=cores)
    at_once, segments = held_segments(x.shape, dtype.itemsize)

    def body(refs: dict[str, Any]) -> None:
        row = row_of_block(rows, at_once)
        held = HeldRows(at=row, segments=segments)
        words = mixed_words(refs["words"]) if "words" in refs else None
        gain = _load_gain(refs, segments) if is_ahead else None
        value, statistics = to_float32(_sum_of(norm, held, refs, words, features)), []
        for _ in range(norm.mean_passes(dtype)):
            statistics.append(held.sum(value) * (1.0 / features))
            value = center(value, (held.spread(statistics[-1]),))
        mean_squares = held.sum(map_row(jnp.square, value)) * (1.0 / features)
        statistics.insert(0, lax.rsqrt(mean_squares + norm.epsilon))
        inverse = held.spread(statistics[0])
        # A segment at a time, so that registers hold the scale and bias of only one, unless they have been read.
        for i, (segment, part) in enumerate(zip(segments, value, strict=True)):
            own = {name: each[i : i + 1] for name, each in gain.items()} if gain else _load_gain(refs, (segment,))
            scale, bias = (own[name][0] if name in own else None for name in ("scale", "bias"))
            store_row(refs["y"].at[row], (norm.scaled(part * inverse, scale, bias, dtype),), (segment,))
        if "statistics" in refs:
            for i, value in enumerate(statistics):
                held.store_value(refs["statistics"].at[i], value)

    outputs = {"y": jax.ShapeDtypeStruct(x.shape, dtype)}
    outputs |= {} if residual is None else {"total": outputs["y"]}
    outputs |= {"statistics": norm.statistics(rows, dtype)} if with_statistics else {}
    results = named_kernel(
        body,
        {"x": x, "scale": scale, "bias": bias, "residual": residual, "words": words},
        outputs,
        name=norm.kernel_name(has_residual=residual is not None, has_dropout=words is not None),
        grid=row_grid(rows, at_once),
        compiler_params=COMPILER_PARAMS,
    )
    return results["y"], results.get("total"), results.get("statistics")


def _sum_of(norm: StaticNorm, held: HeldRows, refs: dict[str, Any], words: Words | None, features: int) -> RowValues:
    """Returns a row of x after dropout and residual sum, rounded as it is stored."""
    x = load_row(refs["x"].at[held.at], held.segments)
    if "residual" not in refs:
        return x
    value = to_float32(x)
    if words is not None:
        places = tuple(s.columns(jnp.uint32) for s in held.segments)
        value = norm.drop(value, words, held.index, places, features)
    total = map_row(lambda a, b: (a + b).astype(refs["total"].dtype), value, held.load(refs["residual"]))
    store_row(refs["total"].at[held.at], total, held.segments)
    return total


def _load_gain(refs: dict[str, Any], segments: Sequence[Segment]) -> dict[str, RowValues]:
    """Returns the scale and the bias, by name, if there are any."""
    return {name: load_columns(refs[name], segments) for name in ("scale", "bias") if name in refs}
