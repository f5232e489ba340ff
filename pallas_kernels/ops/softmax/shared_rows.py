"""Softmax backward of rows that are too long for one warpgroup's registers: a block holds one in shared memory.

TMA brings the row's weights and dy; the warpgroups go over them twice, each warp over its own lines. Several blocks
share a multiprocessor, so that one reads while another writes.
"""

from __future__ import annotations

import functools

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.ops.softmax.config import SHARED_BYTES, RowConfig
from pallas_kernels.ops.softmax.masking import Masking
from pallas_kernels.ops.softmax.mosaic_gpu import compiler_params
from pallas_kernels.ops.softmax.rounding import quotient, remainder
from pallas_kernels.primitives import settings
from pallas_kernels.primitives.rows import (
    WARPS,
    WarpSegment,
    line_sums,
    load_row,
    map_row,
    split_warp_row,
    store_row,
    to_float32,
    zeros_row,
)


def fits_shared_memory(features: int, itemsize: int, config: RowConfig) -> bool:
    """Whether a block of `config.shared_warpgroups` warpgroups can hold such rows."""
    if not config.shared_warpgroups or 2 * features * itemsize > SHARED_BYTES:
        return False
    return split_warp_row(features, itemsize, warpgroups=config.shared_warpgroups) is not None


def shared_row_gradient(weights: jax.Array, dy: jax.Array, *, masking: Masking, config: RowConfig) -> jax.Array:
    """dx of weights and dy, (rows, features), without a causal limit; `fits_shared_memory` must hold."""
    rows, features = weights.shape
    warpgroups = config.shared_warpgroups
    segments = split_warp_row(features, weights.dtype.itemsize, warpgroups=warpgroups)
    if segments is None or masking.queries is not None:
        raise ValueError(f"{features} features, {masking}: not for {warpgroups} warpgroups; use one.")
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
            """The sums over the row of what `terms` makes of weights and dy; each turn has places and a barrier."""

            def accumulate(i, state):
                added = terms(*load(i))
                return tuple(map_row(jnp.add, total, values) for total, values in zip(state, added, strict=True))

            start = (zeros_row(piece),) * (2 if turn == 0 else 1)
            state = lax.fori_loop(0, line // columns, accumulate, start)
            for s, values in enumerate(state):
                sums[turn, s, group] = line_sums(values)
            plgpu.commit_smem()
            plgpu.barrier_arrive(summed.at[turn])
            plgpu.barrier_wait(summed.at[turn])
            lines = [(g, w) for g in range(warpgroups) for w in range(WARPS)]
            return [_pairwise([sums[(turn, s, *at)] for at in lines]) for s in range(len(state))]

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


def _pairwise(values: list[jax.Array]) -> jax.Array:
    while len(values) > 1:
        values = [sum(values[i + 1 : i + 2], values[i]) for i in range(0, len(values), 2)]
    return values[0]
