"""The backward kernel in which several warpgroups of a block share each row.

Rows arrive in a ring of shared memory by TMA. Each row has one barrier between the warpgroups, which serves twice: it
carries the row's sums, and whoever passes it knows that all have finished with the row before, so that its place in the
ring can be filled again. Overlapped, a row's first pass runs between the arrival at the barrier of the row before and
the wait there, so that no warp stands still at it.

To take a row's mean off with one barrier, each warp centres its own line of the row first. The lines are then joined as
Chan, Golub and LeVeque join samples: nothing is subtracted that is large against the result, as it would be in
E[x**2] - E[x]**2. Source: "Updating formulae and a pairwise algorithm for computing sample variances", 1979.
"""

from __future__ import annotations

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.ops._norms.norm import RowScalars, weigh
from pallas_kernels.ops._norms.operands import BackwardOperands
from pallas_kernels.primitives.random import mixed_words
from pallas_kernels.primitives.rows import (
    WARPS,
    line_sums,
    load_row,
    map_row,
    over_lines,
    split_warp_row,
    store_row,
    to_float32,
    zeros_row,
)

# Every thread reads back only what it stored itself, or what a barrier of ours lies between; no sum crosses warps.
COMPILER_PARAMS = plgpu.CompilerParams(unsafe_no_auto_barriers=True, approx_math=True, reduction_scratch_bytes=512)


