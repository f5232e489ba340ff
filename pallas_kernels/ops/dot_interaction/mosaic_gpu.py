"""The dot interaction on Mosaic GPU: one warpgroup per sample, and its square of products only on the chip.

A sample's vectors are a tile of 64 rows, those beyond the last one zero. Forward, the tensor cores multiply the tile by
itself, and the lower triangle of the square is packed in shared memory. Backward, the packed gradients are unpacked to
a square G, and the tensor cores multiply G and G^T by the tile.

A row of the triangle starts and ends anywhere, while the threads of a warpgroup access whole lines of 128 values. So
rows are copied as such lines, one after the other: the next row overwrites what was too much, or a mask removes it.
In the gradient, where lines do not overlap, none waits for the one before as automatic barriers would have it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.primitives.compat import store
from pallas_kernels.primitives.flop_metadata import product
from pallas_kernels.primitives.row_tiles import TileForm, multiply_across
from pallas_kernels.primitives.rows import THREADS, load_row, split_row, store_row
from pallas_kernels.primitives.settings import named_kernel


@dataclass(frozen=True, kw_only=True)
class Triangle:
    """The pairs of `fields` vectors: (i, j) with j < i, or j <= i if the diagonal is included."""

    fields: int
    has_diagonal: bool

    @property
    def pairs(self) -> int:
        """The number of pairs."""
        return self.start(self.fields)

    def start(self, row: Any) -> Any:
        """The place of a row's first pair: the number of pairs in the rows above."""
        return row * (row + 1) // 2 if self.has_diagonal else row * (row - 1) // 2

    def length(self, row: Any) -> Any:
        """The number of pairs in a row."""
        return row + 1 if self.has_diagonal else row


ROWS = 64
"""Rows of a tensor-core product, and the most vectors of a sample."""
_LINE = plgpu.Layout.WG_STRIDED((THREADS,), vec_size=1)
_GROUP = 8
"""Lines that are loaded together, before the first is stored."""


def dot_interaction_forward(x: jax.Array, *, has_diagonal: bool) -> jax.Array:
    """Returns the products of pairs, (batch, pairs), of x's dtype.

    x: (batch, fields, features) of a 16-bit dtype, at most 64 fields and at least 128 pairs, features a multiple of 16.
    """
    (batch, fields, features), dtype = x.shape, x.dtype
    triangle = Triangle(fields=fields, has_diagonal=has_diagonal)
    form = TileForm(size=features, dtype=x.dtype, in_panels=True)
    segments = split_row(triangle.pairs, x.dtype.itemsize)
    width = _width(fields)

    def body(refs: dict[str, Any]) -> None:
        sample, tile = lax.axis_index("sample"), form.tiles(refs["tile"])
        square, packed = refs["square"], refs["packed"]
        tile.load_async(_all_rows(refs["x"].at[sample]), refs["arrived"])
        plgpu.barrier_wait(refs["arrived"])

        def multiply(products):
            multiply_across(products, tile, tile.at(rows=pl.ds(0, width)))
            return products[...]

        products = pl.run_scoped(multiply, plgpu.WGMMAAccumulatorRef((ROWS, width), jnp.float32))
        store(square.at[:, pl.ds(0, width)], products.astype(dtype))

        @pl.loop(0, fields)
        def _(row):
            store(packed.at[pl.ds(triangle.start(row), THREADS)], _line(square.at[row]))

        store_row(refs["y"].at[sample], load_row(packed, segments), segments)

    outputs = {"y": jax.ShapeDtypeStruct((batch, triangle.pairs), x.dtype)}
    return _launch("dot_interaction", body, {"x": x}, outputs, form, triangle, products=1)["y"]


