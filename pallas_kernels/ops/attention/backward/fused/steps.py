"""Which head and which queries a block of the fused kernel is at in which step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import lax

from pallas_kernels.ops.attention.backward.fused.spread import Spread
from pallas_kernels.ops.attention.backward.tiles import Visits


@dataclass(frozen=True, kw_only=True)
class Steps:
    """Full tiles of queries come first, and of them and of those that are masked the last one first.

    visits: the tiles of queries, of each of `group` heads from `first_head` on. heads_inside: as in `FusedConfig`.
    spread: by which the block of the number `block` begins elsewhere and turns round, if any; all tiles are full then.
    """

    visits: Visits
    first_head: Any
    group: int
    heads_inside: bool
    spread: Spread | None = None
    block: Any = 0

    @property
    def full(self) -> Any:
        """Steps with full tiles."""
        return self.group * self.visits.full

    @property
    def count(self) -> Any:
        """All of them."""
        return self.full + self.group * self.visits.masked

    def place(self, n: Any, is_masked: bool | None = None) -> tuple[Any, Any]:
        """(head, tile of queries) of a step; is_masked: whether its tile is, where that is known."""
        visits, group = self.visits, self.group
        if self.spread is not None:
            (n, _), is_masked = self.spread.at(self.block, n), False
        if is_masked is None:
            masked, full = self.place(n, True), self.place(n, False)
            head, tile = (jnp.where(n >= self.full, *pair) for pair in zip(masked, full, strict=True))
            return head, tile
        i = n - self.full if is_masked else n
        # No count is divided by; at least 1 all the same, without which ptxas spills six registers.
        count = jnp.maximum(visits.masked if is_masked else visits.full, 1)
        if self.heads_inside and group > 1:
            g, i = lax.rem(i, group), count - 1 - lax.div(i, group)
        else:
            g, i = lax.div(i, count), count - 1 - lax.rem(i, count)
        return self.first_head + g, visits.masked_tile(i) if is_masked else visits.full_tile(i)
