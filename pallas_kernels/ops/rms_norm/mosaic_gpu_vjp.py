"""RMSNorm backward on Mosaic GPU: one pass over x and dy writes dx and, a block, one row of partial column sums.

With v = x / rms(x) and w = scale * dy, a row's gradients are

    dx = (w - v * mean(v * w)) / rms(x) (+ the cotangent of the sum),   dscale = sum over rows of dy * v

The root mean square is computed again: x is read anyway, so a saved one would only add bytes. Blocks are persistent and
keep their column sums in registers; XLA adds the blocks' sums in a fixed order, so results repeat bit for bit.
"""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.ops.rms_norm.config import BackwardConfig, default_backward
from pallas_kernels.ops.rms_norm.mosaic_gpu import COMPILER_PARAMS
from pallas_kernels.ops.rms_norm.mosaic_gpu_vjp_shared import shared_row_kernel
from pallas_kernels.primitives.platform import target_device, varying_like
from pallas_kernels.primitives.rows import (
    LANES,
    load_row,
    map_row,
    row_sum,
    split_row,
    store_row,
    to_float32,
    zeros_row,
)


def rms_norm_backward(
    total: jax.Array,
    scale: jax.Array,
    dy: jax.Array,
    dtotal: jax.Array | None,
    *,
    epsilon: float,
    config: BackwardConfig | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Returns (dtotal + the gradient through the norm, dscale).

    total (the normalised x, or x + residual), dy and dtotal: (rows, features) of one floating dtype, features >= 128.
    scale: (features,).
    """
    rows, features = total.shape
    streams = (total, dy) if dtotal is None else (total, dy, dtotal)
    if config is None:
        config = default_backward(
            features, total.dtype.itemsize, scale_itemsize=scale.dtype.itemsize, streams=len(streams)
        )
    blocks = min(rows, target_device().core_count * config.blocks_per_core)
    kernel = shared_row_kernel if config.loads == "shared" else _one_warpgroup_kernel
    dx, partial = kernel(streams, scale, blocks, epsilon=epsilon, config=config)
    dx, partial = (varying_like(output, scale, *streams) for output in (dx, partial))
    dscale = jnp.sum(partial, axis=0)
    if tail := _separate_tail(features, total.dtype.itemsize, config):
        dscale = jnp.concatenate([dscale[: features - tail], dscale[-tail:]])
    return dx, dscale.astype(scale.dtype)


def _one_warpgroup_kernel(streams, scale, blocks, *, epsilon, config):
    """Returns dx and each block's column sums."""
    rows, features = streams[0].shape
    make_body = _chunked_body if config.loads == "chunked" else _whole_row_body
    body = make_body(streams[0], len(streams), blocks, epsilon, config)
    holds_gain = config.gain == "shared" and config.loads != "chunked"
    tail = LANES if _separate_tail(features, streams[0].dtype.itemsize, config) else 0

    def rms_norm_gradient(scale_ref, *refs):
        gain_ref = refs[-1] if holds_gain else None
        stream_refs, (dx_ref, partial_ref) = refs[: len(streams)], refs[len(streams) : len(streams) + 2]
        body(scale_ref, gain_ref, stream_refs, dx_ref, partial_ref)

    return plgpu.kernel(
        rms_norm_gradient,
        out_type=(
            jax.ShapeDtypeStruct((rows, features), streams[0].dtype),
            jax.ShapeDtypeStruct((blocks, features + tail), jnp.float32),
        ),
        grid=(blocks,),
        grid_names=("block",),
        scratch_types=(plgpu.SMEM((features,), scale.dtype),) if holds_gain else (),
        compiler_params=COMPILER_PARAMS,
    )(scale, *streams)


def _separate_tail(features, itemsize, config):
    """How many columns of a ragged row's last segment have column sums of their own, behind the others.

    That segment repeats columns of the one before. Where sums live in memory (chunked) and not in registers, adding to
    the repeated ones would count them twice.
    """
    if config.loads != "chunked":
        return 0
    last = split_row(features, itemsize)[-1]
    return last.size - last.repeated if last.repeated else 0


def _row_scalars(sum_of_squares, sum_of_products, features, epsilon):
    """1 / rms, and what x is multiplied with in dx."""
    inverse = lax.rsqrt(sum_of_squares * (1.0 / features) + epsilon)
    return inverse, sum_of_products * (inverse * inverse * inverse * (1.0 / features))


def _whole_row_body(total, stream_count, blocks, epsilon, config):
    rows, features = total.shape
    segments = split_row(features, total.dtype.itemsize)

    def differentiate(row, stream_rows, load_gain, dx_ref, partial):
        """One row; the references in `stream_rows` are (1, features)."""

        def load(first):
            value, dy = (to_float32(load_row(ref.at[first], segments)) for ref in stream_rows[:2])
            return value, dy, map_row(lambda g, d: g.astype(jnp.float32) * d, load_gain(), dy)

        value, dy, weighted = load(0)
        squares = row_sum(map_row(jnp.square, value), segments)
        products = row_sum(map_row(jnp.multiply, value, weighted), segments)
        inverse, slope = _row_scalars(squares, products, features, epsilon)
        if config.second_read == "reload":
            # A zero the compiler cannot see through; else it keeps the first read's values in registers.
            value, dy, weighted = load(lax.optimization_barrier(jnp.int32(0)))
        dx = map_row(lambda v, w: w * inverse - v * slope, value, weighted)
        if stream_count == 3:
            dx = map_row(jnp.add, dx, to_float32(load_row(stream_rows[2].at[0], segments)))
        store_row(dx_ref.at[row], dx, segments)
        return map_row(lambda p, d, v: p + d * (v * inverse), partial, dy, value)

    def body(scale_ref, gain_ref, stream_refs, dx_ref, partial_ref):
        block = lax.axis_index("block")
        trips = (rows - block + blocks - 1) // blocks
        gain = load_row(scale_ref, segments)
        if gain_ref is not None:  # each thread reads back what it stores here itself
            store_row(gain_ref, gain, segments)

        def load_gain():
            return gain if gain_ref is None else load_row(gain_ref, segments)

        def pipeline_step(indices, *refs_and_partial):
            *stream_rows, partial = refs_and_partial
            partial = differentiate(indices[0] * blocks + block, stream_rows, load_gain, dx_ref, partial)
            plgpu.commit_smem()  # all reads of this step are done before TMA fills its buffer again
            return partial

        def direct_step(i, partial):
            row = i * blocks + block
            return differentiate(row, [ref.at[pl.ds(row, 1)] for ref in stream_refs], load_gain, dx_ref, partial)

        if config.loads == "pipeline":
            # In bounds by construction; without the promise TMA would take at most 256 columns a copy.
            spec = plgpu.BlockSpec(
                (1, features),
                lambda i: (i * blocks + block, 0),
                oob_fill_mode=plgpu.OOBFillMode.PROMISE_IN_BOUNDS,
            )
            partial = plgpu.emit_pipeline(
                pipeline_step,
                grid=(trips,),
                in_specs=[spec] * stream_count,
                max_concurrent_steps=config.steps,
                init_carry=zeros_row(segments),
            )(*stream_refs)
        else:
            partial = lax.fori_loop(0, trips, direct_step, zeros_row(segments))
        store_row(partial_ref.at[block], partial, segments)

    return body


def _chunked_body(total, stream_count, blocks, epsilon, config):
    """Rows too long for registers: each is walked twice, and the column sums live in the block's row of `partial`."""
    rows, features = total.shape
    chunk = min(config.chunk, features)
    chunks = features // chunk
    segments = split_row(chunk, total.dtype.itemsize, stride=features)
    rest = split_row(features - chunks * chunk, total.dtype.itemsize, offset=chunks * chunk, stride=features)

    def body(scale_ref, gain_ref, stream_refs, dx_ref, partial_ref):
        del gain_ref
        block = lax.axis_index("block")
        whole = pl.ds(0, features)

        def load(row, columns, segments):
            value, dy = (to_float32(load_row(ref.at[row, columns], segments)) for ref in stream_refs[:2])
            gain = to_float32(load_row(scale_ref.at[columns], segments))
            return value, dy, map_row(jnp.multiply, gain, dy)

        def reduce(row, columns, segments):
            value, _, weighted = load(row, columns, segments)
            return map_row(jnp.square, value), map_row(jnp.multiply, value, weighted)

        def sums_at(columns, segments):
            if columns is whole:
                return partial_ref.at[block], tuple(replace(s, offset=features) if s.repeated else s for s in segments)
            return partial_ref.at[block, columns], segments

        def clear(columns, segments):
            partial_row, places = sums_at(columns, segments)
            store_row(partial_row, zeros_row(places), places)

        def differentiate(row, columns, segments, inverse, slope):
            value, dy, weighted = load(row, columns, segments)
            dx = map_row(lambda v, w: w * inverse - v * slope, value, weighted)
            if stream_count == 3:
                dx = map_row(jnp.add, dx, to_float32(load_row(stream_refs[2].at[row, columns], segments)))
            store_row(dx_ref.at[row, columns], dx, segments)
            partial_row, places = sums_at(columns, segments)
            before = load_row(partial_row, places)
            store_row(partial_row, map_row(lambda p, d, v: p + d * (v * inverse), before, dy, value), places)

        @pl.loop(0, chunks)
        def _(j):
            clear(pl.ds(j * chunk, chunk), segments)

        if rest:
            clear(whole, rest)

        @pl.loop(0, (rows - block + blocks - 1) // blocks)
        def _(i):
            row = i * blocks + block

            def accumulate(j, sums):
                parts = reduce(row, pl.ds(j * chunk, chunk), segments)
                return tuple(map_row(jnp.add, a, b) for a, b in zip(sums, parts, strict=True))

            sums = lax.fori_loop(0, chunks, accumulate, (zeros_row(segments), zeros_row(segments)))
            squares, products = (row_sum(values, segments) for values in sums)
            if rest:
                parts = reduce(row, whole, rest)
                squares, products = squares + row_sum(parts[0], rest), products + row_sum(parts[1], rest)
            inverse, slope = _row_scalars(squares, products, features, epsilon)

            @pl.loop(0, chunks)
            def _(j):
                differentiate(row, pl.ds(j * chunk, chunk), segments, inverse, slope)

            if rest:
                differentiate(row, whole, rest, inverse, slope)

    return body
