"""A launch of persistent blocks whose warpgroups have roles: one brings operands, the others compute."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
from jax import lax

from pallas_kernels.primitives import settings
from pallas_kernels.primitives.gemm.problem import Problem
from pallas_kernels.primitives.gemm.sharing import Sharing
from pallas_kernels.primitives.platform import target_device
from pallas_kernels.primitives.stated import Products

Roles = tuple[Callable[[], None], Callable[[jax.Array], None]]
"""What the warpgroup does that brings operands, and what the one of a number does that computes."""


def blocks_of(problem: Problem) -> int:
    """How many blocks, or clusters, take turns at a problem's tiles: as many as run at once, or as there are tiles."""
    config = problem.config
    tiles = problem.grid[0] * problem.grid[1]
    most = tiles
    if config.blocks_per_core is not None:
        most = target_device().core_count * config.blocks_per_core // problem.cluster_size
    most = max(1, min(most, tiles))
    return pl.cdiv(tiles, pl.cdiv(tiles, most)) if config.even_waves else most


def sharing_of(problem: Problem) -> Sharing | None:
    """How a problem's last tiles are shared, or None where each tile is one block's."""
    config = problem.config
    if not config.shares_last_wave:
        return None
    if config.passes or config.blocks_per_core != 1 or len(problem.widths) > 1:
        raise ValueError("gemm: the last wave is shared by one block a core, of tiles of one width and one result.")
    if config.even_waves or config.reverses:
        raise ValueError("gemm: a last wave that blocks share is an uneven one, and its steps are in their order.")
    sharing = Sharing(
        tiles=problem.grid[0] * problem.grid[1],
        blocks=blocks_of(problem),
        steps=problem.steps,
        fewest=max(1, config.in_flight),
    )
    return sharing if sharing.has_shared else None


def in_one_warp(bring: Callable[[], None], *refs: Any) -> Callable[[], None]:
    """The same by one warp of the warpgroup, which is enough: power sets the clock, and instructions take power.

    refs: what is brought, in device memory. JAX's warps take no array that varies over the devices of `jax.shard_map`:
    then by all.
    """
    whole = (getattr(ref, "ref", ref) for ref in refs)  # under `jax.vmap` they are parts of arrays
    if any(not jax.typeof(ref).manual_axis_type.empty for ref in whole):
        return bring
    return partial(plgpu.warp_map, lambda warp: pl.when(warp == 0)(bring))


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
    config, size = problem.config, problem.cluster_size

    def body(*refs):
        bring, compute = roles(*refs)
        warpgroup = lax.axis_index("warpgroup")

        @pl.when(warpgroup == config.warpgroups)
        def _():
            if config.memory_registers is not None:
                plgpu.set_max_registers(config.memory_registers, action="decrease")
            bring()

        @pl.when(warpgroup < config.warpgroups)
        def _():
            if config.compute_registers is not None:
                plgpu.set_max_registers(config.compute_registers, action="increase")
            compute(warpgroup)

    body.__name__ = name
    return settings.kernel(
        body,
        out_type=out_type,
        grid=(blocks or blocks_of(problem),),
        grid_names=("block",),
        **({"cluster": (size,), "cluster_names": ("cluster",)} if size > 1 else {}),
        num_threads=config.warpgroups + 1,
        thread_name="warpgroup",
        scratch_types=scratch_types,
        compiler_params=plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=not config.automatic_barriers),
        products=products or problem.stated,
    )
