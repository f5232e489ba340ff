"""Softmax backward on Mosaic GPU, from the weights that the forward pass returned.

With p the weights and dy their cotangents, a row's gradient is

    dx = p * (dy - sum(p * dy) / sum(p)) * scale

The division makes up for p's rounding to the dtype of x. Without it a row with one large weight, where the two terms
nearly cancel, gets 20 times the error of a gradient from float32 weights; with it the error is that of rounding dx.
The mask plays no part: p is zero where it hides.

A short row is in the registers of one warpgroup. A block holds a longer one in shared memory, where TMA brings the
row's weights and dy; its warpgroups go over them twice, each warp over its own lines. Several blocks share a
multiprocessor, so that one reads while another writes. One warpgroup walks along still longer rows, and causal ones,
twice, chunk by chunk.
"""

from __future__ import annotations

import functools
from dataclasses import replace

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.ops.softmax.config import SHARED_BYTES, RowConfig, default_backward
from pallas_kernels.ops.softmax.masking import Masking, columns_from, load_kept, whole_row_segments
from pallas_kernels.ops.softmax.mosaic_gpu import compiler_params
from pallas_kernels.ops.softmax.rounding import pairwise, quotient, remainder
from pallas_kernels.primitives import settings
from pallas_kernels.primitives.platform import varying_like
from pallas_kernels.primitives.row_kernel import RowChunks, row_kernel
from pallas_kernels.primitives.rows import (
    WARPS,
    WarpSegment,
    line_sums,
    load_row,
    map_row,
    row_index,
    row_sum,
    split_warp_row,
    store_row,
    to_float32,
    zeros_row,
)
from pallas_kernels.primitives.sharing import without_values


def softmax_backward(
    weights: jax.Array, dy: jax.Array, *, masking: Masking, config: RowConfig | None = None
) -> jax.Array:
    """Returns dx. weights (what `softmax_forward` returned) and dy: (rows, features), features >= 128."""
    config = config or default_backward(weights.dtype.itemsize)
    rows, features = weights.shape
    is_long = features > config.register_columns
    if is_long and masking.queries is None and fits_shared_memory(features, weights.dtype.itemsize, config):
        return varying_like(_shared_row_gradient(weights, dy, masking=masking, config=config), weights, dy)
    masking = replace(masking, mask_index=())  # the weights have it
    body = (_chunked_body if is_long else _whole_row_body)(without_values(weights), masking, config)
    results = row_kernel(
        lambda row, refs: body(row, refs["weights"], refs["dy"], refs["dx"]),
        {"weights": weights, "dy": dy},
        {"dx": jax.ShapeDtypeStruct(weights.shape, weights.dtype)},
        name="softmax_gradient",
        compiler_params=compiler_params(weights.dtype),
        rows=rows,
        at_once=masking.rows_at_once(weights),
    )
    return results["dx"]


def _gradient(p, centered, scale):
    return p * centered if scale is None else p * (centered * jnp.float32(scale))


def _whole_row_body(weights, masking, config):
    del config
    segments = whole_row_segments(weights, masking)
    is_exact = weights.dtype.itemsize == 4

    def body(row, weights_ref, dy_ref, dx_ref):
        columns = columns_from(segments, 0, masking)

        p = load_kept(weights_ref.at[row], segments, masking, row)
        dy = load_kept(dy_ref.at[row], segments, masking, row)
        p, dy = masking.limit(to_float32(p), columns, row_index(row, segments), 0.0), to_float32(dy)
        total = row_sum(p, segments)

        def mean_of(values):
            return quotient(row_sum(map_row(jnp.multiply, p, values), segments), total)

        mean = mean_of(dy)
        centered = map_row(lambda d: d - mean, dy)
        if is_exact:
            left = remainder(mean_of(centered), mean)
            centered = map_row(lambda d: d - left, centered)
        store_row(dx_ref.at[row], map_row(lambda p, c: _gradient(p, c, masking.scale), p, centered), segments)

    return body


def _chunked_body(weights, masking, config):
    chunks = RowChunks.make(weights.shape[1], weights.dtype.itemsize, config.chunk)

    def body(row, weights_ref, dy_ref, dx_ref):
        needed = masking.chunks_needed(row, chunks)

        def load(columns, segments):
            return tuple(to_float32(load_row(ref.at[row, columns], segments)) for ref in (weights_ref, dy_ref))

        def terms(columns, segments):
            p, dy = load(columns, segments)
            return map_row(jnp.multiply, p, dy), p

        mean = quotient(*chunks.sums(terms, 2, needed=needed))

        def write(columns, segments):
            dx = map_row(lambda p, d: _gradient(p, d - mean, masking.scale), *load(columns, segments))
            store_row(dx_ref.at[row, columns], dx, segments)

        chunks.each(write, needed=needed)
        if masking.queries is not None:
            chunks.fill_zeros(dx_ref.at[row], needed)

    return body


