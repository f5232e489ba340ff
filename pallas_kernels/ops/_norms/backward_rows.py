"""The backward kernels in which one warpgroup has a row to itself.

A row's second pass reads it again, from shared memory or the L1 cache: 8192 columns would not fit in registers as
float32. Rows that do not fit at all are walked along in chunks, with column sums in memory.
"""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

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
    body = (_chunked_row if config.loads == "chunked" else _whole_row)(operands)
    scratch = {}
    if operands.scale is not None and config.gain == "shared" and config.loads != "chunked":
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


def _store_gradient(operands, refs, words, row, columns, segments, gradient):
    """Writes part of a row's gradient, and of the gradient of what was dropped out."""
    store_row(refs["dtotal"].at[row, columns], gradient, segments)
    if words is not None:
        start = jnp.asarray(columns.start).astype(jnp.uint32)
        places = tuple(s.columns(jnp.uint32) + start for s in segments)
        dropped = operands.norm.drop(gradient, words, row, places, operands.features)
        store_row(refs["dx"].at[row, columns], dropped, segments)


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
        return value, RowScalars.of_sums(
            features, norm.epsilon, squares=squares, products=products, means=means, weighted=total_weight
        )

    def differentiate(row, stream_rows, load_gain, refs, words, sums):
        """One row; the references in `stream_rows` are (1, features). Returns the column sums with it."""

        def load(first):
            value, dy = (to_float32(load_row(ref.at[first], segments)) for ref in stream_rows[:2])
            return value, dy, weigh(dy, load_gain())

        value, dy, weighted = load(0)
        centered, scalars = scalars_of(value, weighted)
        if config.second_read == "reload":
            # A zero the compiler cannot see through; else it keeps the first read's values in registers.
            value, dy, weighted = load(lax.optimization_barrier(jnp.int32(0)))
            centered = scalars.center(value)
        gradient = scalars.gradient(centered, weighted)
        if len(stream_rows) == 3:
            gradient = map_row(jnp.add, gradient, to_float32(load_row(stream_rows[2].at[0], segments)))
        _store_gradient(operands, refs, words, row, whole, segments, gradient)
        return scalars.column_sums(centered, dy, sums)

    def body(block, refs):
        trips = (rows - block + blocks - 1) // blocks
        words = mixed_words(refs["words"]) if "words" in refs else None
        gain = load_row(refs["scale"], segments) if "scale" in refs else None
        if gain is not None and "gain" in refs:
            store_row(refs["gain"], gain, segments)
            plgpu.commit_smem()  # columns that a ragged row's last segment repeats are written by two threads
        streams = [refs[name] for name in ("total", "dy", "dtotal_in") if name in refs]

        def load_gain():
            return load_row(refs["gain"], segments) if "gain" in refs else gain

        def pipeline_step(indices, *rows_and_sums):
            *stream_rows, sums = rows_and_sums
            sums = differentiate(indices[0] * blocks + block, stream_rows, load_gain, refs, words, sums)
            plgpu.commit_smem()  # all reads of this step are done before TMA fills its buffer again
            return sums

        def direct_step(i, sums):
            row = i * blocks + block
            return differentiate(row, [ref.at[pl.ds(row, 1)] for ref in streams], load_gain, refs, words, sums)

        sums = {name: zeros_row(segments) for name in operands.sums}
        if config.loads == "pipeline":
            # In bounds by construction; without the promise TMA would take at most 256 columns a copy.
            spec = plgpu.BlockSpec(
                (1, features),
                lambda i: (i * blocks + block, 0),
                oob_fill_mode=plgpu.OOBFillMode.PROMISE_IN_BOUNDS,
            )
            sums = plgpu.emit_pipeline(
                pipeline_step,
                grid=(trips,),
                in_specs=[spec] * len(streams),
                max_concurrent_steps=config.steps,
                init_carry=sums,
            )(*streams)
        else:
            sums = lax.fori_loop(0, trips, direct_step, sums)
        for name, values in sums.items():
            store_row(operands.sums_at(refs, block, name), values, segments)

    return body


