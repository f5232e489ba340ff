"""The body of the backward kernel in which several warpgroups of a block share each row.

For rows whose column sums do not fit in one warpgroup's registers. Rows arrive in a ring of shared memory by TMA. Each
row has one barrier between the warpgroups, which serves twice: it carries the row's sums, and whoever passes it knows
that all have finished with the row before, so that its place in the ring can be filled again.
"""

from __future__ import annotations

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.ops.rms_norm.config import BackwardConfig
from pallas_kernels.primitives.rows import (
    WARPS,
    line_sums,
    load_row,
    map_row,
    split_warp_row,
    store_row,
    to_float32,
    zeros_row,
)

# Every thread reads back only what it stored itself, or what a barrier of ours lies between; no sum crosses warps.
COMPILER_PARAMS = plgpu.CompilerParams(unsafe_no_auto_barriers=True, approx_math=True, reduction_scratch_bytes=512)


def shared_row_kernel(
    streams: tuple[jax.Array, ...], scale: jax.Array, blocks: int, *, epsilon: float, config: BackwardConfig
) -> tuple[jax.Array, jax.Array]:
    """Returns dx and each block's column sums, (blocks, features) float32.

    streams: the normalised rows, dy, and the sum's cotangent where there is one; each (rows, features).
    """
    rows, features = streams[0].shape
    dtype, warpgroups, steps = streams[0].dtype, config.warpgroups, config.steps
    segments = split_warp_row(features, dtype.itemsize, warpgroups=warpgroups)
    if segments is None:
        raise ValueError(f"{features} features do not divide over {warpgroups} warpgroups; use fewer.")
    holds_gain = config.gain == "shared"
    parts = (warpgroups, WARPS, features // (warpgroups * WARPS))

    def rms_norm_gradient_shared(scale_ref, *refs):
        stream_refs, (dx_ref, partial_ref) = refs[: len(streams)], refs[len(streams) : len(streams) + 2]
        ring, *gain_refs, sums, arrived, summed = refs[len(streams) + 2 :]
        block, group = lax.axis_index("block"), lax.axis_index("warpgroup")
        trips = (rows - block + blocks - 1) // blocks

        def fetch(i):
            slot = lax.rem(i, steps)
            for s, ref in enumerate(stream_refs):
                plgpu.copy_gmem_to_smem(
                    ref.at[i * blocks + block],
                    ring.at[slot, s],
                    arrived.at[slot],
                    oob_mode=plgpu.OOBFillMode.PROMISE_IN_BOUNDS,
                )

        @pl.when(group == 0)
        def _():
            for i in range(steps):
                pl.when(i < trips)(lambda i=i: fetch(jnp.int32(i)))

        gain = load_row(scale_ref.at[group], segments)
        if holds_gain:  # each thread reads back what it stores here itself
            store_row(gain_refs[0].at[group], gain, segments)

        def load_gain():
            return load_row(gain_refs[0].at[group], segments) if holds_gain else gain

        def load(i, first):
            slot = lax.rem(i, steps) + first
            value, dy = (to_float32(load_row(ring.at[slot, s, group], segments)) for s in range(2))
            return slot, value, dy, map_row(jnp.multiply, to_float32(load_gain()), dy)

        def step(i, partial):
            plgpu.barrier_wait(arrived.at[lax.rem(i, steps)])
            value, dy, weighted = load(i, 0)[1:]
            turn = lax.rem(i, 2)  # no warpgroup is ever two rows ahead
            sums[turn, 0, group] = line_sums(map_row(jnp.square, value))
            sums[turn, 1, group] = line_sums(map_row(jnp.multiply, value, weighted))
            plgpu.commit_smem()
            plgpu.barrier_arrive(summed)
            plgpu.barrier_wait(summed)

            @pl.when((group == 0) & (i > 0) & (i - 1 + steps < trips))
            def _():
                fetch(i - 1 + steps)

            squares, products = jnp.float32(0), jnp.float32(0)
            for g in range(warpgroups):
                for w in range(WARPS):
                    squares, products = squares + sums[turn, 0, g, w], products + sums[turn, 1, g, w]
            inverse = lax.rsqrt(squares * (1.0 / features) + epsilon)
            slope = products * (inverse * inverse * inverse * (1.0 / features))
            # A zero the compiler cannot see through; else it keeps the first read's values in registers.
            slot, value, dy, weighted = load(i, lax.optimization_barrier(jnp.int32(0)))
            dx = map_row(lambda v, w: w * inverse - v * slope, value, weighted)
            if len(streams) == 3:
                dx = map_row(jnp.add, dx, to_float32(load_row(ring.at[slot, 2, group], segments)))
            store_row(dx_ref.at[i * blocks + block, group], dx, segments)
            return map_row(lambda p, d, v: p + d * (v * inverse), partial, dy, value)

        partial = lax.fori_loop(0, trips, step, zeros_row(segments))
        store_row(partial_ref.at[block, group], partial, segments)

    dx, partial = plgpu.kernel(
        rms_norm_gradient_shared,
        out_type=(
            jax.ShapeDtypeStruct((rows, *parts), dtype),
            jax.ShapeDtypeStruct((blocks, *parts), jnp.float32),
        ),
        grid=(blocks,),
        grid_names=("block",),
        num_threads=warpgroups,
        thread_name="warpgroup",
        scratch_types=(
            plgpu.SMEM((steps, len(streams), *parts), dtype),
            *((plgpu.SMEM(parts, scale.dtype),) if holds_gain else ()),
            plgpu.SMEM((2, 2, warpgroups, WARPS), jnp.float32),
            plgpu.Barrier(num_arrivals=len(streams), num_barriers=steps),
            plgpu.Barrier(num_arrivals=warpgroups),
        ),
        compiler_params=COMPILER_PARAMS,
    )(scale.reshape(parts), *(stream.reshape(rows, *parts) for stream in streams))
    return dx.reshape(rows, features), partial.reshape(blocks, features)
