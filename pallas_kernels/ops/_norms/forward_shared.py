"""The forward kernel in which each warp has a line of a row, for one or several warpgroups a row.

The row is in registers, half of them or a quarter a thread with several warpgroups, or in shared memory, where TMA
brings it. Warps exchange their lines' sums through shared memory, with one barrier for each kind of sum.
"""

from __future__ import annotations

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.ops._norms.config import ForwardConfig
from pallas_kernels.ops._norms.norm import SHARED_ROW_PARAMS, Norm, lanes_of_lines
from pallas_kernels.primitives import settings
from pallas_kernels.primitives.random import mixed_words
from pallas_kernels.primitives.rows import (
    WARPS,
    cut_row,
    line_sums,
    load_row,
    map_row,
    split_warp_row,
    store_row,
    to_float32,
)


def shared_row_forward(
    norm: Norm, operands: dict[str, jax.Array], outputs: tuple[str, ...], config: ForwardConfig, *, kernel_name: str
) -> tuple[jax.Array, ...]:
    """The arrays called `outputs` ("y" and, with a residual, "total"); `operands` as `norm_forward` names them."""
    x, warpgroups = operands["x"], config.warpgroups
    rows, features = x.shape
    segments = split_warp_row(features, x.dtype.itemsize, warpgroups=warpgroups)
    if segments is None:
        raise ValueError(f"{features} features do not divide over {warpgroups} warpgroups; use fewer.")
    segments = cut_row(segments, config.piece) if config.piece else segments
    line, lines = features // (warpgroups * WARPS), warpgroups * WARPS
    parts = (warpgroups, WARPS, line)
    # Values of 16 bits have deviations that their own distance from any of the row's values does not drown: with one of
    # them taken off, sums and sums of squares are exchanged together.
    is_shifted = norm.centered and x.dtype.itemsize < 4 and "residual" not in operands
    mean_passes = 0 if is_shifted else norm.mean_passes(x.dtype)
    streams = tuple(name for name in ("x", "residual") if name in operands)
    scratch = {
        "line_sums": plgpu.SMEM((mean_passes + 1 + is_shifted, lines), jnp.float32),
        "summed": plgpu.Barrier(num_arrivals=warpgroups, num_barriers=mean_passes + 1),
    }
    if config.holds == "shared":
        scratch["held"] = plgpu.SMEM((len(streams), *parts), x.dtype)
        scratch["arrived"] = plgpu.Barrier(num_arrivals=len(streams))
    names = (*operands, *outputs, *scratch)

    def kernel(*references):
        refs = dict(zip(names, references, strict=True))
        row, group = lax.axis_index("row"), lax.axis_index("warpgroup")

        def fetch():
            @pl.when(group == 0)
            def _():
                for stream, name in enumerate(streams):
                    plgpu.copy_gmem_to_smem(
                        refs[name].at[row],
                        refs["held"].at[stream],
                        refs["arrived"],
                        oob_mode=plgpu.OOBFillMode.PROMISE_IN_BOUNDS,
                    )

            plgpu.barrier_wait(refs["arrived"])

        def sums_over_row(turn, *kinds):
            """The sums of some rows of values. Each turn has a barrier and places of its own."""
            places = range(turn, turn + len(kinds))
            for place, values in zip(places, kinds, strict=True):
                refs["line_sums"][place, pl.ds(group * WARPS, WARPS)] = line_sums(values)
            plgpu.commit_smem()
            plgpu.barrier_arrive(refs["summed"].at[turn])
            plgpu.barrier_wait(refs["summed"].at[turn])
            layout = lanes_of_lines(lines)
            sums = [plgpu.load(refs["line_sums"].at[place], layout=layout, optimized=False) for place in places]
            return [jnp.sum(values) for values in sums]

        def load(stream, segments):
            if "held" in refs:
                return load_row(refs["held"].at[stream, group], segments)
            return load_row(refs[streams[stream]].at[row, group], segments)

        def add_residual(segments):
            """The sum with the residual, as it is stored."""
            value = to_float32(load(0, segments))
            if "words" in refs:
                places = tuple(s.row_columns(jnp.uint32, group=group, line=line) for s in segments)
                value = norm.drop(value, mixed_words(refs["words"]), row, places, features)
            total = map_row(lambda a, b: (a + b).astype(x.dtype), value, to_float32(load(1, segments)))
            store_row(refs["total"].at[row, group], total, segments)
            return total

        stored = None
        if "held" in refs:
            fetch()
            for segment in segments if "residual" in refs else ():
                store_row(refs["held"].at[0, group], add_residual((segment,)), (segment,))
        else:
            stored = add_residual(segments) if "residual" in refs else load(0, segments)
        means = []

        def read():
            """The row, or a way to it that the compiler takes for another one than before."""
            # Else it keeps the first read's values in registers.
            return stored if stored is not None else lax.optimization_barrier(jnp.int32(0))

        def centered(source, segments):
            value = to_float32(source if stored is not None else load(source, segments))
            for mean in means:
                value = map_row(lambda v, mean=mean: v - mean, value)
            return value

        for turn in range(mean_passes):
            (total,) = sums_over_row(turn, centered(read(), segments))
            means.append(total * (1.0 / features))
        if is_shifted:
            shift = (refs["held"][0, 0, 0, 0] if "held" in refs else refs["x"][row, 0, 0, 0]).astype(jnp.float32)
            value = map_row(lambda v: v - shift, centered(read(), segments))
            total, squares = sums_over_row(0, value, map_row(jnp.square, value))
            mean = total * (1.0 / features)
            mean_square = jnp.maximum(squares * (1.0 / features) - mean * mean, jnp.float32(0))
            means.append(shift + mean)
        else:
            (squares,) = sums_over_row(mean_passes, map_row(jnp.square, centered(read(), segments)))
            mean_square = squares * (1.0 / features)
        inverse = lax.rsqrt(mean_square + norm.epsilon)
        source = read()
        for i, segment in enumerate(segments):
            (part,) = centered(source if stored is None else stored[i : i + 1], (segment,))
            part *= inverse
            if "scale" in refs:
                part *= load_row(refs["scale"].at[group], (segment,))[0].astype(jnp.float32)
            if "bias" in refs:
                part += load_row(refs["bias"].at[group], (segment,))[0].astype(jnp.float32)
            store_row(refs["y"].at[row, group], (part,), (segment,))

    def seen_in_parts(name, array):
        return array if name == "words" else array.reshape(parts if array.ndim == 1 else (rows, *parts))

    results = settings.kernel(
        kernel,
        out_type=(jax.ShapeDtypeStruct((rows, *parts), x.dtype),) * len(outputs),
        grid=(rows,),
        grid_names=("row",),
        num_threads=warpgroups,
        thread_name="warpgroup",
        scratch_types=tuple(scratch.values()),
        compiler_params=SHARED_ROW_PARAMS,
        kernel_name=kernel_name,
    )(*(seen_in_parts(name, array) for name, array in operands.items()))
    return tuple(result.reshape(rows, features) for result in results)
