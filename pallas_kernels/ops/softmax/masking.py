"""Scale and mask of a softmax over (rows, features), in the form of its kernels.

A mask keeps its own rows: a row of x finds its mask row by index arithmetic, so a mask that batch or heads share is
never expanded.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import lax

from pallas_kernels.primitives.rows import (
    WARPS,
    Row,
    RowValues,
    Segment,
    load_columns,
    load_row,
    map_row,
    short_rows_at_once,
    to_float32,
)

MOST_REPEATED = 1.25
"""The most rows computed for each row, where a warpgroup takes several rows at once and the last one repeats some."""


@dataclass(frozen=True, kw_only=True)
class Masking:
    """The scale and mask of rows; static, and the same for all rows.

    scale: the factor of x, or None.
    is_boolean: the mask keeps (non-zero) or drops (zero); otherwise it is added.
    mask_index: terms (divisor, size, stride): row r of x has mask row sum((r // divisor) % size * stride).
    """

    scale: float | None = None
    is_boolean: bool = False
    mask_index: tuple[tuple[int, int, int], ...] = ()

    def rows_at_once(self, x: jax.Array) -> int:
        """Returns how many rows a warpgroup takes at once, or 0 for one; they have one mask row, or rows in order."""
        several, part = short_rows_at_once(x.shape, x.dtype.itemsize), x.shape[0] // self.parts(x.shape[0])
        while several > part or (several and pl.cdiv(part, several) * several > MOST_REPEATED * part):
            several = several // 2 if several > WARPS else 0
        return several

    def parts(self, rows: int) -> int:
        """Returns the number of equal parts of the rows that share one mask row or step through consecutive ones."""
        if not self.mask_index:
            return 1
        divisor, size, _ = self.mask_index[0]
        return rows // (size if divisor == 1 else divisor)

    def mask_row(self, row: jax.Array) -> jax.Array:
        """Returns the mask's row for a row of x."""
        terms = [lax.rem(row // divisor, size) * stride for divisor, size, stride in self.mask_index]
        return sum(terms, jnp.int32(0))

    def mask_rows(self, row: Row) -> Row:
        """Returns the mask's row for a row of x, or for the rows that a warpgroup takes at once, or their own rows."""
        if not isinstance(row, pl.Slice):
            return self.mask_row(row)
        first = self.mask_row(jnp.asarray(row.start))
        return pl.ds(first, row.size) if any(divisor == 1 for divisor, _, _ in self.mask_index) else first

    def apply(self, values: RowValues, mask: RowValues | None) -> RowValues:
        """Computes scores in float32; -inf where masked."""
        scores = to_float32(values)
        if self.scale is not None:
            scores = map_row(lambda v: v * jnp.float32(self.scale), scores)
        if mask is not None:
            hide = (lambda v, m: jnp.where(m != 0, v, -jnp.inf)) if self.is_boolean else jnp.add
            scores = map_row(hide, scores, mask if self.is_boolean else to_float32(mask))
        return scores


def mask_rows(mask: jax.Array, shape: Sequence[int]) -> tuple[jax.Array, tuple[tuple[int, int, int], ...]]:
    """Returns the mask as (its own rows, features), and `Masking.mask_index`.

    mask: broadcastable to `shape`, (..., features).
    """
    features, leading = shape[-1], tuple(shape[:-1])
    own = (1,) * (len(shape) - mask.ndim) + mask.shape
    if own[-1] != features:  # one value per row: expanded along the row, for the mask's own rows only
        mask = jnp.broadcast_to(mask.reshape(own), (*own[:-1], features))
    terms: list[tuple[int, int, int]] = []
    divisor = stride = 1
    for size, own_size in zip(reversed(leading), reversed(own[:-1]), strict=True):
        if own_size > 1:
            previous = terms[-1] if terms else None
            if previous and (previous[0] * previous[1], previous[2] * previous[1]) == (divisor, stride):
                terms[-1] = (previous[0], previous[1] * size, previous[2])
            else:
                terms.append((divisor, size, stride))
        divisor, stride = divisor * size, stride * own_size
    return mask.reshape(math.prod(own[:-1]), features), tuple(terms)


def load_mask(ref, segments: Sequence[Segment], row: Row) -> RowValues:
    """Reads the mask of a row. ref: (features,), or (rows, features) where the rows have masks of their own."""
    is_shared = isinstance(row, pl.Slice) and len(ref.shape) == 1
    return load_columns(ref, segments) if is_shared else load_row(ref, segments)
