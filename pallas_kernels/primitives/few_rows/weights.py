"""The weights of a step: how they lie in memory, how they come, and how they are multiplied.

16-bit weights are (K, N), and the tensor cores read them, transposed, from shared memory. Integers are (N, K), so that
no transpose is needed: a warpgroup reads them into registers, makes 16-bit values of them, and multiplies from there.
A scale for each output waits for the end. Scales for groups along K come with the step, and multiply the sum of each
group.
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

from pallas_kernels.primitives.few_rows.config import GROUP
from pallas_kernels.primitives.few_rows.problem import Problem
from pallas_kernels.primitives.gemm.shared import shared
from pallas_kernels.primitives.integer_gemm.packing import load_packed, unit, widened_packed

_SWIZZLE = 128
_PART = 64
"""Of a step's depth, that is widened while the tensor cores have the part before."""


def ring_types(problem: Problem) -> dict[str, Any]:
    """Scratch types, of all warpgroups' stages: a tile of each operand, and a barrier passed when they have arrived; of
    an x that is to be normalised a barrier of its own, since it comes from the L2 cache, before the weights."""
    config = problem.config
    tile = (config.columns, config.depth) if problem.is_quantized else (config.depth, config.columns)
    stages = config.warpgroups * config.stages
    types: dict[str, Any] = {
        "w": [integer_tiles((stages, *tile), problem.weight_dtype) for _ in range(problem.products)],
        "x": shared((stages, problem.tokens, config.depth), problem.dtype, swizzle=_SWIZZLE),
        "full": plgpu.Barrier(num_arrivals=problem.copies - problem.is_normed, num_barriers=stages),
    }
    if problem.is_normed:
        types["x_full"] = plgpu.Barrier(num_barriers=stages)
    if problem.is_grouped:
        shape = (stages, problem.groups_a_step, config.columns)
        types["scales"] = [plgpu.SMEM(shape, jnp.float32) for _ in range(problem.products)]
    return types


def integer_tiles(shape: tuple[int, ...], dtype: jnp.dtype) -> Any:
    """Scratch type of tiles of any dtype, of four bits too."""
    bits = jnp.iinfo(dtype).bits if jnp.issubdtype(dtype, jnp.integer) else 8 * dtype.itemsize
    swizzle = plgpu.find_swizzle(shape[-1] * bits)
    transforms = (
        plgpu.TilingTransform((8, 8 * swizzle // bits)),  # pyright: ignore[reportAbstractUsage]
        plgpu.SwizzleTransform(swizzle),  # pyright: ignore[reportAbstractUsage]
    )
    return plgpu.SMEM(shape, dtype, transforms=transforms)


def load_weights(
    problem: Problem, refs: Mapping[str, Sequence[Any]], ring: Mapping[str, Any], stage, step, column
) -> None:
    """Sends for the tiles of step number `step` of the whole depth, of the columns from `column` on."""
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
    """Adds a step's products to the accumulators: of the first weights, 64 columns each, then of the next."""
    accumulators, x = list(accumulators), ring["x"].at[stage]
    for buffer in ring["w"]:
        for group in range(problem.groups):
            columns, accumulator = pl.ds(group * GROUP, GROUP), accumulators.pop(0)
            if not problem.is_quantized:
                plgpu.wgmma(accumulator, buffer.at[stage, slice(None), columns].transpose((1, 0)), x.transpose((1, 0)))
                continue
            integers = _integers(problem, buffer.at[stage, columns])
            size = _PART if problem.config.in_parts else problem.config.depth
            for start in range(0, problem.config.depth, size):
                right = x.at[:, pl.ds(start, size)].transpose((1, 0))
                plgpu.wgmma(accumulator, _left(problem, integers[:, start : start + size]), right)


def multiply_groups(problem: Problem, ring: Mapping[str, Any], stage, sums: Sequence[jax.Array]) -> list[jax.Array]:
    """The sums, likewise, plus a step's products times their scales."""
    sums = list(sums)
    size = problem.config.depth // problem.groups_a_step
    shape = (GROUP, problem.tokens)
    for i in range(len(sums)):
        product, group = divmod(i, problem.groups)
        columns = pl.ds(group * GROUP, GROUP)
        integers = _integers(problem, ring["w"][product].at[stage, columns])
        for part in range(problem.groups_a_step):
            right = ring["x"].at[stage, slice(None), pl.ds(part * size, size)].transpose((1, 0))
            left = _left(problem, integers[:, part * size : (part + 1) * size])

            def one(accumulator, left=left, right=right):
                plgpu.wgmma(accumulator, left, right)
                return accumulator[...]

            value = pl.run_scoped(one, plgpu.WGMMAAccumulatorRef(shape, jnp.float32))
            ref = ring["scales"][product].at[stage, part, columns]
            scale = plgpu.load(ref, layout=plgpu.Layout.WGMMA.reduce(1), optimized=False)
            if problem.is_packed:
                scale = scale / unit(problem.dtype)
            sums[i] = sums[i] + value * lax.broadcast_in_dim(scale, shape, (0,))
    return sums


def load_integers(ref: Any, bits: int) -> jax.Array:
    """Integers of (64 columns, depth) in registers, in a layout of wide loads."""
    return plgpu.load(ref, layout=plgpu.Layout.WGMMA_UPCAST_4X if bits == 4 else plgpu.Layout.WGMMA_UPCAST_2X)


def widened(integers: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """As 16-bit values; by way of bfloat16, to which Mosaic GPU knows a short way."""
    return integers.astype(jnp.bfloat16).astype(dtype)


def _integers(problem: Problem, ref: Any) -> jax.Array:
    """Likewise, in the layout in which `_left` takes them."""
    if problem.is_packed:
        return load_packed(ref)
    return plgpu.layout_cast(load_integers(ref, problem.weight_bits), plgpu.Layout.WGMMA)


def _left(problem: Problem, integers: jax.Array) -> jax.Array:
    """What the tensor cores multiply by."""
    return widened_packed(integers, problem.dtype) if problem.is_packed else widened(integers, problem.dtype)
