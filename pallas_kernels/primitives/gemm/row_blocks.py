"""Blocks of rows of larger arrays that a product reads or writes in place, the block being known only when it runs.

Each device of a ring multiplies the blocks of the rows in an order of its own. A slice of the left operand before the
product, or a copy of its result to its place after it, would take 8 % as long as a product of 4096 features.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.experimental.pallas as pl
from jax import lax


@dataclass(frozen=True, kw_only=True)
class RowBlock:
    """One block's rows in arrays (batch, blocks, rows, columns).

    index: of the block, int32. shape: (batch, blocks). into: the arrays that get the results, if they exist already.
    """

    index: jax.Array
    shape: tuple[int, int]
    into: tuple[jax.Array, ...] = ()


@dataclass(frozen=True, kw_only=True)
class BlockReference:
    """A reference to a block of an array (batch, blocks, rows, columns), addressed like one to (batch * rows, columns).

    Tiles must not begin in one batch element and end in the next.
    """

    ref: Any
    index: Any

    @property
    def dtype(self) -> Any:
        """The array's dtype."""
        return self.ref.dtype

    @property
    def at(self) -> BlockReference:
        """Itself, which is indexed like a reference's `at`."""
        return self

    def __getitem__(self, index: tuple[pl.Slice, Any]) -> Any:
        rows, columns = index
        batch, _, size, _ = self.ref.shape
        if batch == 1:
            return self.ref.at[0, self.index, rows, columns]
        within = pl.ds(lax.rem(rows.start, size), rows.size)
        return self.ref.at[lax.div(rows.start, size), self.index, within, columns]
