"""The backward kernels in which one warpgroup has a row to itself.

A pipeline brings rows to shared memory. A row's second pass reads it there again: 8192 columns would not fit in
registers as float32. `backward_chunked` takes rows that do not fit at all.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.ops._norms.backward_chunked import chunked_rows
from pallas_kernels.ops._norms.norm import COMPILER_PARAMS, RowScalars, weigh
from pallas_kernels.ops._norms.operands import BackwardOperands
from pallas_kernels.primitives import settings
from pallas_kernels.primitives.random import mixed_words
from pallas_kernels.primitives.rows import (
    load_row,
    map_row,
    row_sum,
    split_row,
    store_row,
    to_float32,
    zeros_row,
)


def row_kernel(operands: BackwardOperands) -> dict[str, jax.Array]:
    """Returns the gradients' rows and the blocks' column sums, by name."""
    config, inputs, out_types = operands.config, operands.inputs, operands.out_types()
    body = partial(chunked_rows, operands) if config.loads == "chunked" else _whole_row(operands)
    scratch = {}
    if operands.scale is not None and config.loads != "chunked":
        scratch["gain"] = plgpu.SMEM((operands.features,), operands.scale.dtype)
    names = (*inputs, *out_types, *scratch)

    def kernel(*refs):
        body(lax.axis_index("block"), dict(zip(names, refs, strict=True)))

    outputs = settings.kernel(
        kernel,
        out_type=tuple(out_types.values()),
        grid=(operands.blocks,),
        grid_names=("block",),
        scratch_types=tuple(scratch.values()),
        compiler_params=COMPILER_PARAMS,
        kernel_name=operands.kernel_name,
    )(*inputs.values())
    return dict(zip(out_types, outputs, strict=True))


def _whole_row(operands):
    rows, features, blocks = operands.rows, operands.features, operands.blocks
    norm, config = operands.norm, operands.config
    segments = split_row(features, operands.dtype.itemsize)
    whole = pl.ds(0, features)

    def scalars_of(value, weighted):
        means = []
        for _ in range(norm.mean_passes(operands.dtype)):
            mean = row_sum(value, segments) * (1.0 / features)
            value = map_row(lambda v, mean=mean: v - mean, value)
            means.append(mean)
        total_weight = row_sum(weighted, segments) if means else None
        squares = row_sum(map_row(jnp.square, value), segments)
        products = row_sum(map_row(jnp.multiply, value, weighted), segments)
        return RowScalars.of_sums(
            features, norm.epsilon, squares=squares, products=products, means=means, weighted=total_weight
        )

    def differentiate(row, stream_rows, refs, words, sums):
        """One row; the references in `stream_rows` are (1, features). Returns the column sums with it."""

        def load(first):
            value, dy = (to_float32(load_row(ref.at[first], segments)) for ref in stream_rows[:2])
            return value, dy, weigh(dy, load_row(refs["gain"], segments) if "gain" in refs else None)

        value, _, weighted = load(0)
        scalars = scalars_of(value, weighted)
        # A zero the compiler cannot see through; else it keeps the first read's values in registers.
        value, dy, weighted = load(lax.optimization_barrier(jnp.int32(0)))
        centered = scalars.center(value)
        gradient = scalars.gradient(centered, weighted)
        if len(stream_rows) == 3:
            gradient = map_row(jnp.add, gradient, to_float32(load_row(stream_rows[2].at[0], segments)))
        operands.store_gradient(refs, words, row, whole, segments, gradient)
        return scalars.column_sums(centered, dy, sums)

    def body(block, refs):
        trips = (rows - block + blocks - 1) // blocks
        words = mixed_words(refs["words"]) if "words" in refs else None
        if "gain" in refs:
            store_row(refs["gain"], load_row(refs["scale"], segments), segments)
            plgpu.commit_smem()  # columns that a ragged row's last segment repeats are written by two threads
        streams = [refs[name] for name in ("total", "dy", "dtotal_in") if name in refs]

        def step(indices, *rows_and_sums):
            *stream_rows, sums = rows_and_sums
            sums = differentiate(indices[0] * blocks + block, stream_rows, refs, words, sums)
            plgpu.commit_smem()  # all reads of this step are done before TMA fills its buffer again
            return sums

        # In bounds by construction; without the promise TMA would take at most 256 columns a copy.
        spec = plgpu.BlockSpec(
            (1, features),
            lambda i: (i * blocks + block, 0),
            oob_fill_mode=plgpu.OOBFillMode.PROMISE_IN_BOUNDS,
        )
        sums = plgpu.emit_pipeline(
            step,
            grid=(trips,),
            in_specs=[spec] * len(streams),
            max_concurrent_steps=config.steps,
            init_carry={name: zeros_row(segments) for name in operands.sums},
        )(*streams)
        for name, values in sums.items():
            store_row(operands.sums_at(refs, block, name), values, segments)

    return body
