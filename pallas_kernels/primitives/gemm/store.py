"""How a warpgroup's part of a tile leaves: in pieces of some columns, through shared memory, by TMA.

A residual comes the same way round: by TMA into the buffer in which its piece will leave.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.primitives.gemm.epilogue import Epilogue
from pallas_kernels.primitives.gemm.problem import Problem


@dataclass(frozen=True, kw_only=True)
class Pieces:
    """What a warpgroup stores of a tile: `rows` and, of each accumulator, `width` columns, leaving `columns` at a time
    through `slots` buffers of each result."""

    rows: int
    width: int
    columns: int
    slots: int

    @classmethod
    def of(cls, problem: Problem) -> Pieces:
        """Those of a problem."""
        config = problem.config
        width = problem.width // config.splits
        columns = min(config.store_columns, width)
        return cls(
            rows=config.warpgroup_rows, width=width, columns=columns, slots=min(config.store_slots, width // columns)
        )

    @property
    def count(self) -> int:
        """Of a tile."""
        return self.width // self.columns


@dataclass(frozen=True, kw_only=True)
class Store:
    """The epilogue of one warpgroup.

    extras: what there is of bias and scale (vectors in device memory, long enough for whole tiles) and residual.
    buffers: of each result, (slots, rows, columns) in shared memory.
    arrived: barriers for the residual's pieces; this warpgroup's are those from `first_barrier` on.
    """

    pieces: Pieces
    epilogue: Epilogue
    extras: Mapping[str, Any]
    outputs: Sequence[Any]
    buffers: Sequence[Any]
    arrived: Any
    first_barrier: jax.Array

    def begin(self, row: jax.Array, column: jax.Array) -> None:
        """Before the products of the part of the result that begins there: sends for the residual's first pieces."""
        if "residual" in self.extras:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            for piece in range(self.pieces.slots):
                self._bring(piece, row, column)

    def finish(self, products: Sequence[jax.Array], row: jax.Array, column: jax.Array) -> None:
        """After them: computes and stores the results."""
        pieces = self.pieces
        scale = self._scale(row)
        for piece in range(pieces.count):
            slot = piece % pieces.slots
            start = piece * pieces.columns
            parts = [product[:, start : start + pieces.columns] for product in products]
            residual = None
            if "residual" in self.extras:
                plgpu.barrier_wait(self.arrived.at[self.first_barrier + slot])
                residual = plgpu.load(self.buffers[0].at[slot], layout=plgpu.Layout.WGMMA).astype(jnp.float32)
            else:
                plgpu.wait_smem_to_gmem((pieces.slots - 1) * len(self.outputs), wait_read_only=True)
            results = self.epilogue.apply(
                parts,
                scale=scale,
                bias=self._bias(column + start),
                residual=residual,
                dtype=self.outputs[0].dtype,
            )
            for result, buffer in zip(results, self.buffers, strict=True):
                buffer[slot] = result.astype(buffer.dtype)
            plgpu.commit_smem()
            for buffer, output in zip(self.buffers, self.outputs, strict=True):
                place = output.at[pl.ds(row, pieces.rows), pl.ds(column + start, pieces.columns)]
                plgpu.copy_smem_to_gmem(buffer.at[slot], place)
            if "residual" in self.extras and piece + pieces.slots < pieces.count:
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                self._bring(piece + pieces.slots, row, column)

    def _bring(self, piece: int, row: jax.Array, column: jax.Array) -> None:
        slot = piece % self.pieces.slots
        columns = pl.ds(column + piece * self.pieces.columns, self.pieces.columns)
        plgpu.copy_gmem_to_smem(
            self.extras["residual"].at[pl.ds(row, self.pieces.rows), columns],
            self.buffers[0].at[slot],
            self.arrived.at[self.first_barrier + slot],
        )

    def _bias(self, column: jax.Array) -> jax.Array | None:
        if "bias" not in self.extras:
            return None
        ref = self.extras["bias"].at[pl.ds(column, self.pieces.columns)]
        values = plgpu.load(ref, layout=plgpu.Layout.WGMMA.reduce(0), optimized=False).astype(jnp.float32)
        return lax.broadcast_in_dim(values, (self.pieces.rows, self.pieces.columns), (1,))

    def _scale(self, row: jax.Array) -> jax.Array | None:
        if "scale" not in self.extras:
            return None
        ref = self.extras["scale"].at[pl.ds(row, self.pieces.rows)]
        values = plgpu.load(ref, layout=plgpu.Layout.WGMMA.reduce(1), optimized=False).astype(jnp.float32)
        return lax.broadcast_in_dim(values, (self.pieces.rows, self.pieces.columns), (0,))
