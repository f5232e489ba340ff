"""Blocks of the fused kernel that each begin at a tile of queries of its own, and do not wait in a row for their turns.

Where all queries see all keys, the blocks that share queries go over the same tiles. If they began with the same one
they would come to it at once, and add one after the other. Here each begins somewhere else, goes on to the last tile of
a span and then over those before its first. What it makes before it turns round is added to one sum, what it makes
afterwards to another. Blocks that are launched first begin furthest on: so they come first to each tile, before they
turn round and after it, and each block waits only for those launched before it, however few run at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import lax

SUMS = 2
"""Of each tile of queries: of the blocks that come to it before they turn round, and of those that come after it."""


@dataclass(frozen=True, kw_only=True)
class Spread:
    """blocks: that share queries, by number in the order of their launch. span: tiles of queries, of one head or more,
    that each goes over before it goes on to others."""

    blocks: int
    span: int

    def begins(self, block: Any) -> Any:
        """The tile of a span with which a block begins; the last block with the first one."""
        return lax.div((self.blocks - 1 - block) * self.span, jnp.int32(self.blocks))

    def at(self, block: Any, step: Any) -> tuple[Any, Any]:
        """(the tile of a block's step, by its number in the order of tiles; whether the block has turned round)."""
        begin = self.begins(block)
        has_turned = lax.rem(step, jnp.int32(self.span)) >= self.span - begin
        return step + begin - jnp.where(has_turned, self.span, 0), has_turned

    def later(self, tile: Any) -> Any:
        """How many blocks come to a tile of a span after they have turned round: the first ones."""
        not_later = lax.div((tile + 1) * self.blocks - 1, jnp.int32(self.span)) + 1
        return self.blocks - jnp.minimum(not_later, self.blocks)

    def turn(self, block: Any, tile: Any, has_turned: Any) -> Any:
        """How many blocks add to a tile's sum before this one does; tile: by its number in the order of tiles."""
        in_span = lax.rem(tile, jnp.int32(self.span))
        return jnp.where(has_turned, block, block - self.later(in_span))
