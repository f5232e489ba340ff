"""Two blocks that share a tile's depth add up their sums: each sends the other the half that it does not finish.

The sums come into the memory of the operands, which nobody needs once both blocks have multiplied their last step. A
block therefore has one tile only: operands of a next one would come too early. They come in pieces, so that the first
one's results leave while the next one's sums come.
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
from pallas_kernels.primitives.gemm.store import Pieces


def exchange_types(problem: Problem, operands: Any) -> dict[str, Any]:
    """Scratch types: `operands` (a tree of types) and `Exchange.arriving` in the same memory, and the barriers."""
    warpgroups, pieces = problem.config.warpgroups, Pieces.of(problem)
    shape = (warpgroups, pieces.count, pieces.rows, pieces.columns)
    return {
        "memory": plgpu.RefUnion(operands, shared(shape, jnp.dtype(jnp.float32))),
        "arrived": plgpu.Barrier(num_barriers=warpgroups * pieces.count),
        "done": plgpu.ClusterBarrier(collective_axes=("cluster",), num_arrivals=warpgroups),
    }


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """Of one warpgroup with the one of its number in the other block of its cluster of two.

    rank: of the block, which finishes so many halves of columns further right.
    arriving: (pieces, rows, columns of a piece) float32 in shared memory.
    arrived: barriers for them; this warpgroup's are those from `first_barrier` on.
    done: a barrier of both blocks, passed when all of their products are.
    """

    rank: jax.Array
    arriving: Any
    arrived: Any
    first_barrier: jax.Array
    done: Any

    @classmethod
    def of(cls, *, memory: Any, arrived: Any, done: Any, warpgroup: jax.Array) -> tuple[Any, Exchange]:
        """The operands' references, and a warpgroup's exchange, of references to what `exchange_types` has."""
        operands, arriving = memory
        return operands, cls(
            rank=lax.axis_index("cluster"),
            arriving=arriving.at[warpgroup],
            arrived=arrived,
            first_barrier=warpgroup * arriving.shape[1],
            done=done,
        )

    def total(self, value: jax.Array) -> Sum:
        """The half that this block finishes of the sum of both blocks' values, when it is asked for."""
        half = value.shape[1] // 2
        left, right = value[:, :half], value[:, half:]
        is_left = jnp.broadcast_to(self.rank == 0, left.shape)
        own, others = jnp.where(is_left, left, right), jnp.where(is_left, right, left)
        # One thread speaks for its warpgroup, whose other warps may still be multiplying.
        plgpu.commit_smem()
        plgpu.barrier_arrive(self.done)
        plgpu.barrier_wait(self.done)
        pieces, _, columns = self.arriving.shape
        for piece in range(pieces):
            plgpu.async_store_smem(
                others[:, piece * columns : (piece + 1) * columns],
                self.arriving.at[piece],
                self.arrived.at[self.first_barrier + piece],
                cluster_idx=lax.sub(jnp.int32(1), self.rank),
                cluster_dim="cluster",
            )
        return Sum(exchange=self, own=own)

    def wait(self, piece: int) -> jax.Array:
        """The other block's sums for a piece of the columns; once for each."""
        plgpu.barrier_wait(self.arrived.at[self.first_barrier + piece])
        return plgpu.load(self.arriving.at[piece], layout=plgpu.Layout.WGMMA)


@dataclass(frozen=True, kw_only=True)
class Sum:
    """An accumulator as `Store` reads it, piece after piece: own values and those of the other block."""

    exchange: Exchange
    own: jax.Array

    def __getitem__(self, index: tuple[slice, slice]) -> jax.Array:
        return self.own[index] + self.exchange.wait(index[1].start // self.exchange.arriving.shape[-1])
