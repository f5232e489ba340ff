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

from pallas_kernels.ops._norms.norm import SHARED_ROW_PARAMS, RowScalars, lanes_of_lines, weigh
from pallas_kernels.ops._norms.operands import BackwardOperands
from pallas_kernels.primitives import settings
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
    # Values of 16 bits have deviations that their own distance from any of the row's values does not drown.
    is_shifted = norm.centered and operands.dtype.itemsize < 4
    kinds = 2 + 2 * norm.centered + has_remainders
    lines = warpgroups * WARPS
    scratch = {
        "ring": plgpu.SMEM((steps, streams, *parts), operands.dtype),
        **held_gain,
        "line_sums": plgpu.SMEM((turns, kinds, lines), jnp.float32),
        "arrived": plgpu.Barrier(num_arrivals=streams, num_barriers=steps),
        "summed": plgpu.Barrier(num_arrivals=warpgroups),
    }
    names = (*inputs, *out_types, *scratch)

    def sums_of_lines(value, weighted):
        """Each line's sums, and those of a row that loses its mean exactly: of the line without its own mean."""
        if not norm.centered:
            return line_sums(map_row(jnp.square, value)), line_sums(map_row(jnp.multiply, value, weighted))
        if is_shifted:
            mean = line_sums(value)
        else:
            mean = line_sums(value) * (1.0 / line)
            value = map_row(jnp.subtract, value, over_lines(mean, segments))
        return (
            line_sums(map_row(jnp.square, value)),
            line_sums(map_row(jnp.multiply, value, weighted)),
            mean,
            line_sums(weighted),
            *((line_sums(value),) if has_remainders else ()),
        )

    def shifted_scalars(sum_of):
        """The scalars of a row from which one of its own values was taken off."""
        mean, weight = sum_of(2) * (1.0 / features), sum_of(3)
        squares = jnp.maximum(sum_of(0) - features * mean * mean, jnp.float32(0))
        return RowScalars.of_sums(
            features,
            norm.epsilon,
            squares=squares,
            products=sum_of(1) - mean * weight,
            means=(mean,),
            weighted=weight,
            is_folded=True,
        )

    def join_lines(read):
        """The row's scalars; `read(kind)` are the values of all lines."""
        squares, products, line_means, weights = sum(read(0)), sum(read(1)), read(2), read(3)
        means = [sum(line_means) * (1.0 / lines)]
        offsets = [m - means[0] for m in line_means]
        if has_remainders:
            remainders = read(4)
            means.append(sum(offsets) * (1.0 / lines) + sum(remainders) * (1.0 / features))
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
            """Value (less the row's first one if shifted), dy, weighted dy, and the sum's cotangent as it is stored."""
            slot = lax.rem(i, steps) + first
            value, dy = (to_float32(load_row(ring.at[slot, s, group], segments)) for s in range(2))
            if is_shifted:
                shift = ring[slot, 0, 0, 0, 0].astype(jnp.float32)
                value = map_row(lambda v: v - shift, value)
            weighted = weigh(dy, load_row(refs["gain"].at[group], segments) if held_gain else gain)
            return value, dy, weighted, load_row(ring.at[slot, 2, group], segments) if streams == 3 else None

        def scalars_of(i):
            """The row's scalars, from the sums of all lines."""
            sums = refs["line_sums"].at[lax.rem(i, turns)]
            if norm.centered and not is_shifted:
                return join_lines(lambda kind: [sums[kind, at] for at in range(lines)])

            def sum_of(kind):
                if not norm.centered and not keeps_row:  # two sums: less to add up than to wait for shuffles
                    return sum(sums[kind, at] for at in range(lines))
                return jnp.sum(plgpu.load(sums.at[kind], layout=lanes_of_lines(lines), optimized=False))

            if is_shifted:
                return shifted_scalars(sum_of)
            return RowScalars.of_sums(features, norm.epsilon, squares=sum_of(0), products=sum_of(1))

        def publish(i):
            """Reads a row as soon as it is there and writes its sums where the other warpgroups find them."""
            plgpu.barrier_wait(arrived.at[lax.rem(i, steps)])
            row = load(i)
            for kind, values in enumerate(sums_of_lines(row[0], row[2])):
                refs["line_sums"][lax.rem(i, turns), kind, pl.ds(group * WARPS, WARPS)] = values
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
            scalars = scalars_of(i)
            value, dy, weighted, cotangent = row
            gradient, sums = scalars.finish(value, dy, weighted, sums)
            if cotangent is not None:
                gradient = map_row(jnp.add, gradient, to_float32(cotangent))
            index = i * blocks + block
            store_row(refs["dtotal"].at[index, group], gradient, segments)
            if words is not None:
                places = tuple(s.row_columns(jnp.uint32, group=group, line=line) for s in segments)
                dropped = norm.drop(gradient, words, index, places, features)
                store_row(refs["dx"].at[index, group], dropped, segments)
            return sums

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

    outputs = settings.kernel(
        kernel,
        out_type=tuple(out_types.values()),
        grid=(blocks,),
        grid_names=("block",),
        num_threads=warpgroups,
        thread_name="warpgroup",
        scratch_types=tuple(scratch.values()),
        compiler_params=SHARED_ROW_PARAMS,
        kernel_name=operands.kernel_name,
    )(*(seen_in_parts(name, array) for name, array in inputs.items()))
    return {
        name: output.reshape(*output.shape[: -len(parts)], features)
        for name, output in zip(out_types, outputs, strict=True)
    }
