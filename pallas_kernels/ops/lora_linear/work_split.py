"""Which block computes which tiles, where a few compute x @ a for all."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

Number = jax.Array | int

_MOST_LOWS = 2
"""Tiles of x @ a that one block should make at most: each takes about as long as half a tile of the result."""


@dataclass(frozen=True, kw_only=True)
class WorkSplit:
    """How the tiles of a launch are assigned to blocks.

    rows, columns: of tiles of the result ("units"). There is a tile of x @ a for each of the rows.
    blocks: of the launch, all on the device at once.
    makers: blocks that compute x @ a. They have the lowest numbers, which are started first, so that nobody waits for a
        block that has not begun; and they come last where units are assigned, so that they have the fewest.
    """

    rows: int
    columns: int
    blocks: int
    makers: int

    @classmethod
    def of(cls, *, rows: int, columns: int, most: int) -> WorkSplit:
        """most: blocks that run at once."""
        units = rows * columns
        blocks = min(most, units + rows)
        without = blocks * -(-units // blocks) - units
        return cls(
            rows=rows, columns=columns, blocks=blocks, makers=min(rows, blocks, max(without, -(-rows // _MOST_LOWS)))
        )

    def lows(self, block: Number) -> jax.Array:
        """How many tiles of x @ a a block makes."""
        return jnp.where(block < self.makers, _count(self.rows, block, self.makers), 0)

    def low(self, block: Number, n: Number) -> Number:
        """The rows of the n-th of them."""
        return block + n * self.makers

    def units_of(self, block: Number) -> jax.Array:
        """How many units a block makes."""
        return _count(self.rows * self.columns, self._first(block), self.blocks)

    def place(self, block: Number, n: Number, group: int) -> tuple[jax.Array, jax.Array]:
        """Row and column of the n-th of them. group: see `GemmConfig`."""
        number = self._first(block) + n * self.blocks
        return plgpu.planar_snake(number, (self.rows, self.columns), 0, min(group, self.rows))

    def _first(self, block: Number) -> jax.Array:
        return lax.rem(block + (self.blocks - self.makers), self.blocks)


def _count(total: int, first: Number, step: int) -> jax.Array:
    """How many of first, first + step, ... are less than total."""
    return lax.div(jnp.maximum(total - first + (step - 1), 0), step)