def dot_interaction_backward(x: jax.Array, dy: jax.Array, *, has_diagonal: bool) -> tuple[jax.Array]:
    """Returns (dx,), the gradient of x; see `dot_interaction_forward`. dy: (batch, pairs), of x's dtype."""
    (_, fields, features), dtype = x.shape, x.dtype
    triangle = Triangle(fields=fields, has_diagonal=has_diagonal)
    segments = split_row(triangle.pairs, x.dtype.itemsize)
    width = _width(fields)
    # The number of rows to sum over must be a multiple of a panel's width.
    swizzle = min(width * x.dtype.itemsize, plgpu.find_swizzle(features * x.dtype.itemsize * 8))
    form = TileForm(size=features, dtype=x.dtype, in_panels=True, swizzle=swizzle)

    def body(refs: dict[str, Any]) -> None:
        sample, tile = lax.axis_index("sample"), form.tiles(refs["tile"])
        square, packed = refs["square"], refs["packed"]
        tile.load_async(_all_rows(refs["x"].at[sample]), refs["arrived"])
        store_row(packed, load_row(refs["dy"].at[sample], segments), segments)
        column = plgpu.broadcasted_iota(jnp.int32, (THREADS,), 0, layout=_LINE)
        plgpu.commit_smem()

        @pl.loop(0, width // _GROUP)
        def _(group):
            rows = [group * _GROUP + i for i in range(_GROUP)]
            starts = [jnp.minimum(triangle.start(row), triangle.pairs) for row in rows]
            lines = [_line(packed.at[pl.ds(start, THREADS)]) for start in starts]
            for row, line in zip(rows, lines, strict=True):
                length = jnp.where(row < fields, triangle.length(row), 0)
                store(square.at[row], jnp.where(column < length, line, jnp.zeros((), line.dtype)))

        plgpu.commit_smem()
        # Rows of `lower` from `width` on are anything, and so are those of its product, which are not stored.
        lower, upper = square.at[:, pl.ds(0, width)], square.at[pl.ds(0, width), pl.ds(0, ROWS)].transpose((1, 0))
        gradients = [plgpu.load(half, layout=plgpu.Layout.WGMMA, optimized=False) for half in (lower, upper)]
        plgpu.barrier_wait(refs["arrived"])
        for panel in [panel for _, panel in tile.panels()]:

            def multiply(products, panel=panel):
                for half in gradients:  # a sum of both could overflow float16 on the diagonal
                    plgpu.wgmma(products, half, panel.at[pl.ds(0, width)])
                return products[...]

            products = pl.run_scoped(multiply, plgpu.WGMMAAccumulatorRef(panel.shape, jnp.float32))
            plgpu.commit_smem()  # the products of all warps have read the panel
            panel[...] = products.astype(dtype)
        plgpu.commit_smem()
        tile.send(_all_rows(refs["dx"].at[sample]))
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    operands, outputs = {"x": x, "dy": dy}, {"dx": jax.ShapeDtypeStruct(x.shape, x.dtype)}
    return (_launch("dot_interaction_gradient", body, operands, outputs, form, triangle, products=2)["dx"],)


def _width(fields: int) -> int:
    """Rows and columns of the square that are used. Mosaic GPU stores columns to lines that their number divides."""
    return 32 if fields <= 32 else ROWS


def _line(ref: Any) -> jax.Array:
    return plgpu.load(ref, layout=_LINE, optimized=False)


def _all_rows(vectors: Any) -> Any:
    """The vectors as 64 rows, which JAX refuses if the start is static."""
    return vectors.at[pl.ds(jnp.full((), 0, jnp.int32), ROWS)]


def _launch(
    name: str,
    body: Callable[[dict[str, Any]], None],
    operands: dict[str, jax.Array],
    outputs: dict[str, jax.ShapeDtypeStruct],
    form: TileForm,
    triangle: Triangle,
    *,
    products: int,
) -> dict[str, jax.Array]:
    x = operands["x"]
    batch, fields, features = x.shape
    scratch = {
        "tile": form.scratch(ROWS),
        "square": plgpu.SMEM((ROWS, THREADS), x.dtype),
        "packed": plgpu.SMEM((triangle.pairs + THREADS,), x.dtype),
        "arrived": plgpu.Barrier(num_arrivals=form.copies),
    }
    return named_kernel(
        body,
        operands,
        outputs,
        scratch,
        name=name,
        grid={"sample": batch},
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers="dy" in operands),
        products=product(fields, fields, features, x.dtype).times(batch * products),
    )
