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
from pallas_kernels.primitives.integer_gemm.config import PIECE, Problem
from pallas_kernels.primitives.integers import unit
from pallas_kernels.primitives.row_tiles import RowTiles
from pallas_kernels.primitives.transposed import GROUP, load_transposed, store_transposed


@dataclass(frozen=True, kw_only=True)
class Store:
    """The epilogue of one warpgroup, in pieces of some rows. Values are (columns, rows)."""

    problem: Problem
    epilogue: Epilogue
    extras: Mapping[str, Any]
    out: Any
    buffer: RowTiles
    loaded: Any
    warpgroup: jax.Array

    def vectors(self, column: jax.Array) -> dict[str, jax.Array]:
        """Loads scales and bias of the 64 columns from `column` on, before their products."""
        first = jnp.minimum(column, self.problem.n - GROUP)  # columns after the last are not stored
        layout = plgpu.Layout.WGMMA.reduce(1)
        found = {
            name: plgpu.load(self.extras[name].at[pl.ds(first, GROUP)], layout=layout, optimized=False)
            for name in ("scales", "bias")
            if name in self.extras
        }
        return {name: vector.astype(jnp.float32) for name, vector in found.items()}

    def finish(self, product: jax.Array, vectors: Mapping[str, jax.Array], row: jax.Array, column: jax.Array) -> None:
        """Computes and stores the results of the tile at (row, column)."""
        config = self.problem.config
        bias = vectors.get("bias")
        scale = vectors["scales"] / unit(self.problem.integers, self.problem.dtype)
        for piece, start in enumerate(range(0, product.shape[1], PIECE)):
            shape = (GROUP, min(PIECE, product.shape[1] - start))
            buffer = self.buffer.at(piece % config.slots, rows=pl.ds(0, shape[1]))
            place = (pl.ds(row + start, shape[1]), pl.ds(column, GROUP))
            plgpu.wait_smem_to_gmem(config.slots - 1, wait_read_only=True)
            residual = None
            if "residual" in self.extras:
                arrived = self.loaded.at[self.warpgroup]
                buffer.load_async(self.extras["residual"].at[place], arrived)
                plgpu.barrier_wait(arrived)
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
