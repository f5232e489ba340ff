"""Tiles of rows of a head in shared memory, as TMA loads them and tensor cores read them.

Tensor cores want groups of eight rows, swizzled. TMA makes such groups of an array whose length is whole groups. Of any
other it loads panels of as many columns as are swizzled together, row behind row: in memory that is the same as the
groups of a tile which is that narrow, and rows beyond the last one come as zeros, and are not stored.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_kernels.ops.attention.masking import Masking
from pallas_kernels.primitives.gemm.shared import shared

GROUP = 8
"""Rows that lie together for tensor cores."""


def is_ragged(masking: Masking) -> bool:
    """Whether queries or keys are no whole groups."""
    return any(length % GROUP for length in (masking.queries, masking.keys))


@dataclass(frozen=True, kw_only=True)
class TileForm:
    """How tiles lie. size: of a row. in_panels: for arrays of any length. swizzle: bytes; None: as many as fit."""

    size: int
    dtype: jnp.dtype
    in_panels: bool
    swizzle: int | None = None

    @property
    def copies(self) -> int:
        """By which TMA loads a tile, each of which arrives at its barrier."""
        return self.size // self._width if self.in_panels else 1

    def scratch(self, *shape: int) -> Any:
        """The scratch type of tiles: shape is that of the stack of tiles, and then a tile's rows."""
        if not self.in_panels:
            return shared((*shape, self.size), self.dtype, swizzle=self._swizzle)
        shape = (*shape[:-1], self.copies, shape[-1], self._width)
        swizzle = plgpu.SwizzleTransform(self._swizzle)  # pyright: ignore[reportAbstractUsage]
        landed = plgpu.SMEM(shape, self.dtype, transforms=(swizzle,))
        return plgpu.RefUnion(landed, shared(shape, self.dtype, swizzle=self._swizzle))

    def tiles(self, scratch: Any) -> RowTiles:
        """What a kernel is given for `scratch`."""
        landed, read = scratch if self.in_panels else (scratch, scratch)
        return RowTiles(form=self, landed=landed, read=read)

    @property
    def _swizzle(self) -> int:
        return self.swizzle or plgpu.find_swizzle(self.size * self.dtype.itemsize * 8)

    @property
    def _width(self) -> int:
        """Columns of a panel."""
        return self._swizzle // self.dtype.itemsize


@dataclass(frozen=True, kw_only=True)
class RowTiles:
    """References to tiles of rows: landed is what TMA writes and reads, read what tensor cores and threads do.

    stack: which of the tiles. rows: which of its rows.
    """

    form: TileForm
    landed: Any
    read: Any
    stack: tuple[Any, ...] = ()
    rows: Any = slice(None)

    def at(self, *stack: Any, rows: Any = None) -> RowTiles:
        """One of the stacked tiles, or some rows of it."""
        return replace(self, stack=(*self.stack, *stack), rows=self.rows if rows is None else rows)

    def part(self, rows: Any) -> RowTiles:
        """So many rows of these."""
        if isinstance(self.rows, slice):
            return replace(self, rows=rows)
        return replace(self, rows=pl.ds(self.rows.start + rows.start, rows.size))

    def panels(self, width: int | None = None) -> Iterator[tuple[int, Any]]:
        """First columns, and references: all that lies together, or so many columns at a time."""
        for start, panel in self._panels(self.read):
            size = panel.shape[1]
            for first in range(0, size, width or size):
                yield start + first, panel if width in (None, size) else panel.at[:, pl.ds(first, width)]

    def load_async(self, source: Any, barrier: Any) -> None:
        """By TMA from a reference to (rows, size) in device memory."""
        for start, panel in self._panels(self.landed):
            plgpu.copy_gmem_to_smem(self._columns(source, start, panel), panel, barrier)

    def send(self, target: Any) -> None:
        """By TMA, likewise."""
        for start, panel in self._panels(self.landed):
            plgpu.copy_smem_to_gmem(panel, self._columns(target, start, panel))

    def load(self) -> list[jax.Array]:
        """What `multiply_across` takes in place of the tile: its panels, in registers."""
        return [plgpu.load(panel, layout=plgpu.Layout.WGMMA) for _, panel in self.panels()]

    def store(self, values: jax.Array, width: int | None = None) -> None:
        """Rounds and stores; so many columns at a time take fewer registers."""
        for start, panel in self.panels(width):
            own = values if panel.shape[1] == values.shape[1] else values[:, start : start + panel.shape[1]]
            panel[...] = own.astype(self.form.dtype)

    def _panels(self, ref: Any) -> Iterator[tuple[int, Any]]:
        if not self.form.in_panels:
            yield 0, ref.at[(*self.stack, self.rows)]
            return
        for i in range(self.form.copies):
            panel = ref.at[(*self.stack, i, self.rows)]
            yield i * panel.shape[1], panel

    def _columns(self, array: Any, start: int, panel: Any) -> Any:
        if not self.form.in_panels:
            return array
        # The last panel may reach beyond the array, which JAX refuses of a start that it knows.
        return array.at[:, pl.ds(jnp.full((), start, jnp.int32), panel.shape[1])]


def multiply_across(sums: Any, left: RowTiles | list[jax.Array], right: RowTiles) -> None:
    """Starts sums += left @ right.T over rows' whole size, as many products as there are panels."""
    lefts = left if isinstance(left, list) else [panel for _, panel in left.panels()]
    for own, (_, other) in zip(lefts, right.panels(), strict=True):
        plgpu.wgmma(sums, own, other.transpose((1, 0)))


def multiply_down(sums: Any, left: Any, right: RowTiles) -> None:
    """Starts sums += left @ right over the tile's rows, as many products as there are panels."""
    for start, other in right.panels():
        own = sums.at[:, pl.ds(start, other.shape[1])] if right.form.in_panels else sums
        plgpu.wgmma(own, left, other)
