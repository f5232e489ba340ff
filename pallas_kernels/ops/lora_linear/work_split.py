"""Assigns tiles to blocks if a few blocks compute x @ a for all."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

_MOST_LOW = 2
"""The most tiles of x @ a per block; each takes about as long as half a tile of the result."""


@dataclass(frozen=True, kw_only=True)
class WorkSplit:
    """The assignment of a launch's tiles to blocks.

    rows, columns: rows of tiles, and strips of the result's tiles in each. Each row has one tile of x @ a.
    blocks: the number of blocks of the launch, which all run at once.
    low_blocks: the number of blocks that compute x @ a: the first ones, so that no block waits for one that has not
        started. Strips are assigned to them last, so that they get the fewest.
    """

    rows: int
    columns: int
    blocks: int
    low_blocks: int

    @classmethod
    def of(cls, *, rows: int, columns: int, most: int) -> WorkSplit:
        """Returns the split of a launch. most: the number of blocks that run at once."""
        strips = rows * columns
        blocks = min(most, strips + rows)
        idle = blocks * -(-strips // blocks) - strips
        return cls(
            rows=rows, columns=columns, blocks=blocks, low_blocks=min(rows, blocks, max(idle, -(-rows // _MOST_LOW)))
        )

    def counts(self, block: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns the numbers of tiles of x @ a and of strips that a block computes."""
        lows = jnp.where(block < self.low_blocks, _count(self.rows, block, self.low_blocks), 0)
        return lows, _count(self.rows * self.columns, self._first(block), self.blocks)

    def low(self, block: jax.Array, n: jax.Array) -> jax.Array:
        """Returns the row of the n-th tile of x @ a of a block."""
        return block + n * self.low_blocks

    def place(self, block: jax.Array, n: jax.Array, group: int) -> tuple[jax.Array, jax.Array]:
        """Returns row and column of the n-th strip of a block. group: see `GemmConfig`."""
        number = self._first(block) + n * self.blocks
        return plgpu.planar_snake(number, (self.rows, self.columns), 0, min(group, self.rows))

    def _first(self, block: jax.Array) -> jax.Array:
        return lax.rem(block + (self.blocks - self.low_blocks), self.blocks)


def _count(total: int, first: jax.Array, step: int) -> jax.Array:
    """Returns how many of first, first + step, ... are less than total."""
    return lax.div(jnp.maximum(total - first + (step - 1), 0), step)