def fits_shared_memory(features: int, itemsize: int, config: RowConfig) -> bool:
    """Whether a block of `config.shared_warpgroups` warpgroups can hold such rows."""
    if not config.shared_warpgroups or 2 * features * itemsize > SHARED_BYTES:
        return False
    return split_warp_row(features, itemsize, warpgroups=config.shared_warpgroups) is not None


def _shared_row_gradient(weights: jax.Array, dy: jax.Array, *, masking: Masking, config: RowConfig) -> jax.Array:
    """Computes dx without a causal limit, for rows that `fits_shared_memory` accepts."""
    rows, features = weights.shape
    warpgroups = config.shared_warpgroups
    segments = split_warp_row(features, weights.dtype.itemsize, warpgroups=warpgroups)
    assert segments is not None
    line = features // (warpgroups * WARPS)
    parts = (warpgroups, WARPS, line)
    access = 32 * segments[0].vector
    columns = config.shared_columns if not line % config.shared_columns else access
    piece = (WarpSegment(offset=0, size=columns, vector=segments[0].vector),)
    turns = 2 if weights.dtype.itemsize == 4 else 1

    def softmax_gradient(weights_ref, dy_ref, dx_ref, held, sums, arrived, summed):
        row, group = lax.axis_index("row"), lax.axis_index("warpgroup")

        @pl.when(group == 0)
        def _():
            for i, ref in enumerate((weights_ref, dy_ref)):
                plgpu.copy_gmem_to_smem(ref.at[row], held.at[i], arrived, oob_mode=plgpu.OOBFillMode.PROMISE_IN_BOUNDS)

        plgpu.barrier_wait(arrived)

        def load(i):
            place = pl.ds(i * columns, columns)
            return tuple(to_float32(load_row(held.at[s, group, :, place], piece)) for s in range(2))

        def over_row(turn, terms):
            """Sums the terms that `terms` computes from weights and dy; each turn has its own slots and barrier."""

            def accumulate(i, state):
                added = terms(*load(i))
                return tuple(map_row(jnp.add, total, values) for total, values in zip(state, added, strict=True))

            start = (zeros_row(piece),) * (2 if turn == 0 else 1)
            state = lax.fori_loop(0, line // columns, accumulate, start)
            for s, values in enumerate(state):
                sums[turn, s, group] = line_sums(values, piece)
            plgpu.commit_smem()
            plgpu.barrier_arrive(summed.at[turn])
            plgpu.barrier_wait(summed.at[turn])
            lines = [(g, w) for g in range(warpgroups) for w in range(WARPS)]
            return [pairwise([sums[(turn, s, *at)] for at in lines]) for s in range(len(state))]

        def center(dy, means):
            return functools.reduce(lambda dy, mean: map_row(lambda d: d - mean, dy), means, dy)

        product, total = over_row(0, lambda p, dy: (map_row(jnp.multiply, p, dy), p))
        means = [quotient(product, total)]
        if turns == 2:
            (product,) = over_row(1, lambda p, dy: (map_row(jnp.multiply, p, center(dy, means)),))
            means.append(remainder(quotient(product, total), means[0]))
        scale = jnp.float32(1.0 if masking.scale is None else masking.scale)

        @pl.loop(0, line // columns)
        def _(i):
            p, dy = load(i)
            gradient = map_row(lambda p, d: p * (d * scale), p, center(dy, means))
            store_row(dx_ref.at[row, group, :, pl.ds(i * columns, columns)], gradient, piece)

    dx = settings.kernel(
        softmax_gradient,
        out_type=jax.ShapeDtypeStruct((rows, *parts), weights.dtype),
        grid=(rows,),
        grid_names=("row",),
        num_threads=warpgroups,
        thread_name="warpgroup",
        scratch_types=(
            plgpu.SMEM((2, *parts), weights.dtype),
            plgpu.SMEM((turns, 2, warpgroups, WARPS), jnp.float32),
            plgpu.Barrier(num_arrivals=2),
            plgpu.Barrier(num_arrivals=warpgroups, num_barriers=turns),
        ),
        compiler_params=compiler_params(weights.dtype, reduction_scratch_bytes=512),
    )(weights.reshape(rows, *parts), dy.reshape(rows, *parts))
    return dx.reshape(weights.shape)
