"""The weights of a step: their layout in shared memory, their loads, and their products.

16-bit weights are (K, N); the tensor cores read them transposed from shared memory. Integer weights are (N, K), which
needs no transpose: a warpgroup reads them into registers, widens them to 16 bits, and multiplies from registers. Scales
per output are multiplied in the epilogue. Scales for groups along K are loaded with the step and multiply the sum of
each group.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.primitives.few_rows.problem import Problem
from pallas_kernels.primitives.integers import is_packed_dtype, load_integers, unit, widened
from pallas_kernels.primitives.row_tiles import shared
from pallas_kernels.primitives.transposed import GROUP

_PART = 64
"""The depth of a part of packed integers, which is widened while the tensor cores multiply the part before."""


def ring_types(problem: Problem) -> dict[str, Any]:
    """Returns the scratch types of all warpgroups' stages: a tile of each operand, and a barrier for their arrival.

    An x that is normalised has a separate barrier: it comes from the L2 cache, before the weights.
    """
    config = problem.config
    tile = (config.columns, config.depth) if problem.is_quantized else (config.depth, config.columns)
    stages = config.warpgroups * config.stages
    types: dict[str, Any] = {
        "w": [shared((stages, *tile), problem.weight_dtype) for _ in range(problem.products)],
        "x": problem.x_form.scratch(stages, problem.tokens),
    }
    copies = problem.copies
    if problem.is_normed:
        types["x_full"] = plgpu.Barrier(num_arrivals=problem.x_form.copies, num_barriers=stages)
        copies -= problem.x_form.copies
    types["full"] = plgpu.Barrier(num_arrivals=copies, num_barriers=stages)
    if problem.is_grouped:
        shape = (stages, problem.groups_a_step, config.columns)
        types["scales"] = [plgpu.SMEM(shape, jnp.float32) for _ in range(problem.products)]
    return types


def load_weights(
    problem: Problem, refs: Mapping[str, Sequence[Any]], ring: Mapping[str, Any], stage, step, column
) -> None:
    """Starts the loads of a step's weights, for the columns from `column` on. step: counted over the whole depth."""
    config = problem.config
    depth, columns = pl.ds(step * config.depth, config.depth), pl.ds(column, config.columns)
    place = (columns, depth) if problem.is_quantized else (depth, columns)
    full = ring["full"].at[stage]
    if len(problem.widths) > 1:
        for ref, (is_own, first) in zip(refs["w"], problem.owners(column), strict=True):
            place = ref.at[depth, pl.ds(column - first, config.columns)]
            pl.when(is_own)(partial(plgpu.copy_gmem_to_smem, place, ring["w"][0].at[stage], full))
        return
    for ref, buffer in zip(refs["w"], ring["w"], strict=True):
        plgpu.copy_gmem_to_smem(ref.at[place], buffer.at[stage], full)
    if problem.is_grouped:
        groups = pl.ds(step * problem.groups_a_step, problem.groups_a_step)
        for ref, buffer in zip(refs["scales"], ring["scales"], strict=True):
            plgpu.copy_gmem_to_smem(ref.at[groups, columns], buffer.at[stage], full)


def multiply_whole(problem: Problem, ring: Mapping[str, Any], stage, accumulators: Sequence[Any]) -> None:
    """Adds a step's products to the accumulators of 64 columns each: those of the first weights, then of the next."""
    accumulators, x = list(accumulators), ring["x"].at(stage)
    part = _PART if is_packed_dtype(problem.weight_dtype) else None
    for buffer in ring["w"]:
        for group in range(problem.groups):
            columns, accumulator = pl.ds(group * GROUP, GROUP), accumulators.pop(0)
            if not problem.is_quantized:
                for start, rows in x.panels():
                    own = buffer.at[stage, pl.ds(start, rows.shape[1]), columns]
                    plgpu.wgmma(accumulator, own.transpose((1, 0)), rows.transpose((1, 0)))
                continue
            integers = load_integers(buffer.at[stage, columns])
            for start, rows in x.panels(part):
                left = widened(integers[:, start : start + rows.shape[1]], problem.dtype)
                plgpu.wgmma(accumulator, left, rows.transpose((1, 0)))


def multiply_groups(problem: Problem, ring: Mapping[str, Any], stage, sums: Sequence[jax.Array]) -> list[jax.Array]:
    """Returns the sums plus a step's products times their scales, in the order of `multiply_whole`."""
    sums = list(sums)
    panels = list(ring["x"].at(stage).panels(problem.config.depth // problem.groups_a_step))
    count = len(panels) // problem.groups_a_step
    shape = (GROUP, problem.tokens)
    for i in range(len(sums)):
        product, group = divmod(i, problem.groups)
        columns = pl.ds(group * GROUP, GROUP)
        integers = load_integers(ring["w"][product].at[stage, columns])
        for part in range(problem.groups_a_step):
            own = panels[part * count : (part + 1) * count]
            lefts = [widened(integers[:, start : start + rows.shape[1]], problem.dtype) for start, rows in own]

            def one(accumulator, lefts=lefts, own=own):
                for left, (_, rows) in zip(lefts, own, strict=True):
                    plgpu.wgmma(accumulator, left, rows.transpose((1, 0)))
                return accumulator[...]

            value = pl.run_scoped(one, plgpu.WGMMAAccumulatorRef(shape, jnp.float32))
            ref = ring["scales"][product].at[stage, part, columns]
            scale = plgpu.load(ref, layout=plgpu.Layout.WGMMA.reduce(1), optimized=False)
            scale = scale / unit(problem.weight_dtype, problem.dtype)
            sums[i] = sums[i] + value * lax.broadcast_in_dim(scale, shape, (0,))
    return sums
