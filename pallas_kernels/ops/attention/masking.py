"""Which keys a query sees: for tiles (which ones to visit, and to mask) and for elements.

The mask is a band of diagonals (causal attention and windows), the keys' length, and segments of packed documents. The
same functions take Python integers, a kernel's scalars and arrays, and serve both passes and tests. Dense mask and bias
arrays are not here, as they skip no tile.

Queries beyond the last need no mask: they are rows of zeros, their results are not stored, and their cotangents are
zero.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

Side = Literal["left", "right"]


class TileRange(NamedTuple):
    """Tiles in [first, last) are visited; in [full_first, full_last) no element is masked.

    first <= full_first <= full_last <= last, each an integer, a scalar or an array.
    """

    first: Any
    full_first: Any
    full_last: Any
    last: Any

    @classmethod
    def of(cls, table: Any, batch: Any, tile: Any) -> TileRange:
        """The entry of a tile, in a reference to a table of `segment_tiles`."""
        return cls(*(table[batch, tile, i] for i in range(4)))

    @property
    def masked(self) -> Any:
        """The number of masked tiles, before the full ones and after them."""
        return self.full_first - self.first + self.last - self.full_last

    @property
    def full(self) -> Any:
        """The number of full tiles."""
        return self.full_last - self.full_first

    @property
    def has_masked(self) -> bool:
        """Whether there may be masked tiles."""
        return not isinstance(self.masked, int) or self.masked > 0

    def masked_tile(self, i: Any) -> Any:
        """The i-th masked tile."""
        before = self.full_first - self.first
        return jnp.where(i < before, self.first + i, self.full_last + i - before)

    def full_tile(self, i: Any) -> Any:
        """The i-th full tile."""
        return self.full_first + i


@dataclass(frozen=True, kw_only=True)
class Masking:
    """The mask of a launch, except for a dense array.

    queries, keys: the lengths. Query i and key i are on one diagonal, also where the lengths differ.
    left: the number of keys that a query sees before its own place; None: all.
    right: the number of keys that a query sees after its own place; None: all. Causal attention: 0.
    has_segments: query and key must also be of the same segment.
    """

    queries: int
    keys: int
    left: int | None = None
    right: int | None = None
    has_segments: bool = False

    @property
    def is_causal(self) -> bool:
        """Whether a query sees no key after its own place."""
        return self.right is not None and self.right <= 0

    @property
    def has_band(self) -> bool:
        """Whether a causal mask or a window hides keys."""
        return self.left is not None or self.right is not None

    @property
    def pairs(self) -> int | None:
        """The number of visible pairs of query and key; None with segments."""
        if self.has_segments:
            return None
        row = np.arange(self.queries, dtype=np.int64)
        first = 0 if self.left is None else np.maximum(row - self.left, 0)
        last = self.keys if self.right is None else np.clip(row + self.right + 1, 0, self.keys)
        return int(np.broadcast_to(np.maximum(last - first, 0), row.shape).sum())

    @property
    def masks_before(self) -> bool:
        """Whether key tiles before the full ones may be masked."""
        return self.left is not None or self.has_segments

    def key_tiles(self, row: Any, rows: int, columns: int) -> TileRange:
        """The key tiles, of `columns` keys, for the `rows` queries from `row` on; ignores segments."""
        last = _minimum(row + rows, self.queries) - 1
        return _band_tiles(row, last, self.left, self.right, columns, length=self.keys, whole=self.keys)

    def query_tiles(self, column: Any, columns: int, rows: int) -> TileRange:
        """The query tiles, of `rows` queries, for the `columns` keys from `column` on; ignores segments."""
        last = _minimum(column + columns, self.keys) - 1
        # The last tile may go beyond the queries: their rows need no mask.
        whole = -(-self.queries // rows) * rows
        tiles = _band_tiles(column, last, self.right, self.left, rows, length=self.queries, whole=whole)
        if self.keys % columns == 0:
            return tiles
        # A tile with keys beyond the last one is masked throughout.
        is_whole = column + columns <= self.keys
        none = _where(is_whole, tiles.full_last, tiles.full_first)
        return tiles._replace(full_last=none)

    def has_sides(self, rows: int, columns: int) -> bool:
        """Whether no tile of `rows` queries and `columns` keys is cut both by `left` and by `right` or the end.

        Key tiles before the full ones are then cut by `left` alone, and those after them by `right` and the end alone.
        Segments may leave no full tile, and then nothing tells one from the other.
        """
        if self.left is None or self.right is None or self.has_segments or self.queries > self.keys:
            return False
        return self.right >= 0 and self.left >= rows + columns

    def visible(
        self,
        row: Any,
        column: Any,
        row_segments: Any = None,
        column_segments: Any = None,
        *,
        tile: int = 0,
    ) -> Any:
        """Returns which elements are visible, boolean; None if all are.

        row, column: the elements' places, integer arrays that broadcast. row_segments, column_segments: the segments of
        these places, likewise; needed with `has_segments`. tile: the length of key tiles: if it divides `keys`, no
        place is beyond the last key, and that is not compared. 0: it is.
        """
        conditions = []
        if self.right is not None:
            conditions.append(column <= (row + self.right if self.right else row))
        if self.left is not None:
            conditions.append(column >= (row - self.left if self.left else row))
        if not tile or self.keys % tile:
            conditions.append(column < self.keys)
        if self.has_segments:
            conditions.append(row_segments == column_segments)
        seen = conditions[0] if conditions else None
        for condition in conditions[1:]:
            seen = seen & condition
        return seen


def segment_tiles(
    tiles_of: Callable[..., TileRange], own: jax.Array, other: jax.Array, own_size: int, other_size: int
) -> jax.Array:
    """`Masking.key_tiles` of every query tile, or `Masking.query_tiles` of every key tile, with segments.

    A tile is visited if its range of segment numbers meets that of the tile that visits. Numbers need not be sorted; if
    they are, as for packed documents, no tile is visited in vain.

    Args:
        tiles_of: that method.
        own, other: the segments of the places whose tiles visit, and of those whose tiles are visited, integers
            (batch, length).
        own_size, other_size: the lengths of their tiles.

    Returns:
        (batch, own tiles, 4), int32: the members of `TileRange`.
    """
    (own_low, own_high), (other_low, other_high) = _extent(own, own_size), _extent(other, other_size)
    bounds = tiles_of(jnp.arange(own_low.shape[1], dtype=jnp.int32) * own_size, own_size, other_size)
    bounds = (jnp.broadcast_to(jnp.asarray(bound), own_low.shape[1:])[None, :, None] for bound in bounds)
    first, full_first, full_last, last = bounds
    own_low, own_high = own_low[:, :, None], own_high[:, :, None]
    other_low, other_high = other_low[:, None], other_high[:, None]
    tile = jnp.arange(other_low.shape[-1], dtype=jnp.int32)
    matters = (own_low <= other_high) & (other_low <= own_high) & (first <= tile) & (tile < last)
    is_full = (own_low == own_high) & (other_low == other_high) & (own_low == other_low)
    is_full &= (full_first <= tile) & (tile < full_last)
    start, end = _first(matters), len(tile) - _first(matters[..., ::-1])
    end = jnp.where(matters.any(-1), end, start)
    full_start = jnp.where(is_full.any(-1), _first(is_full), end)
    # If numbers are not sorted, only the first run of full tiles counts as full.
    run_end = _first(~is_full & (tile >= full_start[..., None]), default=len(tile))
    full_end = jnp.minimum(jnp.maximum(run_end, full_start), end)
    return jnp.stack([start, full_start, full_end, end], axis=-1).astype(jnp.int32)


def padded_segments(segments: jax.Array, multiple: int) -> jax.Array:
    """Segment numbers (batch, length) as int32, the last one repeated up to a multiple of a tile."""
    extra = -segments.shape[1] % multiple
    return jnp.pad(segments.astype(jnp.int32), ((0, 0), (0, extra)), mode="edge")


def _extent(segments: jax.Array, size: int) -> tuple[jax.Array, jax.Array]:
    """The least and the greatest segment number of each tile, (batch, tiles)."""
    tiles = padded_segments(segments, size).reshape(segments.shape[0], -1, size)
    return tiles.min(-1), tiles.max(-1)


def _first(condition: jax.Array, *, default: int = 0) -> jax.Array:
    """The place of the first True along the last axis."""
    return jnp.where(condition.any(-1), jnp.argmax(condition, -1), default)


def _band_tiles(
    place: Any, last: Any, before: int | None, after: int | None, size: int, *, length: int, whole: int
) -> TileRange:
    """The tiles of `size` places that those from `place` to `last` see: from `before` them to `after` them.

    length: of the places that are seen. whole: the same for full tiles.
    """
    start = 0 if before is None else _maximum(place - before, 0)
    end = length if after is None else _minimum(length, _maximum(last + after + 1, 0))
    full_start = 0 if before is None else _maximum(last - before, 0)
    full_end = whole if after is None else _minimum(whole, _maximum(place + after + 1, 0))
    first = _divide(start, size)
    tiles_end = _maximum(_divide(end + size - 1, size), first)
    full_first = _minimum(_maximum(_divide(full_start + size - 1, size), first), tiles_end)
    full_last = _minimum(_maximum(_divide(full_end, size), full_first), tiles_end)
    return TileRange(first, full_first, full_last, tiles_end)


def _divide(value: Any, size: int) -> Any:
    """value // size, for value >= 0: a plain division, without the correction for negative numbers."""
    return value // size if isinstance(value, int) else jax.lax.div(value, jnp.asarray(size, value.dtype))


def _minimum(a: Any, b: Any) -> Any:
    return min(a, b) if isinstance(a, int) and isinstance(b, int) else jnp.minimum(a, b)


def _maximum(a: Any, b: Any) -> Any:
    return max(a, b) if isinstance(a, int) and isinstance(b, int) else jnp.maximum(a, b)


def _where(condition: Any, a: Any, b: Any) -> Any:
    return (a if condition else b) if isinstance(condition, bool) else jnp.where(condition, a, b)
