"""Assigns tiles to blocks if a few blocks compute x @ a for all."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

Number = jax.Array | int

_MOST_LOWS = 2
"""The most tiles of x @ a per block; each takes about as long as half a tile of the result."""


@dataclass(frozen=True, kw_only=True)
class WorkSplit:
    """The assignment of a launch's tiles to blocks.

    rows, columns: rows and columns of tiles of the result ("units"). Each row has one tile of x @ a.
    blocks: the number of blocks of the launch, which all run at once.
    makers: the number of blocks that compute x @ a. They have the lowest numbers, which start first, so that no block
        waits for one that has not started. Units are assigned to them last, so that they get the fewest.
    """

    rows: int
    columns: int
    blocks: int
    makers: int

    @classmethod
    def of(cls, *, rows: int, columns: int, most: int) -> WorkSplit:
        """Returns the split of a launch. most: the number of blocks that run at once."""
        units = rows * columns
        blocks = min(most, units + rows)
        without = blocks * -(-units // blocks) - units
        return cls(
            rows=rows, columns=columns, blocks=blocks, makers=min(rows, blocks, max(without, -(-rows // _MOST_LOWS)))
        )

    def lows(self, block: Number) -> jax.Array:
        """The number of tiles of x @ a that a block computes."""
        return jnp.where(block < self.makers, _count(self.rows, block, self.makers), 0)

    def low(self, block: Number, n: Number) -> Number:
        """Returns the n-th tile of x @ a of a block."""
        return block + n * self.makers

    def units_of(self, block: Number) -> jax.Array:
        """The number of units that a block computes."""
        return _count(self.rows * self.columns, self._first(block), self.blocks)

    def place(self, block: Number, n: Number, group: int) -> tuple[jax.Array, jax.Array]:
        """Returns row and column of the n-th unit of a block. group: see `GemmConfig`."""
        number = self._first(block) + n * self.blocks
        return plgpu.planar_snake(number, (self.rows, self.columns), 0, min(group, self.rows))

    def _first(self, block: Number) -> jax.Array:
        return lax.rem(block + (self.blocks - self.makers), self.blocks)


def _count(total: int, first: Number, step: int) -> jax.Array:
    """Returns how many of first, first + step, ... are less than total."""
    return lax.div(jnp.maximum(total - first + (step - 1), 0), step)
