"""A launch of persistent blocks: one warpgroup is the producer, the others are consumers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
from jax import lax

from pallas_kernels.primitives import settings
from pallas_kernels.primitives.flop_metadata import Products
from pallas_kernels.primitives.gemm.config import PRODUCER_REGISTERS
from pallas_kernels.primitives.gemm.problem import Problem
from pallas_kernels.primitives.platform import target_device

Roles = tuple[Callable[[], None], Callable[[jax.Array], None]]
"""What the producer does, and what the consumer of a number does."""


def blocks_of(problem: Problem) -> int:
    """How many blocks, or clusters, take turns at a problem's tiles: as many as run at once, or as there are tiles."""
    config = problem.config
    tiles = problem.grid[0] * problem.grid[1]
    most = max(1, min(target_device().core_count // config.cluster, tiles))
    return pl.cdiv(tiles, pl.cdiv(tiles, most)) if config.even_waves else most


def in_one_warp(produce: Callable[[], None], *refs: Any) -> Callable[[], None]:
    """The same by one warp of the warpgroup, which is enough: power sets the clock, and instructions take power.

    refs: what is loaded, in device memory. JAX's warps take no array that varies over the devices of `jax.shard_map`:
    then by all.
    """
    whole = (getattr(ref, "ref", ref) for ref in refs)  # under `jax.vmap` they are parts of arrays
    if any(not jax.typeof(ref).manual_axis_type.empty for ref in whole):
        return produce
    return partial(plgpu.warp_map, lambda warp: pl.when(warp == 0)(produce))


def launcher(
    problem: Problem,
    roles: Callable[..., Roles],
    *,
    name: str,
    out_type: Any,
    scratch_types: Any,
    blocks: int | None = None,
    products: Products | None = None,
) -> Callable[..., Any]:
    """From the operands to the outputs of `out_type`.

    roles: called with the references of operands, outputs and scratch. blocks: or clusters, where they are not as many
        as `blocks_of` has. products: what is multiplied, where that is not what the problem says.
    """
    config = problem.config

    def body(*refs):
        produce, consume = roles(*refs)
        warpgroup = lax.axis_index("warpgroup")

        @pl.when(warpgroup == config.warpgroups)
        def _():
            plgpu.set_max_registers(PRODUCER_REGISTERS, action="decrease")
            produce()

        @pl.when(warpgroup < config.warpgroups)
        def _():
            plgpu.set_max_registers(config.consumer_registers, action="increase")
            consume(warpgroup)

    body.__name__ = name
    return settings.kernel(
        body,
        out_type=out_type,
        grid=(blocks or blocks_of(problem),),
        grid_names=("block",),
        **({"cluster": (config.cluster,), "cluster_names": ("cluster",)} if config.cluster > 1 else {}),
        num_threads=config.warpgroups + 1,
        thread_name="warpgroup",
        scratch_types=scratch_types,
        compiler_params=plgpu.CompilerParams(approx_math=True),
        products=products or problem.flops,
    )
