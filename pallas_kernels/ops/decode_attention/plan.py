"""A launch without its arrays: the arithmetic of scores, how the cache is split, and the keys that each block reads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import lax

from pallas_kernels.ops.attention.scores import bounded
from pallas_kernels.primitives.exponents import LOG2_E
from pallas_kernels.primitives.hopper import SHARED_BYTES

HEAD_SIZES = (64, 96, 128, 192, 256)
"""Columns of the heads that the kernel takes."""
ROWS = 64
"""Rows of a product of the tensor cores."""
TILE_KEYS = 64
"""Keys of a tile: 128 are as fast (two parts 486.0, then 484.5 µs)."""
QUERIES = 2
"""Buffers for queries, so that those of the next part are loaded early."""
_OTHER_BYTES = 4096
"""Shared memory for barriers and the compiler's reductions."""
_FEWEST_KEYS = 128
"""The least keys of a part: fewer are not worth its overhead."""
_MOST_SPLITS = 64
_NEAR = 0.96
"""The share of the best occupancy that fewer parts must reach to be taken."""


@dataclass(frozen=True, kw_only=True)
class ScoreRule:
    """How products become scores, and the window of visible keys."""

    scale: float
    window: int | None
    softcap: float | None

    @property
    def factor(self) -> float:
        """The factor of differences of `prepare`'s scores in base 2; above zero, so that hidden keys weigh nothing."""
        return LOG2_E * (1.0 if self.softcap is not None else max(abs(self.scale), 1e-30))

    def prepare(self, products: jax.Array) -> jax.Array:
        """The scores without `factor`, which scales their differences: equal scores weigh the same, however large."""
        if self.softcap is None:
            return -products if self.scale < 0 else products
        return self.softcap * bounded(products, self.scale, self.softcap)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A launch without its arrays.

    tokens: queries of each sequence. group: query heads of a key head. The tokens * group queries of a key head are
        rows, in `row_blocks` of at most 64.
    keys: the capacity of a sequence's cache.
    splits: parts of each sequence's keys. A block takes several, of one sequence or more.
    warpgroups: consumers, which take a part's tiles in turn.
    stages: key tiles, and value tiles, in each consumer's ring.
    pages: the number of pages, each of `page_size` keys; None: the caches are not paged.
    appends: whether the launch writes the newest tokens' keys and values into the caches.
    """

    batch: int
    kv_heads: int
    tokens: int
    group: int
    keys: int
    head_size: int
    dtype: jnp.dtype
    scores: ScoreRule
    splits: int
    warpgroups: int
    stages: int
    pages: int | None = None
    page_size: int = 0
    appends: bool = False

    @property
    def pieces(self) -> int:
        """TMA copies that load a key tile, which may lie in several pages."""
        return 1 if self.pages is None else max(1, TILE_KEYS // self.page_size)

    @property
    def rows(self) -> int:
        """Rows of all row blocks, padded for TMA: fewer than eight, or whole groups of eight."""
        rows = self.tokens * self.group
        whole = 8 if rows <= ROWS else ROWS
        return rows if rows < whole else -(-rows // whole) * whole

    @property
    def row_blocks(self) -> int:
        """Blocks of up to 64 rows, each of which reads all keys."""
        return pl.cdiv(self.rows, ROWS)

    @property
    def items(self) -> int:
        """Work items of the launch."""
        return self.row_blocks * self.batch * self.kv_heads * self.splits

    @property
    def is_direct(self) -> bool:
        """Whether a part is a whole sequence with all its rows, so that its result is final."""
        # For TMA, a token's rows must begin at a multiple of 128 bytes in shared memory.
        is_aligned = self.tokens == 1 or stored_columns(self.head_size) * self.dtype.itemsize % 128 == 0
        return self.splits == 1 and self.row_blocks == 1 and is_aligned

    def item(self, index: jax.Array) -> Item:
        """The work item with this number.

        Key heads vary fastest: their rows lie side by side in memory. The parts of a sequence vary next, so that each
        block gets parts of many sequences, long ones and short ones.
        """
        index, head = index // self.kv_heads, lax.rem(index, self.kv_heads)
        index, row_block = index // self.row_blocks, lax.rem(index, self.row_blocks)
        batch, split = index // self.splits, lax.rem(index, self.splits)
        return Item(plan=self, batch=batch, head=head, row_block=row_block, split=split)


@dataclass(frozen=True, kw_only=True)
class Item:
    """A work item: a part of one sequence's keys, with one key head and one row block."""

    plan: Plan
    batch: jax.Array
    head: jax.Array
    row_block: jax.Array
    split: jax.Array

    def tiles(self, lengths: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Returns the sequence's length, and the part's first tile and number of tiles."""
        plan, size = self.plan, TILE_KEYS
        length = jnp.clip(lengths[self.batch], 0, plan.keys)
        end = (length + size - 1) // size
        begin = jnp.int32(0)
        if plan.scores.window is not None:
            begin = jnp.maximum(length - plan.tokens - plan.scores.window, 0) // size
        count = end - begin
        first = count * self.split // plan.splits
        last = count * (self.split + 1) // plan.splits
        return length, begin + first, last - first

    def sources(self, tile: jax.Array, page_table: Any) -> list[tuple[Any, ...]]:
        """The places in the caches of a tile's pieces."""
        plan, first = self.plan, tile * TILE_KEYS
        if plan.pages is None:
            return [(self.batch, pl.ds(first, TILE_KEYS), self.head)]
        size = TILE_KEYS // plan.pieces
        found = []
        for piece in range(plan.pieces):
            key = jnp.minimum(first + piece * size, plan.keys - size)
            # The table's entries behind the sequence's end may be anything.
            page = jnp.clip(page_table[self.batch, key // plan.page_size], 0, plan.pages - 1)
            found.append((page, pl.ds(lax.rem(key, plan.page_size), size), self.head))
        return found

    def newest(self, length: jax.Array, token: jax.Array, page_table: Any) -> tuple[jax.Array, tuple[Any, ...]]:
        """Returns a new token's position, and its place in the caches; the position may be negative."""
        plan = self.plan
        position = length - plan.tokens + token
        if plan.pages is None:
            return position, (self.batch, position, self.head)
        key = jnp.maximum(position, 0)
        page = jnp.clip(page_table[self.batch, key // plan.page_size], 0, plan.pages - 1)
        return position, (page, lax.rem(key, plan.page_size), self.head)

    def own(self, count: jax.Array, warpgroup: int | jax.Array) -> jax.Array:
        """The number of the part's tiles that a consumer takes."""
        return (count + self.plan.warpgroups - 1 - warpgroup) // self.plan.warpgroups


def fitting_stages(most: int, *, warpgroups: int, head_size: int, itemsize: int, new_tokens: int = 0) -> int:
    """The stages of a consumer's ring that fit in shared memory; `new_tokens` go into the caches."""
    query = (QUERIES * ROWS + 2 * new_tokens) * head_size * itemsize
    staging = warpgroups * ROWS * (stored_columns(head_size) + 2) * 4
    stage = 2 * warpgroups * TILE_KEYS * head_size * itemsize
    room = SHARED_BYTES - _OTHER_BYTES - query - staging
    return max(1, min(most, room // stage))


def stored_columns(head_size: int) -> int:
    """Columns of a result that are combined and stored at a time."""
    return 64 if head_size % 64 == 0 else 32


def choose_splits(sequences: int, keys: int, cores: int) -> int:
    """The fewest parts that keep nearly all multiprocessors busy until the end.

    sequences: pairs of a sequence and a key head, each with `keys` keys.
    """
    most = max(1, min(_MOST_SPLITS, keys // _FEWEST_KEYS))

    def busy(splits: int) -> float:
        parts = sequences * splits
        return parts / (-(-parts // cores) * cores)

    best = max(busy(splits) for splits in range(1, most + 1))
    return next(splits for splits in range(1, most + 1) if busy(splits) >= _NEAR * best)
