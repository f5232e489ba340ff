"""The backward kernel in which one warpgroup computes a whole row.

A pipeline brings rows to shared memory. A row's second pass reads it there again: 8192 columns would not fit in
registers as float32.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.ops._norms.norm import row_scalars, weigh
from pallas_kernels.ops._norms.operands import BackwardOperands, launch_blocks
from pallas_kernels.primitives.random import mixed_words
from pallas_kernels.primitives.rows import (
    load_row,
    map_row,
    split_row,
    store_row,
    to_float32,
    zeros_row,
)


def pipeline_kernel(operands: BackwardOperands) -> dict[str, jax.Array]:
    """Returns the rows of the gradients and each block's column sums, by name."""
    scale = operands.scale
    scratch = {} if scale is None else {"gain": plgpu.SMEM(scale.shape, scale.dtype)}
    return launch_blocks(operands, _rows_of_block, scratch)


def _rows_of_block(operands: BackwardOperands, refs: dict[str, Any]) -> None:
    """Differentiates the block's rows one after the other, with the column sums in registers."""
    features, blocks, block = operands.features, operands.blocks, lax.axis_index("block")
    segments = split_row(features, operands.dtype.itemsize)
    trips = (operands.rows - block + blocks - 1) // blocks
    words = mixed_words(refs["words"]) if "words" in refs else None
    if "gain" in refs:
        store_row(refs["gain"], load_row(refs["scale"], segments), segments)
        plgpu.commit_smem()  # two threads write the columns that a ragged row's last segment repeats
    streams = [refs[name] for name in ("total", "dy", "dtotal_in") if name in refs]

    def differentiate(indices, *rows_and_sums):
        """Differentiates one row, whose references are (1, features), and returns the column sums with it added."""
        *stream_rows, sums = rows_and_sums
        row = indices[0] * blocks + block

        def load(first):
            value, dy = (to_float32(load_row(ref.at[first], segments)) for ref in stream_rows[:2])
            return value, dy, weigh(dy, load_row(refs["gain"], segments) if "gain" in refs else None)

        value, _, weighted = load(0)
        scalars = row_scalars(operands.norm, value, weighted, segments, features, operands.dtype)
        # A zero that the compiler cannot see, so that it does not keep the values of the first read in registers.
        value, dy, weighted = load(lax.optimization_barrier(jnp.int32(0)))
        centered = scalars.center(value)
        gradient = scalars.gradient(centered, weighted)
        if len(stream_rows) == 3:
            gradient = map_row(jnp.add, gradient, to_float32(load_row(stream_rows[2].at[0], segments)))
        store_row(refs["dtotal"].at[row], gradient, segments)
        if words is not None:
            columns = tuple(s.columns(jnp.uint32) for s in segments)
            store_row(refs["dx"].at[row], operands.norm.drop(gradient, words, row, columns, features), segments)
        sums = scalars.column_sums(centered, dy, sums)
        plgpu.commit_smem()  # all reads of this step are done before TMA fills its buffer again
        return sums

    # All indices are in bounds. Without this promise TMA would copy at most 256 columns at a time.
    spec = plgpu.BlockSpec(
        (1, features),
        lambda i: (i * blocks + block, 0),
        oob_fill_mode=plgpu.OOBFillMode.PROMISE_IN_BOUNDS,
    )
    sums = plgpu.emit_pipeline(
        differentiate,
        grid=(trips,),
        in_specs=[spec] * len(streams),
        max_concurrent_steps=operands.config.steps,
        init_carry={name: zeros_row(segments) for name in operands.sums},
    )(*streams)
    for name, values in sums.items():
        store_row(operands.sums_at(refs, block, name), values, segments)
