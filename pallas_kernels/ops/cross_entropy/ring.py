"""The chunks of long rows, in registers and in the ring of stages in shared memory that they are loaded to.

Loads are numbered through all rows: a row has `RowPlan.loads` of them, and a warpgroup's load number n goes to its
stage n % slots. After reading a stage, the warpgroup starts the next load into it, possibly of the next row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.ops.cross_entropy.config import RowPlan
from pallas_kernels.primitives.platform import is_interpreted
from pallas_kernels.primitives.rows import THREADS, WARP_LANES, WARPS, RowValues


@dataclass(frozen=True, kw_only=True)
class Pieces:
    """A chunk in a warpgroup's registers: pieces of one access a thread, which is a line a warp.

    vector: values in an access; a piece is a (warps, lanes, vector) array.
    """

    vector: int

    @property
    def shape(self) -> tuple[int, int, int]:
        """The shape of a piece."""
        return (WARPS, WARP_LANES, self.vector)

    @property
    def layout(self) -> plgpu.Layout | Any:
        """The layout of a piece."""
        return plgpu.Layout.TILED(plgpu.Tiling((self.shape,)), warp_dims=(-3,), lane_dims=(-2,), vector_dim=-1)

    def full(self, value: float) -> jax.Array:
        """Returns a piece filled with a float32 value."""
        return plgpu.layout_cast(jnp.full(self.shape, value, jnp.float32), self.layout)

    def of_threads(self, value: float) -> jax.Array:
        """Returns one float32 value for each thread."""
        return plgpu.layout_cast(jnp.full(self.shape[:2], value, jnp.float32), self.layout.reduce(2))

    def over_warps(self, values: jax.Array) -> jax.Array:
        """Broadcasts each warp's value to its threads."""
        return plgpu.layout_cast(lax.broadcast_in_dim(values, self.shape[:2], (0,)), self.layout.reduce(2))

    def over_vectors(self, values: jax.Array) -> jax.Array:
        """Broadcasts each thread's value to its neighbouring logits."""
        return plgpu.layout_cast(lax.broadcast_in_dim(values, self.shape, (0, 1)), self.layout)

    def access_numbers(self) -> jax.Array:
        """Returns the number of each element's access in its piece."""
        warp = plgpu.broadcasted_iota(jnp.int32, self.shape, 0, layout=self.layout)
        return warp * WARP_LANES + lax.broadcasted_iota(jnp.int32, self.shape, 1)

    def value_numbers(self) -> jax.Array:
        """Returns the position of each element in its piece."""
        return self.access_numbers() * self.vector + lax.broadcasted_iota(jnp.int32, self.shape, 2)

    def read(self, ref) -> RowValues:
        """Reads the pieces of a chunk, an (accesses, vector) reference."""
        return tuple(self._load(ref.at[pl.ds(first, THREADS)]) for first in range(0, ref.shape[0], THREADS))

    def store(self, ref, first: jax.Array, value: jax.Array) -> None:
        """Writes a piece to the accesses from `first` on."""
        ref = ref.at[pl.ds(first, THREADS)]
        if is_interpreted():
            ref[...] = value.reshape(THREADS, self.vector)
        else:
            ref.reshape(self.shape)[...] = value

    def _load(self, ref) -> jax.Array:
        if is_interpreted():  # the interpreter has no reshaped references and needs no layouts
            return ref[...].reshape(self.shape)
        # Its layout follows from that of what it is added to: a cast of each would take 0.6 s more to lower.
        return plgpu.load(ref.reshape(self.shape), optimized=False)


@dataclass(frozen=True, kw_only=True)
class Ring:
    """One warpgroup's stages, and its part of each of the block's rows, loaded chunk by chunk.

    logits: all rows, a (rows, accesses, vector) reference; the block's are every `stride`-th from `first_row` on.
    buffers: (warpgroups, slots, chunk, vector) in shared memory. arrived: a barrier for each stage.
    part, repeated: where the part begins and how much of its last chunk was in the chunk before; see `RowPlan.part`.
    """

    plan: RowPlan
    pieces: Pieces
    logits: Any
    buffers: Any
    arrived: Any
    group: jax.Array
    first_row: jax.Array
    stride: int
    part: jax.Array
    repeated: jax.Array | int

    @property
    def slots(self) -> int:
        """The number of stages of the warpgroup."""
        return self.buffers.shape[1]

    def stage(self, load: jax.Array) -> tuple[Any, Any]:
        """The buffer of load number `load`, and the barrier of its arrival."""
        slot = lax.rem(load, self.slots)
        return self.buffers.at[self.group, slot], self.arrived.at[self.group * self.slots + slot]

    def start(self, j: jax.Array) -> jax.Array:
        """The access where this warpgroup's chunk j begins."""
        begin = self.part + j * self.plan.chunk
        return jnp.where(j == self.plan.own - 1, begin - self.repeated, begin) if self.plan.most_repeated else begin

    def fetch(self, i: jax.Array, position: jax.Array) -> None:
        """Starts the load at `position` of the block's row number i; a position past its end is one of a later row."""
        plan, rows = self.plan, self.logits.shape[0]
        row = (i + position // plan.loads) * self.stride + self.first_row
        j = plan.chunk_at(lax.rem(position, plan.loads))

        @pl.when(row < rows)
        def _():
            source = self.logits.at[row, pl.ds(self.start(j), plan.chunk)]
            target = self.stage(i * plan.loads + position)
            plgpu.copy_gmem_to_smem(source, *target, oob_mode=plgpu.OOBFillMode.PROMISE_IN_BOUNDS)

    def row(self, i: jax.Array) -> RingRow:
        """The block's row number i."""
        return RingRow(ring=self, i=i, index=i * self.stride + self.first_row, first_load=i * self.plan.loads)


@dataclass(frozen=True, kw_only=True)
class RingRow:
    """The block's row number i as it comes through a ring.

    index: among all rows. first_load: the number of the load at position 0.
    """

    ring: Ring
    i: jax.Array
    index: jax.Array
    first_load: jax.Array

    def wait(self, position: jax.Array) -> None:
        """Waits until the load at `position` has arrived."""
        plgpu.barrier_wait(self.ring.stage(self.first_load + position)[1])

    def read(self, position: jax.Array) -> RowValues:
        """Reads the chunk at `position` and keeps its stage."""
        return self.ring.pieces.read(self.ring.stage(self.first_load + position)[0])

    def release(self, position: jax.Array) -> None:
        """Starts the next load into this load's stage, once the whole warpgroup has read it."""
        plgpu.commit_smem()
        self.ring.fetch(self.i, position + self.ring.slots)

    def take(self, position: jax.Array) -> RowValues:
        """Reads the chunk at `position` and releases its stage to the next load."""
        values = self.read(position)
        self.release(position)
        return values
