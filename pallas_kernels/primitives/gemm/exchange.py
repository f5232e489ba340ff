"""How the blocks of a cluster that share a tile's depth add up what they have.

Each writes its sums to device memory, which is the L2 cache in effect, and when all have, reads everybody's sums of its
own share of the columns. The order of additions is fixed, so results repeat bit for bit.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.primitives.gemm.problem import Problem
from pallas_kernels.primitives.gemm.shared import shared


def exchange_types(problem: Problem) -> tuple[Any, Any]:
    """Scratch types of all warpgroups' buffers, and of the barrier."""
    config = problem.config
    return (
        shared((config.warpgroups, config.warpgroup_rows, problem.width), jnp.dtype(jnp.float32)),
        plgpu.ClusterBarrier(collective_axes=("cluster",), num_arrivals=config.warpgroups),
    )


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """The exchange of one warpgroup.

    partial: `Problem.partial_shape` float32 in device memory.
    buffer: (rows, width) float32 in shared memory, from where sums go there: TMA says when its writes are done, which a
        barrier of a cluster alone does not.
    written: a cluster's barrier, passed when every warpgroup of every block has written.
    """

    problem: Problem
    partial: Any
    buffer: Any
    written: Any

    @property
    def share(self) -> int:
        """Columns of each accumulator that a block finishes."""
        return self.problem.width // self.problem.config.splits

    @property
    def first_column(self) -> jax.Array:
        """The first of them, counted from the warpgroup's first."""
        return lax.axis_index("cluster") * self.share

    def sums(self, values: Sequence[jax.Array], row: jax.Array, column: jax.Array) -> list[jax.Array]:
        """This block's share of the columns of every accumulator, summed over the cluster.

        values: the accumulators; row, column: where in the result they begin.
        """
        splits = self.problem.config.splits
        own = self.partial.at[lax.axis_index("cluster")]
        brought = min(self.problem.brought_rows, self.problem.config.warpgroup_rows)
        for i, value in enumerate(values):
            self.buffer[...] = value
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(
                self.buffer.at[pl.ds(0, brought)], own.at[i, pl.ds(row, brought), pl.ds(column, self.problem.width)]
            )
            plgpu.wait_smem_to_gmem(0)
        plgpu.barrier_arrive(self.written)
        plgpu.barrier_wait(self.written)
        rows = pl.ds(row, self.problem.config.warpgroup_rows)
        columns = pl.ds(column + self.first_column, self.share)

        def load(split: int, i: int) -> jax.Array:
            return plgpu.load(self.partial.at[split, i, rows, columns], layout=plgpu.Layout.WGMMA, optimized=False)

        return [functools.reduce(operator.add, [load(s, i) for s in range(splits)]) for i in range(len(values))]
