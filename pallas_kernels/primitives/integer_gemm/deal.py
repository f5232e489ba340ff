"""Tiles of three heights, dealt out so that all blocks have about as many rows.

Of 512 rows and 14336 columns, tiles of 256 × 128 are 224: 132 blocks take two turns, and in the second one 40 of them
have none. Here the rows are eight parts, of 64 each. Some columns have them cut into 4 + 4, the others into 3 + 3 + 2,
and a block has tiles of 4 + 3 parts, 4 + 2, or 2 + 2 + 2: none more than seven, where two turns are eight.

With C columns of tiles and P blocks, all tiles given to somebody:
    4 + 4 have 3 (P - C) columns, 3 + 3 + 2 have 4 C - 3 P;
    4 + 2 have 12 P - 14 C blocks, 4 + 3 have 8 C - 6 P, 2 + 2 + 2 have 6 C - 5 P.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.primitives.integer_gemm.config import IntegerGemmConfig

PARTS = 8
"""Of the rows."""
TALLEST = 4
"""Parts of the tallest tile."""

Place = Callable[[jax.Array], tuple[jax.Array, jax.Array]]
"""From the number of a block's tile to its column, in tiles, and its first part."""


@dataclass(frozen=True, kw_only=True)
class Deal:
    """columns: of tiles. blocks: that take them; those of 4 + 2 first, then of 4 + 3, then of 2 + 2 + 2."""

    columns: int
    blocks: int

    @classmethod
    def of(cls, rows: int, outputs: int, config: IntegerGemmConfig, blocks: int) -> Deal | None:
        """That of a (rows, outputs) result, or None where rows are not eight parts or a tile finds no block."""
        deal = cls(columns=-(-outputs // (config.cluster * config.columns)), blocks=blocks)
        parts = -(-rows // (config.rows // TALLEST))
        return deal if parts == PARTS and deal.is_even else None

    @property
    def is_even(self) -> bool:
        """Whether each tile finds a block: from 5/6 to 6/7 as many columns as blocks."""
        return 5 * self.blocks <= 6 * self.columns and 7 * self.columns <= 6 * self.blocks

    def turns(self, block: jax.Array) -> Iterator[tuple[int, jax.Array, Place]]:
        """For each height, in parts: how many tiles of it the block has, and where they are."""
        halved = 3 * (self.blocks - self.columns)
        short = 12 * self.blocks - 14 * self.columns
        tall = 2 * halved

        def four(_):
            return lax.div(block, 2), 4 * lax.rem(block, 2)

        def three(_):
            tile = block - short
            return halved + lax.div(tile, 2), 3 * lax.rem(tile, 2)

        def two(n):
            return halved + jnp.where(block < short, block, short + 3 * (block - tall) + n), jnp.int32(6)

        yield 4, (block < tall).astype(jnp.int32), four
        yield 3, ((block >= short) & (block < tall)).astype(jnp.int32), three
        yield 2, jnp.where(block < short, 1, jnp.where(block >= tall, 3, 0)), two