def shared_row_kernel(operands: BackwardOperands) -> dict[str, jax.Array]:
    """Returns the gradients' rows and the blocks' column sums, by name."""
    rows, features, blocks = operands.rows, operands.features, operands.blocks
    norm, config = operands.norm, operands.config
    warpgroups, steps, keeps_row = config.warpgroups, config.steps, config.second_read == "float32"
    segments = split_warp_row(features, operands.dtype.itemsize, warpgroups=warpgroups)
    if segments is None:
        raise ValueError(f"{features} features do not divide over {warpgroups} warpgroups; use fewer.")
    line = features // (warpgroups * WARPS)
    parts = (warpgroups, WARPS, line)
    held_gain = {}
    if operands.scale is not None and config.gain == "shared":
        held_gain["gain"] = plgpu.SMEM(parts, operands.scale.dtype)
    inputs, out_types = operands.inputs, operands.out_types(parts)
    streams = len(operands.streams)
    has_remainders = norm.mean_passes(operands.dtype) == 2
    turns = 4 if config.second_read == "overlapped" else 2  # no warpgroup is ever so many rows ahead
    kinds = 2 + 2 * norm.centered + has_remainders
    scratch = {
        "ring": plgpu.SMEM((steps, streams, *parts), operands.dtype),
        **held_gain,
        "line_sums": plgpu.SMEM((turns, kinds, warpgroups, WARPS), jnp.float32),
        "arrived": plgpu.Barrier(num_arrivals=streams, num_barriers=steps),
        "summed": plgpu.Barrier(num_arrivals=warpgroups),
    }
    names = (*inputs, *out_types, *scratch)

    def sums_of_lines(value, weighted):
        """Each line's sums, and those of a row that loses its mean: of the line without its own mean."""
        if not norm.centered:
            return line_sums(map_row(jnp.square, value)), line_sums(map_row(jnp.multiply, value, weighted))
        mean = line_sums(value) * (1.0 / line)
        value = map_row(jnp.subtract, value, over_lines(mean, segments))
        return (
            line_sums(map_row(jnp.square, value)),
            line_sums(map_row(jnp.multiply, value, weighted)),
            mean,
            line_sums(weighted),
            *((line_sums(value),) if has_remainders else ()),
        )

    def join_lines(read):
        """The row's scalars; `read(kind)` are the values of all lines."""
        squares, products = sum(read(0)), sum(read(1))
        if not norm.centered:
            return RowScalars.of_sums(features, norm.epsilon, squares=squares, products=products)
        line_means, weights = read(2), read(3)
        means = [sum(line_means) * (1.0 / (warpgroups * WARPS))]
        offsets = [m - means[0] for m in line_means]
        if has_remainders:
            remainders = read(4)
            means.append(sum(offsets) * (1.0 / (warpgroups * WARPS)) + sum(remainders) * (1.0 / features))
            offsets = [o - means[1] for o in offsets]
            squares += 2 * sum(o * r for o, r in zip(offsets, remainders, strict=True))
        squares += line * sum(o * o for o in offsets)
        products += sum(o * w for o, w in zip(offsets, weights, strict=True))
        return RowScalars.of_sums(
            features, norm.epsilon, squares=squares, products=products, means=means, weighted=sum(weights)
        )

    def kernel(*references):
        refs = dict(zip(names, references, strict=True))
        ring, arrived, summed = refs["ring"], refs["arrived"], refs["summed"]
        block, group = lax.axis_index("block"), lax.axis_index("warpgroup")
        trips = (rows - block + blocks - 1) // blocks
        words = mixed_words(refs["words"]) if "words" in refs else None

        def fetch(i):
            slot = lax.rem(i, steps)
            for s, name in enumerate(("total", "dy", "dtotal_in")[:streams]):
                plgpu.copy_gmem_to_smem(
                    refs[name].at[i * blocks + block],
                    ring.at[slot, s],
                    arrived.at[slot],
                    oob_mode=plgpu.OOBFillMode.PROMISE_IN_BOUNDS,
                )

        @pl.when(group == 0)
        def _():
            for i in range(steps):
                pl.when(i < trips)(lambda i=i: fetch(jnp.int32(i)))

        gain = load_row(refs["scale"].at[group], segments) if "scale" in refs else None
        if gain is not None and held_gain:  # each thread reads back what it stores here itself
            store_row(refs["gain"].at[group], gain, segments)

        def load(i, first=0):
            """Value, dy, weighted dy, and the sum's cotangent as it was stored."""
            slot = lax.rem(i, steps) + first
            value, dy = (to_float32(load_row(ring.at[slot, s, group], segments)) for s in range(2))
            weighted = weigh(dy, load_row(refs["gain"].at[group], segments) if held_gain else gain)
            return value, dy, weighted, load_row(ring.at[slot, 2, group], segments) if streams == 3 else None

        def publish(i):
            """Reads a row as soon as it is there and writes its sums where the other warpgroups find them."""
            plgpu.barrier_wait(arrived.at[lax.rem(i, steps)])
            row = load(i)
            for kind, values in enumerate(sums_of_lines(row[0], row[2])):
                refs["line_sums"][lax.rem(i, turns), kind, group] = values
            return row

        def arrive():
            plgpu.commit_smem()
            plgpu.barrier_arrive(summed)

        def refill(free):
            """Row `free` is not read again by anyone: its place is for the one `steps` later."""

            @pl.when((group == 0) & (free >= 0) & (free + steps < trips))
            def _():
                fetch(free + steps)

        def finish(i, row, sums):
            lines = [(g, w) for g in range(warpgroups) for w in range(WARPS)]
            turn = lax.rem(i, turns)
            scalars = join_lines(lambda kind: [refs["line_sums"][turn, kind, g, w] for g, w in lines])
            value, dy, weighted, cotangent = row
            centered = scalars.center(value)
            gradient = scalars.gradient(centered, weighted)
            if cotangent is not None:
                gradient = map_row(jnp.add, gradient, to_float32(cotangent))
            index = i * blocks + block
            store_row(refs["dtotal"].at[index, group], gradient, segments)
            if words is not None:
                places = tuple(s.row_columns(jnp.uint32, group=group, line=line) for s in segments)
                dropped = norm.drop(gradient, words, index, places, features)
                store_row(refs["dx"].at[index, group], dropped, segments)
            return scalars.column_sums(centered, dy, sums)

        def step(i, sums):
            row = publish(i)
            arrive()
            plgpu.barrier_wait(summed)
            refill(i if keeps_row else i - 1)
            # A zero the compiler cannot see through; else it keeps the first read's values in registers.
            row = row if keeps_row else load(i, lax.optimization_barrier(jnp.int32(0)))
            return finish(i, row, sums)

        def overlapped_step(i, sums):
            is_last = i + 1 == trips
            pl.when(~is_last)(lambda: (publish(i + 1), None)[1])
            plgpu.barrier_wait(summed)
            refill(i - 2)  # who passes the barrier of row i has finished with row i - 2
            pl.when(~is_last)(arrive)
            return finish(i, load(i), sums)

        if config.second_read == "overlapped":
            publish(jnp.int32(0))
            arrive()
            step = overlapped_step
        sums = lax.fori_loop(0, trips, step, {name: zeros_row(segments) for name in operands.sums})
        for name, values in sums.items():
            store_row(operands.sums_at(refs, block, name).at[group], values, segments)

    def seen_in_parts(name, array):
        if name == "words":
            return array
        return array.reshape(parts) if name == "scale" else array.reshape(rows, *parts)

    outputs = plgpu.kernel(
        kernel,
        out_type=tuple(out_types.values()),
        grid=(blocks,),
        grid_names=("block",),
        num_threads=warpgroups,
        thread_name="warpgroup",
        scratch_types=tuple(scratch.values()),
        compiler_params=COMPILER_PARAMS,
        kernel_name=operands.kernel_name,
    )(*(seen_in_parts(name, array) for name, array in inputs.items()))
    return {
        name: output.reshape(*output.shape[: -len(parts)], features)
        for name, output in zip(out_types, outputs, strict=True)
    }
