"""The order of query tiles, and how the blocks of a launch share them."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.ops.attention.problem import Problem

L2_BYTES = 24 * 1024 * 1024
"""Bytes of keys and values in use at a time: half of the L2 cache of an H200."""

TILE_COST = 1
"""The fixed cost of a query tile, in key tiles."""


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """The order of all query tiles, and how blocks share it.

    Heads that share keys come next to each other. Where tiles differ in work (causal attention: a head's last tile has
    the most), heads come in sections whose keys and values fit in the L2 cache, and in each section the longest tiles
    of all heads come first, so that short ones run at the end.

    tiles: query tiles of a head. heads: of all batch entries. section: heads of a section, a divisor of `heads`.
    blocks: of the launch. costs: of a head's tiles, where they differ; a table then gives each tile to the block that
        is free first; else block b takes the places b, b + blocks, ...
    """

    tiles: int
    heads: int
    section: int
    blocks: int
    costs: tuple[int, ...] | None = None

    @classmethod
    def of(cls, problem: Problem, rows: int, columns: int, blocks: int | None) -> Schedule:
        """The schedule of a problem; blocks: None for one a tile."""
        masking = problem.masking
        tiles = -(-masking.queries // rows)
        heads = problem.batch * problem.heads
        # With a window, a block for each tile need not begin with the longest.
        is_dealt = masking.left is None or blocks is not None
        differs = masking.right is not None and is_dealt and not masking.has_segments
        pairs = max(1, L2_BYTES // (2 * masking.keys * (problem.head_size + problem.value_size)))
        section = problem.group
        if differs:
            whole = problem.batch * problem.key_heads
            section *= max(count for count in range(1, min(pairs, whole) + 1) if whole % count == 0)
        costs = None
        if differs:
            bounds = (masking.key_tiles(tile * rows, rows, columns) for tile in range(tiles))
            costs = tuple(max(1, bound.last - bound.first) + TILE_COST for bound in bounds)
        total = tiles * heads
        blocks = total if blocks is None else min(blocks, total)
        return cls(tiles=tiles, heads=heads, section=section, blocks=blocks, costs=costs)

    @property
    def table(self) -> np.ndarray | None:
        """(blocks, 1 + longest): each block's count of tiles, and their places; None where no table is needed."""
        total = self.tiles * self.heads
        if self.costs is None or self.blocks == total:
            return None
        taken: list[list[int]] = [[] for _ in range(self.blocks)]
        free = [(0, block) for block in range(self.blocks)]
        for index in range(total):
            done, block = heapq.heappop(free)
            taken[block].append(index)
            tile = self.tiles - 1 - index % (self.section * self.tiles) // self.section
            heapq.heappush(free, (done + self.costs[tile], block))
        table = np.zeros((self.blocks, 1 + max(map(len, taken))), np.int32)
        for block, places in enumerate(taken):
            table[block, : 1 + len(places)] = (len(places), *places)
        return table

    def place(self, index: jax.Array) -> tuple[jax.Array, jax.Array]:
        """(head of all batch entries, tile) of a place in the order."""
        places = self.section * self.tiles
        section, rest = lax.div(index, places), lax.rem(index, places)
        tile, head = lax.div(rest, self.section), lax.rem(rest, self.section)
        if self.costs is not None:
            tile = self.tiles - 1 - tile
        return section * self.section + head, tile

    def for_each(self, block: jax.Array, table: Any, work: Callable[..., jax.Array], carry: jax.Array) -> jax.Array:
        """Runs carry = work(head, tile, number of the block's earlier tiles, carry) for each of the block's tiles.

        table: a reference to `table`, or None.
        """
        total = self.tiles * self.heads
        if self.blocks == total:
            return work(*self.place(block), jnp.int32(0), carry)
        if table is None:
            rounds, rest = divmod(total, self.blocks)
            count = rounds + (block < rest).astype(jnp.int32)

            def one(i, carry):
                return work(*self.place(i * self.blocks + block), i, carry)

            return lax.fori_loop(jnp.int32(0), count, one, carry)
        count, longest = table[block, 0], table.shape[1] - 2

        def listed(i, carry):
            index, carry = carry
            # The next place is read while this one's work is done.
            following = table[block, 1 + jnp.minimum(i + 1, longest)]
            return following, work(*self.place(index), i, carry)

        return lax.fori_loop(jnp.int32(0), count, listed, (table[block, 1], carry))[1]
