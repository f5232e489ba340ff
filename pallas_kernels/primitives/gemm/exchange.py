"""Two blocks that share a tile's depth add up their sums: each sends the other the half that it does not finish.

The sums come into the memory of the operands, which nobody needs once both blocks have multiplied their last step. A
block therefore has one tile only: operands of a next one would come too early.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.primitives.gemm.problem import Problem
from pallas_kernels.primitives.gemm.shared import shared


def exchange_types(problem: Problem, operands: Any) -> dict[str, Any]:
    """Scratch types: `operands` (a tree of types) and `Exchange.arriving` in the same memory, and the barriers."""
    config = problem.config
    arriving = shared((config.warpgroups, config.warpgroup_rows, problem.finished_width), jnp.dtype(jnp.float32))
    return {
        "memory": plgpu.RefUnion(operands, arriving),
        "arrived": plgpu.Barrier(num_barriers=config.warpgroups),
        "done": plgpu.ClusterBarrier(collective_axes=("cluster",), num_arrivals=config.warpgroups),
    }


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """Of one warpgroup with the one of its number in the other block of its cluster of two.

    rank: of the block, which finishes so many halves of columns further right.
    arriving: (rows, half of the columns) float32 in shared memory; arrived: its barrier.
    done: a barrier of both blocks, passed when all of their products are.
    """

    rank: jax.Array
    arriving: Any
    arrived: Any
    done: Any

    @classmethod
    def of(cls, *, memory: Any, arrived: Any, done: Any, warpgroup: jax.Array) -> tuple[Any, Exchange]:
        """The operands' references, and a warpgroup's exchange, of references to what `exchange_types` has."""
        operands, arriving = memory
        rank = lax.axis_index("cluster")
        return operands, cls(rank=rank, arriving=arriving.at[warpgroup], arrived=arrived.at[warpgroup], done=done)

    def total(self, value: jax.Array) -> jax.Array:
        """The half that this block finishes of the sum of both blocks' values."""
        half = value.shape[1] // 2
        left, right = value[:, :half], value[:, half:]
        is_left = jnp.broadcast_to(self.rank == 0, left.shape)
        own, others = jnp.where(is_left, left, right), jnp.where(is_left, right, left)
        # One thread speaks for its warpgroup, whose other warps may still be multiplying.
        plgpu.commit_smem()
        plgpu.barrier_arrive(self.done)
        plgpu.barrier_wait(self.done)
        plgpu.async_store_smem(
            others, self.arriving, self.arrived, cluster_idx=lax.sub(jnp.int32(1), self.rank), cluster_dim="cluster"
        )
        plgpu.barrier_wait(self.arrived)
        return own + plgpu.load(self.arriving, layout=plgpu.Layout.WGMMA)
