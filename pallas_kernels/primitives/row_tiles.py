"""Tiles of rows in shared memory: loaded and stored by TMA, read by tensor cores.

Tensor cores read swizzled groups of eight rows. TMA makes such groups of an array whose rows are a multiple of eight.
From any other array it loads panels, as wide as the swizzle, row after row: in memory a panel is the same as the groups
of a tile of that width. TMA fills rows beyond the last one with zeros, and does not store them; in panels also columns,
so that a tile may be wider than the array.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_kernels.primitives.hopper import TMA_ROWS
from pallas_kernels.primitives.platform import is_interpreted

HEAD_SIZES = (64, 128, 256)
"""Head sizes that fill tiles with whole heads, in pieces that TMA can store."""


def has_whole_groups(rows: int) -> bool:
    """Whether TMA can load an array of so many rows as it is."""
    return rows < TMA_ROWS or rows % TMA_ROWS == 0


def shared(shape: tuple[int, ...], dtype: jnp.dtype, *, swizzle: int | None = None) -> Any:
    """Returns a shared-memory array, swizzled for TMA and the tensor cores.

    swizzle: in bytes; None: as many as fit.
    """
    dtype = jnp.dtype(dtype)
    bits = jnp.iinfo(dtype).bits if jnp.issubdtype(dtype, jnp.integer) else 8 * dtype.itemsize
    swizzle = swizzle or plgpu.find_swizzle(shape[-1] * bits)
    transforms = (
        plgpu.TilingTransform((8, 8 * swizzle // bits)),  # pyright: ignore[reportAbstractUsage]
        plgpu.SwizzleTransform(swizzle),  # pyright: ignore[reportAbstractUsage]
    )
    return plgpu.SMEM(shape, dtype, transforms=transforms)


@dataclass(frozen=True, kw_only=True)
class TileForm:
    """The layout of tiles.

    size: columns. in_panels: for arrays of any length. has_all_rows: whether a tile has as many rows as the array, or
    more: then one copy loads all panels. swizzle: bytes; None: as many as fit.
    """

    size: int
    dtype: jnp.dtype
    in_panels: bool
    has_all_rows: bool = False
    swizzle: int | None = None

    @classmethod
    def of(cls, rows: int, *, has_all_rows: bool = False, **options: Any) -> TileForm:
        """Returns the layout for an array of so many rows: in panels if they are no multiple of 8."""
        in_panels = not has_whole_groups(rows)
        return cls(in_panels=in_panels, has_all_rows=in_panels and has_all_rows, **options)

    @property
    def copies(self) -> int:
        """TMA copies that load a tile, each of which arrives at the barrier."""
        return 1 if self.loads_at_once else self.panels

    @property
    def loads_at_once(self) -> bool:
        """Whether one copy loads all panels. In the interpreter, which has no layouts, a tile's array would differ."""
        return self.has_all_rows and not is_interpreted()

    @property
    def panels(self) -> int:
        """The number of a tile's panels."""
        return self.size // self._width if self.in_panels else 1

    def scratch(self, *shape: int) -> Any:
        """The scratch type of a stack of tiles; the last number of `shape` is a tile's rows."""
        if not self.in_panels:
            return shared((*shape, self.size), self.dtype, swizzle=self._swizzle)
        *stack, rows = shape
        swizzle = plgpu.SwizzleTransform(self._swizzle)  # pyright: ignore[reportAbstractUsage]
        shape = (*stack, self.panels, rows, self._width)
        if is_interpreted():  # it has other memory for each reference of a union, and knows no layouts
            return shared(shape, self.dtype, swizzle=self._swizzle)
        if self.loads_at_once:
            tiling = plgpu.TilingTransform((rows, self._width))  # pyright: ignore[reportAbstractUsage]
            landed = plgpu.SMEM((*stack, rows, self.size), self.dtype, transforms=(tiling, swizzle))
        else:
            landed = plgpu.SMEM(shape, self.dtype, transforms=(swizzle,))
        return plgpu.RefUnion(landed, shared(shape, self.dtype, swizzle=self._swizzle))

    def tiles(self, scratch: Any) -> RowTiles:
        """The tiles of a reference to `scratch`."""
        landed, read = scratch if self.in_panels and not is_interpreted() else (scratch, scratch)
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
    """A stack of tiles, one of them, or some of its rows.

    landed: the reference for TMA. read: the one for tensor cores and threads. stack: the index of a tile. rows: in it.
    """

    form: TileForm
    landed: Any
    read: Any
    stack: tuple[Any, ...] = ()
    rows: Any = slice(None)

    def at(self, *stack: Any, rows: Any = None) -> RowTiles:
        """One of the stacked tiles, or some rows of it."""
        return replace(self, stack=(*self.stack, *stack), rows=self.rows if rows is None else rows)

    @property
    def only_panel(self) -> Any:
        """The reference to a tile of a single panel."""
        ((_, panel),) = self.panels()
        return panel

    def panels(self, width: int | None = None) -> Iterator[tuple[int, Any]]:
        """Yields (first column, reference) for each panel, split into `width` columns if it is wider."""
        for start, panel in self._panels(self.read):
            size = panel.shape[1]
            own = min(width or size, size)
            for first in range(0, size, own):
                yield start + first, panel if own == size else panel.at[:, pl.ds(first, own)]

    def load_async(self, source: Any, barrier: Any, axes: str | None = None) -> None:
        """Starts TMA copies from a reference to (rows, size) in device memory, for all blocks along cluster `axes`."""
        if self.form.loads_at_once:
            place = self.landed.at[(*self.stack, self.rows)]
            plgpu.copy_gmem_to_smem(source, place, barrier, collective_axes=axes)
            return
        for start, panel in self._panels(self.landed):
            plgpu.copy_gmem_to_smem(self._columns(source, start, panel), panel, barrier, collective_axes=axes)

    def send(self, target: Any) -> None:
        """Starts TMA copies to a reference to (rows, size) in device memory."""
        for start, panel in self._panels(self.landed):
            plgpu.copy_smem_to_gmem(panel, self._columns(target, start, panel))

    def load(self) -> list[jax.Array]:
        """The tile's panels in registers, which `multiply_across` takes as its left operand."""
        return [plgpu.load(panel, layout=plgpu.Layout.WGMMA) for _, panel in self.panels()]

    def store(self, values: jax.Array, width: int | None = None) -> None:
        """Rounds and stores values, `width` columns at a time, which takes fewer registers."""
        for start, panel in self.panels(width):
            own = values if panel.shape[1] == values.shape[1] else values[:, start : start + panel.shape[1]]
            panel[...] = own.astype(self.form.dtype)

    def _panels(self, ref: Any) -> Iterator[tuple[int, Any]]:
        if not self.form.in_panels:
            yield 0, ref.at[(*self.stack, self.rows)]
            return
        for i in range(self.form.panels):
            panel = ref.at[(*self.stack, i, self.rows)]
            yield i * panel.shape[1], panel

    def _columns(self, array: Any, start: int, panel: Any) -> Any:
        if not self.form.in_panels:
            return array
        return array.at[:, columns_from(start, panel.shape[1])]


def columns_from(start: int, width: int) -> Any:
    """A slice of columns that may run past the end of the array, which JAX refuses if its start is static."""
    return pl.ds(jnp.full((), start, jnp.int32), width)


def multiply_across(sums: Any, left: RowTiles | list[jax.Array], right: RowTiles) -> None:
    """Starts sums += left @ right.T, one wgmma a panel."""
    lefts = left if isinstance(left, list) else [panel for _, panel in left.panels()]
    for own, (_, other) in zip(lefts, right.panels(), strict=True):
        plgpu.wgmma(sums, own, other.transpose((1, 0)))


def multiply_down(sums: Any, left: Any, right: RowTiles) -> None:
    """Starts sums += left @ right, one wgmma a panel."""
    for start, other in right.panels():
        own = sums.at[:, pl.ds(start, other.shape[1])] if right.form.in_panels else sums
        plgpu.wgmma(own, left, other)
