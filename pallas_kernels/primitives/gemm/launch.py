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
"""The producer's function, and the consumers' function of the warpgroup's number."""


def blocks_of(problem: Problem) -> int:
    """Returns the number of persistent blocks (or clusters): as many as run at once, but no more than tiles."""
    config = problem.config
    tiles = problem.grid[0] * problem.grid[1]
    most = max(1, min(target_device().core_count // config.cluster, tiles))
    return pl.cdiv(tiles, pl.cdiv(tiles, most)) if config.even_waves else most


def in_one_warp(produce: Callable[[], None], *refs: Any) -> Callable[[], None]:
    """Wraps the producer so that one warp of its warpgroup runs it.

    One warp is enough, and fewer instructions take less power, which sets the clock. JAX's warps accept no array that
    varies over the devices of `jax.shard_map`; then all warps run it.

    refs: the arrays that the producer loads, in device memory.
    """
    whole = (getattr(ref, "ref", ref) for ref in refs)  # under `jax.vmap` the references are slices of arrays
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
    **params: Any,
) -> Callable[..., Any]:
    """Returns the launch, a function from the operands to the outputs of `out_type`.

    roles: returns the roles for the references of operands, outputs and scratch.
    blocks: the number of blocks or clusters, if not `blocks_of(problem)`.
    products: the matrix products for the FLOP count, if not the problem's.
    params: of `plgpu.CompilerParams`.
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
        compiler_params=plgpu.CompilerParams(approx_math=True, **params),
        products=products or problem.flops,
    )
