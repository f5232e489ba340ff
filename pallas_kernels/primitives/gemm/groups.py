"""Consecutive groups of rows, whose sizes are data: each block of a launch finds their bounds and tiles by itself.

As a program of XLA it would be four launches.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

_PART = 64
"""Groups that are summed at a time: the rows of the tensor cores' layout."""
_LOADED = 4
"""Parts whose sizes are loaded together, in 16 registers each: the next part's need not wait for this one's sums."""
_LAYOUT = plgpu.Layout.WGMMA
REDUCTIONS: Mapping[str, Any] = {"reduction_scratch_bytes": 0}
"""For `launcher`: sums of rows need no shared memory, which the table takes instead."""


@dataclass(frozen=True, kw_only=True)
class RowTile:
    """A tile's group, first row and number of rows. is_product: whether it has rows of a group."""

    group: jax.Array
    first: jax.Array
    count: jax.Array
    is_product: jax.Array


def padded_sizes(group_sizes: jax.Array) -> jax.Array:
    """Pads the sizes with zeros, as `Groups` reads them: to eight, or to whole parts of 64. Most need none."""
    multiple = 8 if group_sizes.size < _PART else _PART
    return jnp.pad(group_sizes.astype(jnp.int32), (0, -group_sizes.size % multiple))


def group_types(group_sizes: jax.Array) -> tuple[Any, Any]:
    """Returns the scratch types of `Groups.table` and `Groups.is_listed`."""
    return plgpu.SMEM((2, pl.cdiv(group_sizes.size, _PART) * _PART), jnp.int32), plgpu.Barrier()


def table_bytes(count: int) -> int:
    """Returns the shared memory that the table takes beyond `REDUCTIONS`' 2048 bytes: none up to 256 groups."""
    return max(0, 2 * 4 * pl.cdiv(count, _PART) * _PART - 2048)


@dataclass(frozen=True, kw_only=True)
class Groups:
    """The groups of a launch's rows. Negative sizes count as zero; groups end at the last row.

    count: of groups. rows: in all; those of no group are last. tile: the most rows of a tile.
    sizes: `padded_sizes`, in device memory.
    table: in shared memory, where each group's rows end, and the number of tiles up to its last one.
    is_listed: a barrier, passed when the table is complete.
    """

    count: int
    rows: int
    tile: int
    sizes: Any
    table: Any
    is_listed: Any

    def list(self) -> None:
        """Fills the table; one warpgroup calls it. Then each warpgroup waits for `is_listed`."""
        width = min(_PART, self.sizes.shape[0])
        row, column = (plgpu.broadcasted_iota(jnp.int32, (_PART, width), axis, layout=_LAYOUT) for axis in (0, 1))

        def load(part: int) -> jax.Array:
            place = self.sizes.at[pl.ds(part * width, width)]
            return jnp.clip(plgpu.load(place, layout=_LAYOUT.reduce(0), optimized=False), 0, self.rows)

        parts = self.sizes.shape[0] // width
        before: list[Any] = [0, 0]
        for first in range(0, parts, _LOADED):
            loaded = [load(part) for part in range(first, min(first + _LOADED, parts))]
            for part, sizes in enumerate(loaded, first):
                for line, own in enumerate((sizes, _tiles(sizes, self.tile))):
                    own = lax.broadcast_in_dim(own, (_PART, width), (1,))
                    sums = jnp.sum(jnp.where(column <= row, own, 0), axis=1)
                    self.table[line, pl.ds(part * _PART, _PART)] = sums + before[line]
                    if part + 1 < parts:
                        before[line] += jnp.sum(own, axis=1)
        plgpu.commit_smem()
        plgpu.barrier_arrive(self.is_listed)

    def bounds(self, group: jax.Array | int) -> tuple[jax.Array, jax.Array]:
        """Returns where a group's rows start and end; those of no group follow as the last one's."""
        return jnp.minimum(self._before(0, group), self.rows), self._end(group)

    def tiles(self) -> jax.Array:
        """Returns the number of tiles: those of each group, then those of the rows of none."""
        most = pl.cdiv(self.rows, self.tile) + self.count  # behind these, groups are behind the last row
        start, end = self.bounds(self.count)
        return jnp.minimum(self._before(1, self.count), most) + _tiles(end - start, self.tile)

    def tile_at(self, number: jax.Array) -> RowTile:
        """Returns a tile, with no rows if its group is behind the last row."""
        group, unit = jnp.int32(0), 4 ** ((self.count.bit_length() - 1) // 2)
        while unit:  # digits of base 4: the three loads of one need not wait for one another
            for place in [group + digit * unit for digit in (1, 2, 3)]:
                is_before = self.table[1, jnp.minimum(place, self.count) - 1] <= number
                group += jnp.where((place <= self.count) & is_before, unit, 0)
            unit //= 4
        start, end = self.bounds(group)
        first = start + (number - self._before(1, group)) * self.tile
        count = jnp.minimum(end - first, self.tile)
        return RowTile(group=group, first=first, count=count, is_product=(group < self.count) & (count > 0))

    def _before(self, line: int, group: jax.Array | int) -> jax.Array:
        """Returns a line's value of the group before, zero for the first."""
        return jnp.where(group > 0, self.table[line, jnp.maximum(group - 1, 0)], 0)

    def _end(self, group: jax.Array | int) -> jax.Array:
        end = jnp.minimum(self.table[0, jnp.minimum(group, self.count - 1)], self.rows)
        return jnp.where(group < self.count, end, self.rows)


def _tiles(rows: jax.Array, tile: int) -> jax.Array:
    return lax.div(rows + (tile - 1), jnp.full_like(rows, tile))
