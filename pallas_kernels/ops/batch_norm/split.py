"""Who takes which rows: the division of rows over the warpgroups of a reduction."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

Index = jax.Array | int


@dataclass(frozen=True, kw_only=True)
class RowSplit:
    """`units` of `at_once` rows each, taken in turn by `lanes` warpgroups of each of `groups` groups."""

    units: int
    at_once: int
    groups: int
    lanes: int

    @property
    def together(self) -> int:
        """Warpgroups that share the rows."""
        return self.groups * self.lanes

    def unit(self, group: Index, lane: Index, trip: Index) -> Any:
        """What a warpgroup takes in its `trip`-th turn."""
        return trip * self.together + group * self.lanes + lane

    def trips(self, group: Index, lane: Index) -> Any:
        """How many turns a warpgroup has."""
        return lax.div(self.units - group * self.lanes - lane + self.together - 1, self.together)

    def count(self, group: jax.Array) -> jax.Array:
        """Rows of a group: at least one for those there are."""
        whole, left = divmod(self.units, self.together)
        rest = jnp.minimum(jnp.maximum(left - group * self.lanes, 0), self.lanes)
        return self.at_once * (self.lanes * whole + rest)
