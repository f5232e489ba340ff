"""The backward kernel of short rows, of which each warp holds whole ones.

A block reads several rows directly to registers, while other blocks of its multiprocessor wait for theirs. At the end
it adds up the column sums of its four warps in shared memory.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.ops._norms.norm import row_scalars, weigh
from pallas_kernels.ops._norms.operands import BackwardOperands, launch_blocks
from pallas_kernels.primitives.compat import store
from pallas_kernels.primitives.random import mixed_words
from pallas_kernels.primitives.rows import (
    WARPS,
    RowValues,
    load_columns,
    load_row,
    map_row,
    row_index,
    short_rows_at_once,
    split_short_rows,
    store_row,
    to_float32,
    zeros_row,
)


def short_rows_kernel(operands: BackwardOperands) -> dict[str, jax.Array]:
    """Returns the rows of the gradients and each block's column sums, by name."""
    pieces = split_short_rows(operands.features, operands.dtype.itemsize, rows=WARPS)
    scratch = {"lines": plgpu.SMEM((len(pieces), *pieces[0].shape), jnp.float32)} if operands.sums else {}
    return launch_blocks(operands, _rows_of_block, scratch)


def _rows_of_block(operands: BackwardOperands, refs: dict[str, Any]) -> None:
    """Differentiates the block's rows, several at once, with the column sums in registers."""
    rows, features, blocks, block = operands.rows, operands.features, operands.blocks, lax.axis_index("block")
    at_once = short_rows_at_once((rows, features), operands.dtype.itemsize)
    segments = split_short_rows(features, operands.dtype.itemsize, rows=WARPS)
    words = mixed_words(refs["words"]) if "words" in refs else None
    gain = load_columns(refs["scale"], segments) if "scale" in refs else None
    streams = [refs[name] for name in ("total", "dy", "dtotal_in") if name in refs]

    def step(i, sums):
        start = (i * blocks + block) * at_once
        first = jnp.minimum(start, rows - at_once)
        parts = [pl.ds(first + line, WARPS) for line in range(0, at_once, WARPS)]
        loaded = [[load_row(ref.at[part], segments) for ref in streams] for part in parts]
        for part, values in zip(parts, loaded, strict=True):
            sums = differentiate(part, start, [to_float32(each) for each in values], sums)
        return sums

    def differentiate(part: pl.Slice, start: jax.Array, values: list[RowValues], sums: dict[str, RowValues]):
        """Writes the gradient of four rows and returns the column sums with those from row `start` on added."""
        value, dy, *cotangent = values
        weighted = weigh(dy, gain)
        scalars = row_scalars(operands.norm, value, weighted, segments, features, operands.dtype)
        row = row_index(part, segments)
        counted = dy if rows % at_once == 0 else map_row(lambda d: jnp.where(row >= start, d, jnp.float32(0)), dy)
        gradient, sums = scalars.finish(value, counted, weighted, sums)
        if cotangent:
            gradient = map_row(jnp.add, gradient, cotangent[0])
        store_row(refs["dtotal"].at[part], gradient, segments)
        if words is not None:
            columns = tuple(s.columns(jnp.uint32) for s in segments)
            store_row(refs["dx"].at[part], operands.norm.drop(gradient, words, row, columns, features), segments)
        return sums

    trips = (pl.cdiv(rows, at_once) - block + blocks - 1) // blocks
    sums = lax.fori_loop(0, trips, step, {name: zeros_row(segments) for name in operands.sums})
    for name, values in sums.items():
        for i, value in enumerate(values):
            refs["lines"][i] = value
        plgpu.commit_smem()
        for i, segment in enumerate(segments):
            layout = segment.layout.reduce(0)
            lines = [plgpu.load(refs["lines"].at[i, line], layout=layout, optimized=False) for line in range(WARPS)]
            ref = operands.sums_at(refs, block, name).at[segment.index[-1:]]
            store(ref, sum(lines[1:], start=lines[0]).astype(ref.dtype))
        plgpu.commit_smem()  # the next sums take the same place
