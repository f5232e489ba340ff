"""The backward kernel: persistent blocks, each of which differentiates every n-th row.

A block keeps its column sums in registers. Where its rows come from is up to a source of `row_sources`.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.ops._norms.config import BackwardConfig
from pallas_kernels.ops._norms.norm import Norm, center
from pallas_kernels.ops._norms.row_sources import STREAMS, Rows, ring_rows, ring_scratch, short_rows, short_scratch
from pallas_kernels.primitives import settings
from pallas_kernels.primitives.elementwise import COMPILER_PARAMS
from pallas_kernels.primitives.random import mixed_words
from pallas_kernels.primitives.rows import RowValues, map_row, to_float32, zeros_row

_SOURCES = {"registers": (short_rows, short_scratch), "ring": (ring_rows, ring_scratch)}


def backward_kernel(
    norm: Norm, operands: dict[str, jax.Array], sums: tuple[str, ...], *, blocks: int, config: BackwardConfig
) -> dict[str, jax.Array]:
    """Returns "dtotal_out", with dropout "dx", and if there are any "sums": of each block, (blocks, sums, features).

    operands: by name, "total", "dy" and, if it has one, the sum's cotangent "dtotal", each (rows, features);
        "statistics"; "scale" and the dropout's "words" where given.
    sums: the gradients that are summed over rows, of "scale" and "bias".
    """
    rows, features = operands["total"].shape
    # Warps see a row in lines, one for each, where the row divides evenly.
    parts = config.parts(features, operands["total"].dtype.itemsize)
    shapes = dict.fromkeys(STREAMS, (rows, *parts)) | {"scale": parts}
    operands = {name: each.reshape(shapes.get(name, each.shape)) for name, each in operands.items()}
    row = jax.ShapeDtypeStruct((rows, *parts), operands["total"].dtype)
    outputs = {"dtotal_out": row} | ({"dx": row} if "words" in operands else {})
    outputs |= {"sums": jax.ShapeDtypeStruct((blocks, len(sums), *parts), jnp.float32)} if sums else {}
    source_of, scratch_of = _SOURCES[config.loads]
    scratch = scratch_of(operands, config)
    names = (*operands, *outputs, *scratch)

    def kernel(*references):
        refs = dict(zip(names, references, strict=True))
        words = mixed_words(refs["words"]) if "words" in refs else None
        source = source_of(refs, config, blocks)

        def step(i, carry):
            totals, statistics = carry
            ahead = source.read_ahead(i + 1)
            for rows in source.arrived(i, statistics):
                totals = _differentiate(norm, rows, refs, source.gain, words, totals)
            return totals, ahead

        totals = {name: zeros_row(source.segments) for name in sums}
        totals, _ = lax.fori_loop(0, source.trips, step, (totals, source.read_ahead(jnp.int32(0))))
        for i, name in enumerate(sums):
            source.store_sums(refs["sums"].at[lax.axis_index("block"), i], totals[name])

    # Sums of lines need no scratch memory, which sums over a warpgroup do.
    others = {"reduction_scratch_bytes": 512} if len(parts) > 1 else {}
    results = settings.kernel(
        kernel,
        out_type=tuple(outputs.values()),
        grid=(blocks,),
        grid_names=("block",),
        num_threads=config.warpgroups,
        thread_name="warpgroup",
        scratch_types=tuple(scratch.values()),
        compiler_params=replace(COMPILER_PARAMS, **others),
        kernel_name=norm.kernel_name(has_residual=False, has_dropout="words" in operands) + "_gradient",
    )(*operands.values())
    whole = {"sums": (blocks, len(sums), features)}
    return {name: each.reshape(whole.get(name, (rows, features))) for name, each in zip(outputs, results, strict=True)}


def _differentiate(
    norm: Norm, rows: Rows, refs: dict[str, Any], gain: Any, words: Any, totals: dict[str, RowValues]
) -> dict[str, RowValues]:
    """Writes the gradient of rows; returns the column sums with theirs added."""
    features = math.prod(refs["total"].shape[1:])
    inverse, *means = rows.statistics

    def read():
        total, dy, *dtotal = rows.read()
        dy = to_float32(dy)
        weighted = dy if gain is None else map_row(jnp.multiply, gain(), dy)
        return center(to_float32(total), means), dy, weighted, dtotal

    centered, dy, weighted, dtotal = read()
    product, *weight = rows.sums(map_row(jnp.multiply, centered, weighted), *([weighted] if means else []))
    if rows.is_read_again:
        centered, dy, weighted, dtotal = read()
    slope = product * inverse * (1.0 / features) * inverse * inverse
    gradient = map_row(lambda v, w: w * inverse - v * slope, centered, weighted)
    if weight:
        offset = weight[0] * inverse * (1.0 / features)
        gradient = map_row(lambda g: g - offset, gradient)
    if dtotal:
        gradient = map_row(jnp.add, gradient, to_float32(dtotal[0]))
    rows.store(refs["dtotal_out"], gradient)
    if words is not None:
        rows.store(refs["dx"], norm.drop(gradient, words, rows.index, rows.columns, features))
    added, counted = dict(totals), rows.counted(dy)
    if "scale" in totals:
        added["scale"] = map_row(lambda t, d, v: t + d * (v * inverse), totals["scale"], counted, centered)
    if "bias" in totals:
        added["bias"] = map_row(jnp.add, totals["bias"], counted)
    return added
