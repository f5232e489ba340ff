"""Stores a warpgroup's part of a tile: in pieces of some rows, transposed in shared memory, by TMA."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.primitives.gemm.epilogue import Epilogue
from pallas_kernels.primitives.gemm.problem import Problem
from pallas_kernels.primitives.row_tiles import RowTiles
from pallas_kernels.primitives.transposed import GROUP, load_transposed, store_transposed

PIECE = 64
"""Rows of a stored piece of the result. Pieces of 32 rows spill with tiles of 256."""


@dataclass(frozen=True, kw_only=True)
class Store:
    """The epilogue of one warpgroup, in pieces of some rows. Values are (columns, rows).

    unit: what the weights' 1 is widened to. loaded: the barrier of the residual's pieces.
    """

    problem: Problem
    epilogue: Epilogue
    unit: float
    extras: Mapping[str, Any]
    out: Any
    buffer: RowTiles
    loaded: Any

    def vectors(self, column: jax.Array) -> dict[str, jax.Array]:
        """Loads scales and bias of the 64 columns from `column` on, before their products."""
        first = jnp.minimum(column, self.problem.widths[0] - GROUP)  # columns after the last are not stored
        layout = plgpu.Layout.WGMMA.reduce(1)
        found = {
            name: plgpu.load(self.extras[name].at[pl.ds(first, GROUP)], layout=layout, optimized=False)
            for name in ("scales", "bias")
            if name in self.extras
        }
        return {name: vector.astype(jnp.float32) for name, vector in found.items()}

    def finish(self, product: jax.Array, vectors: Mapping[str, jax.Array], row: jax.Array, column: jax.Array) -> None:
        """Computes and stores the results of the tile at (row, column)."""
        slots = self.problem.config.store_slots
        bias = vectors.get("bias")
        scale = vectors["scales"] / self.unit
        for piece, start in enumerate(range(0, product.shape[1], PIECE)):
            shape = (GROUP, min(PIECE, product.shape[1] - start))
            buffer = self.buffer.at(piece % slots, rows=pl.ds(0, shape[1]))
            place = (pl.ds(row + start, shape[1]), pl.ds(column, GROUP))
            plgpu.wait_smem_to_gmem(slots - 1, wait_read_only=True)
            residual = None
            if "residual" in self.extras:
                buffer.load_async(self.extras["residual"].at[place], self.loaded)
                plgpu.barrier_wait(self.loaded)
                residual = load_transposed(buffer.only_panel)
            (value,) = self.epilogue.apply(
                [product[:, start : start + shape[1]] * lax.broadcast_in_dim(scale, shape, (0,))],
                scale=None,
                biases=[] if bias is None else [lax.broadcast_in_dim(bias, shape, (0,))],
                residual=residual,
                dtype=self.out.dtype,
            )
            store_transposed(value, buffer.only_panel)
            plgpu.commit_smem()
            buffer.send(self.out.at[place])