def _chunked_row(operands):
    """Rows too long for registers: each is walked along twice or, to take its mean off, three times."""
    rows, features, blocks, norm = operands.rows, operands.features, operands.blocks, operands.norm
    itemsize = operands.dtype.itemsize
    chunk = min(operands.config.chunk, features)
    chunks = features // chunk
    segments = split_row(chunk, itemsize, stride=features)
    rest = split_row(features - chunks * chunk, itemsize, offset=chunks * chunk, stride=features)
    whole = pl.ds(0, features)

    def each_chunk(function):
        @pl.loop(0, chunks)
        def _(j):
            function(pl.ds(j * chunk, chunk), segments)

        if rest:
            function(whole, rest)

    def sums_over_row(count, part):
        """The sums over the row of the `count` rows that `part` makes of some columns."""

        def accumulate(j, sums):
            parts = part(pl.ds(j * chunk, chunk), segments)
            return tuple(map_row(jnp.add, a, b) for a, b in zip(sums, parts, strict=True))

        sums = lax.fori_loop(0, chunks, accumulate, (zeros_row(segments),) * count)
        sums = [row_sum(values, segments) for values in sums]
        return [s + row_sum(p, rest) for s, p in zip(sums, part(whole, rest), strict=True)] if rest else sums

    def body(block, refs):
        words = mixed_words(refs["words"]) if "words" in refs else None

        def load(row, columns, segments):
            value, dy = (to_float32(load_row(refs[name].at[row, columns], segments)) for name in ("total", "dy"))
            gain = load_row(refs["scale"].at[columns], segments) if "scale" in refs else None
            return value, dy, weigh(dy, gain)

        def places(name, columns, segments):
            """Where some columns' sums are: those of a ragged tail have places of their own."""
            ref = operands.sums_at(refs, block, name)
            if columns is whole:
                return ref, tuple(replace(s, offset=features) if s.repeated else s for s in segments)
            return ref.at[columns], segments

        def clear(columns, segments):
            for name in operands.sums:
                ref, at = places(name, columns, segments)
                store_row(ref, zeros_row(at), at)

        def scalars_of(row):
            means, total_weight = [], None

            def centered_and_weighted(*part):
                value, _, weighted = load(row, *part)
                for mean in means:
                    value = map_row(lambda v, mean=mean: v - mean, value)
                return value, weighted

            def squares_and_products(*part):
                value, weighted = centered_and_weighted(*part)
                return map_row(jnp.square, value), map_row(jnp.multiply, value, weighted)

            for _ in range(norm.mean_passes(operands.dtype)):
                total, total_weight = sums_over_row(2, centered_and_weighted)
                means.append(total * (1.0 / features))
            squares, products = sums_over_row(2, squares_and_products)
            return RowScalars.of_sums(
                features, norm.epsilon, squares=squares, products=products, means=means, weighted=total_weight
            )

        def differentiate(row, scalars, columns, segments):
            value, dy, weighted = load(row, columns, segments)
            centered = scalars.center(value)
            gradient = scalars.gradient(centered, weighted)
            if "dtotal_in" in refs:
                cotangent = load_row(refs["dtotal_in"].at[row, columns], segments)
                gradient = map_row(jnp.add, gradient, to_float32(cotangent))
            _store_gradient(operands, refs, words, row, columns, segments, gradient)
            at = {name: places(name, columns, segments) for name in operands.sums}
            before = {name: load_row(*at[name]) for name in operands.sums}
            for name, values in scalars.column_sums(centered, dy, before).items():
                store_row(at[name][0], values, at[name][1])

        each_chunk(clear)

        @pl.loop(0, (rows - block + blocks - 1) // blocks)
        def _(i):
            row = i * blocks + block
            scalars = scalars_of(row)
            each_chunk(lambda columns, segments: differentiate(row, scalars, columns, segments))

    return body
