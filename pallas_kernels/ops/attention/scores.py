"""From a product of queries and keys to weights: scale, softcap, bias, mask, dropout. Scores are in base 2."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.ops.attention.dropout import packed_kept, packed_unit, rounded, with_kept
from pallas_kernels.ops.attention.masking import Side
from pallas_kernels.ops.attention.problem import LOG2_E, Problem
from pallas_kernels.primitives.random import Words

Weights = tuple[jax.Array, ...]
"""Weights, or weights in the problem's type and what they are still to be multiplied by.

What wgmma reads may be made of them only when the one before has ended: to a loop, the operands of both are one
register, and ptxas would have every single wgmma waited for.
"""


_REGISTER = 8
"""Columns of a register of the accumulators' layout."""


_LARGE_CAP, _SMALL_ANGLE = 1000, 0.02


def capped(products: jax.Array, scale: float, softcap: float) -> tuple[jax.Array, jax.Array]:
    """(softcap * bounded, in base 2, and bounded), bounded = tanh(scale * products / softcap).

    From one exponential: the hardware's own tanh is off by 5e-4, which a softcap of 50 makes 2% of a weight. It is off
    by 3e-7; where a large cap would make that visible, small scores are by their series.
    """
    bounded = 1 - 2 / (1 + jnp.exp2(products * (2 * LOG2_E * scale / softcap)))
    scores = bounded * (softcap * LOG2_E)
    if softcap > _LARGE_CAP:
        factor = 1 - bounded * bounded * (1 / 3)
        scores = jnp.where(jnp.abs(bounded) < _SMALL_ANGLE, products * (scale * LOG2_E) * factor, scores)
    return scores, bounded


@dataclass(frozen=True, kw_only=True)
class Scores:
    """What becomes of the products of a tile of 64 queries by `columns` keys, in the layout of the accumulators.

    extras: references to `Extras`' arrays, padded to whole tiles. words: what `mixed_words` gives, for dropout.
    packs_dropout: whether that may take weights in pairs. short_masks: see `ForwardConfig`.
    """

    problem: Problem
    columns: int
    extras: dict[str, Any]
    words: Words | None = None
    packs_dropout: bool = False
    short_masks: bool = False

    @property
    def factor(self) -> float:
        """What `scaled`'s scores are still to be multiplied by, above zero: part of the exponential's own product."""
        problem = self.problem
        is_plain = problem.softcap is None and problem.dense != "bias" and problem.scale > 0
        return problem.scale * LOG2_E if is_plain else 1.0

    def scaled(self, product: jax.Array, batch: Any, head: Any, row: Any, column: Any) -> jax.Array:
        """Scaled, capped, and with the dense array's part: what does not depend on the tile's place in the mask."""
        problem = self.problem
        scores = product
        if problem.softcap is not None:
            scores = capped(scores, problem.scale, problem.softcap)[0]
        elif self.factor == 1.0:
            scores = scores * (problem.scale * LOG2_E)
        if problem.dense == "bias":
            scores = scores + self._dense(batch, head, row, column).astype(jnp.float32) * LOG2_E
        elif problem.dense == "mask":
            scores = jnp.where(self._dense(batch, head, row, column) != 0, scores, -jnp.inf)
        return scores

    def masked(
        self,
        scores: jax.Array,
        row: Any,
        column: Any,
        segments: tuple[jax.Array, jax.Array] | None,
        side: Side | None = None,
    ) -> jax.Array:
        """-inf where the mask hides the key. segments: the numbers of the tile's queries and of its keys."""
        if self.short_masks and segments is None:
            return self._within_bounds(scores, row, column, side)
        rows, columns = self._places(row, column)
        own = () if segments is None else (lax.broadcast_in_dim(v, scores.shape, (i,)) for i, v in enumerate(segments))
        seen = self.problem.masking.visible(rows, columns, *own, tile=self.columns, side=side)
        return scores if seen is None else jnp.where(seen, scores, -jnp.inf)

    @property
    def packs(self) -> bool:
        """Whether dropout takes weights in pairs."""
        return self.packs_dropout and packed_unit(self.problem) is not None

    @property
    def kept_unit(self) -> float:
        """What kept weights are multiplied by."""
        return (packed_unit(self.problem) or 1.0) if self.packs else 1.0

    def _within_bounds(self, scores: jax.Array, row: Any, column: Any, side: Side | None) -> jax.Array:
        """`masked` by places in the tile, of which a thread's share is taken off the bounds, once for each row."""
        masking, layout = self.problem.masking, plgpu.Layout.WGMMA
        rows, places = (plgpu.broadcasted_iota(jnp.int32, (64, _REGISTER), axis, layout=layout) for axis in (0, 1))
        own = (places & ~1) + column
        is_odd = places & 1
        last = first = None
        if masking.right is not None and side != "left":
            last = rows + (row + masking.right) - own
        if masking.keys % self.columns and side != "left":
            end = (masking.keys - 1) - own
            last = end if last is None else jnp.minimum(last, end)
        if masking.left is not None and side != "right":
            first = rows + (row - masking.left) - own
        parts = []
        for start in range(0, self.columns, _REGISTER):
            part, place = scores[:, start : start + _REGISTER], is_odd + start
            if last is not None:
                part = jnp.where(place <= last, part, -jnp.inf)
            if first is not None:
                part = jnp.where(place >= first, part, -jnp.inf)
            parts.append(part)
        return lax.concatenate(parts, 1)

    def dropped(self, weights: jax.Array, batch: Any, head: Any, row: Any, column: Any) -> Weights:
        """Weights with those that dropout hits at zero; the others are not yet divided by what is left."""
        problem = self.problem
        if not problem.dropout_rate:
            return (weights,)
        assert self.words is not None
        place = {"words": self.words, "head": batch * problem.heads + head, "query": row, "key": column}
        if self.packs:
            mask = packed_kept(self.columns, problem=problem, **place)
            return rounded(weights, problem.dtype), mask
        return (with_kept(weights, operator.mul, problem=problem, query_axis=0, **place),)

    def rounded(self, weights: Weights) -> Weights:
        """In the problem's type."""
        return tuple(each.astype(self.problem.dtype) for each in weights)

    def _places(self, row: Any, column: Any) -> tuple[jax.Array, jax.Array]:
        shape, layout = (64, self.columns), plgpu.Layout.WGMMA
        rows = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=layout)
        columns = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=layout)
        return rows + row, columns + column

    def _dense(self, batch: Any, head: Any, row: Any, column: Any) -> jax.Array:
        ref = self.extras["dense"]
        batches, heads, rows, _ = ref.shape
        head = head if heads > 1 else 0
        batch = batch if batches > 1 else 0
        shape = (64, self.columns)
        if rows == 1:
            place = ref.at[batch, head, 0, pl.ds(column, self.columns)]
            values = plgpu.load(place, layout=plgpu.Layout.WGMMA.reduce(0), optimized=False)
            return lax.broadcast_in_dim(values, shape, (1,))
        place = ref.at[batch, head, pl.ds(row, 64), pl.ds(column, self.columns)]
        return plgpu.load(place, layout=plgpu.Layout.WGMMA, optimized=False)
