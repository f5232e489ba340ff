"""Stores a warpgroup's part of a tile: in pieces of some columns, through shared memory, by TMA.

TMA loads a residual's piece into the buffer from which the result's piece is then stored.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.primitives import compat
from pallas_kernels.primitives.gemm.epilogue import Epilogue, HeadRotation, rotated_piece, store_order
from pallas_kernels.primitives.gemm.operands import SWIZZLE_BYTES
from pallas_kernels.primitives.gemm.problem import Problem
from pallas_kernels.primitives.row_tiles import RowTiles, TileForm


@dataclass(frozen=True, kw_only=True)
class Pieces:
    """The pieces in which a warpgroup stores its part of a tile.

    rows: rows of the part. width: columns of each accumulator. columns: columns of a piece. slots: buffers of each
    result. in_panels: as `Problem.in_panels`.
    """

    rows: int
    width: int
    columns: int
    slots: int
    in_panels: bool

    @classmethod
    def of(cls, problem: Problem, *, panel_itemsize: int | None = None, most_columns: int | None = None) -> Pieces:
        """Returns the pieces of a problem.

        panel_itemsize: bytes of the widest result's values, if a piece must be one panel where tiles lie in panels.
        most_columns: the epilogue's limit for columns, if it has one.
        """
        config = problem.config
        width = problem.columns
        panel = SWIZZLE_BYTES // panel_itemsize if panel_itemsize and problem.in_panels else width
        columns = min(config.store_columns, width, panel, most_columns or width)
        slots = min(config.store_slots, width // columns)
        return cls(
            rows=config.warpgroup_rows,
            width=width,
            columns=columns,
            slots=1 if width // columns % slots else slots,  # every tile begins with the first
            in_panels=problem.in_panels,
        )

    @property
    def count(self) -> int:
        """The number of pieces of a tile."""
        return self.width // self.columns

    def scratch(self, dtype: jnp.dtype, warpgroups: int) -> Any:
        """The scratch type of the buffers of one result of this dtype."""
        return self._form(dtype).scratch(warpgroups, self.slots, self.rows)

    def tiles(self, scratch: Any, dtype: jnp.dtype) -> RowTiles:
        """The buffers of a reference to `scratch`, by warpgroup and slot."""
        return self._form(dtype).tiles(scratch)

    def _form(self, dtype: jnp.dtype) -> TileForm:
        return TileForm(size=self.columns, dtype=dtype, in_panels=self.in_panels)


@dataclass(frozen=True, kw_only=True)
class Store:
    """The epilogue of one warpgroup.

    extras: the operands given, in device memory: bias (of each product) and scale (vectors padded to whole tiles),
        residual, cosine and sine (rows, a head's columns or half of them).
    buffers: (slots, rows, columns) in shared memory, for each result; see `Pieces.tiles`.
    arrived: barriers for the residual's pieces, of all warpgroups; needed with a residual.
    first_barrier: this warpgroup's first barrier among them.
    rotation: of heads, or None. Only with a single result, without activation and residual.
    squares: the output for the sums, over a tile's columns, of the first rounded result's squares; see
        `Problem.squares_shape`. None if not requested.
    line: returns the line of `squares` for a tile's first column.
    count: how many rows are stored, if not all; only in panels.
    """

    pieces: Pieces
    epilogue: Epilogue
    extras: Mapping[str, Any]
    outputs: Sequence[Any]
    buffers: Sequence[RowTiles]
    arrived: Any = None
    first_barrier: Any = None
    rotation: HeadRotation | None = None
    squares: Any = None
    line: Callable[[jax.Array], jax.Array] | None = None
    count: jax.Array | None = None

    @classmethod
    def of_one_result(
        cls, pieces: Pieces, *, output: Any, buffer: RowTiles, extras: Mapping[str, Any] | None = None
    ) -> Store:
        """Returns the store of a product with one result. extras: a bias, if there is one. buffer: this warpgroup's."""
        return cls(pieces=pieces, epilogue=Epilogue(), extras=extras or {}, outputs=[output], buffers=[buffer])

    def narrowed(self, columns: int) -> Store:
        """Returns the store for tiles with this number of columns."""
        return replace(self, pieces=replace(self.pieces, width=columns))

    def begin(self, row: jax.Array, column: jax.Array) -> None:
        """Starts the loads of the residual's first pieces, before the products of the tile part at (row, column)."""
        if "residual" in self.extras:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            for piece in range(min(self.pieces.slots, self.pieces.count)):
                self._load_residual(piece, row, column)

    def finish(self, products: Sequence[jax.Array], row: jax.Array, column: jax.Array) -> None:
        """Computes and stores the results of the tile part at (row, column), after its products."""
        pieces = self.pieces
        results_of = self._results(products, row, column)
        squares = []
        for i, start in enumerate(store_order(self.rotation, pieces.width, pieces.columns)):
            slot = i % pieces.slots
            residual = None
            if "residual" in self.extras:
                plgpu.barrier_wait(self.arrived.at[self.first_barrier + slot])
                (residual,) = self.buffers[0].at(slot).load()
                residual = residual.astype(jnp.float32)
            else:
                plgpu.wait_smem_to_gmem((pieces.slots - 1) * len(self.outputs), wait_read_only=True)
            buffers = [buffer.at(slot) for buffer in self.buffers]
            results = [r.astype(b.form.dtype) for r, b in zip(results_of(start, residual), buffers, strict=True)]
            for result, buffer in zip(results, buffers, strict=True):
                buffer.store(result)
            if self.squares is not None:
                squares.append(jnp.sum(jnp.square(results[0].astype(jnp.float32)), axis=1))
            plgpu.commit_smem()
            for buffer, output in zip(buffers, self.outputs, strict=True):
                self._send(buffer, output, row, pl.ds(column + start, pieces.columns))
            if "residual" in self.extras and i + pieces.slots < pieces.count:
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                self._load_residual(i + pieces.slots, row, column)
        if self.squares is not None:
            assert self.line is not None
            place = self.squares.at[self.line(column), pl.ds(row, pieces.rows)]
            compat.store(place, functools.reduce(operator.add, squares))

    def _send(self, buffer: RowTiles, output: Any, row: jax.Array, columns: pl.Slice) -> None:
        rows = self.pieces.rows
        if self.count is None:
            buffer.send(output.at[pl.ds(row, rows), columns])
            return

        def send(first, size):
            buffer.at(rows=pl.ds(first, size)).send(output.at[pl.ds(row + first, size), columns])

        pl.when(self.count >= rows)(lambda: send(0, rows))
        size = rows // 2
        while size:  # a copy for each digit of the number of rows
            is_needed = (self.count < rows) & (self.count & size != 0)
            pl.when(is_needed)(partial(send, self.count & -(2 * size), size))
            size //= 2

    def _results(self, products, row, column):
        """Returns a function from a piece's first column and residual to its results."""
        size = self.pieces.columns
        scale = self._rows_vector("scale", row)
        factor = None if scale is None else self._over_columns(scale)

        def parts(start):
            return [product[:, start : start + size] for product in products]

        if self.rotation is None:
            return lambda start, residual: self.epilogue.apply(
                parts(start),
                scale=factor,
                biases=self._biases(column + start),
                residual=residual,
                dtype=self.outputs[0].dtype,
            )
        return self._rotated_results(self.rotation, parts, factor, row, column)

    def _rotated_results(self, rotation, parts, scale, row, column):
        """Returns the same for rotated heads, with row factors multiplied last.

        Rotation commutes with row factors, and after it they apply to one piece only.
        """
        size = self.pieces.columns
        before, after = (scale, None) if "bias" in self.extras else (None, scale)

        def value(start):
            biases = self._biases(column + start)
            return self.epilogue.apply(parts(start), scale=before, biases=biases, residual=None, dtype=jnp.float32)[0]

        load = partial(plgpu.load, layout=plgpu.Layout.WGMMA, optimized=False)

        @cache
        def angles(first):
            where = pl.ds(row, self.pieces.rows), pl.ds(first, size)
            cosine, sine = (self.extras[name].at[where] for name in ("cosine", "sine"))
            return load(cosine), load(sine)

        def result(start, _):
            rotated = rotated_piece(value, angles, rotation, start)
            return (rotated if after is None else rotated * after,)

        return result

    def _load_residual(self, piece: int, row: jax.Array, column: jax.Array) -> None:
        slot = piece % self.pieces.slots
        columns = pl.ds(column + piece * self.pieces.columns, self.pieces.columns)
        place = self.extras["residual"].at[pl.ds(row, self.pieces.rows), columns]
        self.buffers[0].at(slot).load_async(place, self.arrived.at[self.first_barrier + slot])

    def _biases(self, column: jax.Array | int) -> list[jax.Array]:
        """Returns the columns of each product's bias from one on; none without biases."""
        shape = self.pieces.rows, self.pieces.columns
        load = partial(plgpu.load, layout=plgpu.Layout.WGMMA.reduce(0), optimized=False)
        values = [load(ref.at[pl.ds(column, shape[1])]) for ref in jax.tree.leaves(self.extras.get("bias"))]
        return [lax.broadcast_in_dim(value.astype(jnp.float32), shape, (1,)) for value in values]

    def _rows_vector(self, name: str, row: jax.Array) -> jax.Array | None:
        if name not in self.extras:
            return None
        ref = self.extras[name].at[pl.ds(row, self.pieces.rows)]
        return plgpu.load(ref, layout=plgpu.Layout.WGMMA.reduce(1), optimized=False).astype(jnp.float32)

    def _over_columns(self, values: jax.Array) -> jax.Array:
        return lax.broadcast_in_dim(values, (self.pieces.rows, self.pieces.columns), (0,))
