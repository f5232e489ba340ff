"""Scores and weights of a tile of products query @ key: scale, softcap, bias, mask, dropout. Scores are in base 2."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.ops.attention.dropout import with_kept
from pallas_kernels.ops.attention.masking import Side
from pallas_kernels.ops.attention.problem import Problem
from pallas_kernels.primitives.exponents import LOG2_E
from pallas_kernels.primitives.random import Words

_REGISTER = 8
"""Columns of the accumulators' layout over which a thread has one register a row."""
_LARGE_CAP, _SMALL_ANGLE = 1000, 0.02


def capped(products: jax.Array, scale: float, softcap: float) -> tuple[jax.Array, jax.Array]:
    """Returns (softcap * bounded, in base 2; bounded), with bounded = tanh(scale * products / softcap).

    It takes one exponential and is off by 3e-7; the hardware's tanh is off by 5e-4, which a softcap of 50 makes 2% of a
    weight. Where a large cap would show even the 3e-7, small scores come from the series.
    """
    bounded = 1 - 2 / (1 + jnp.exp2(products * (2 * LOG2_E * scale / softcap)))
    scores = bounded * (softcap * LOG2_E)
    if softcap > _LARGE_CAP:
        factor = 1 - bounded * bounded * (1 / 3)
        scores = jnp.where(jnp.abs(bounded) < _SMALL_ANGLE, products * (scale * LOG2_E) * factor, scores)
    return scores, bounded


@dataclass(frozen=True, kw_only=True)
class Scores:
    """The forward pass's arithmetic on a tile of 64 queries by `columns` keys, in the accumulators' layout.

    extras: references to the arrays of `Extras`, padded to whole tiles. words: `mixed_words` of the dropout key.
    short_masks: see `ForwardConfig`.
    """

    problem: Problem
    columns: int
    extras: dict[str, Any]
    words: Words | None = None
    short_masks: bool = False

    @property
    def factor(self) -> float:
        """A positive factor that `scaled` leaves to the exponential, whose own product has room for it."""
        problem = self.problem
        is_plain = problem.softcap is None and problem.dense != "bias" and problem.scale > 0
        return problem.scale * LOG2_E if is_plain else 1.0

    def scaled(self, product: jax.Array, batch: Any, head: Any, row: Any, column: Any) -> jax.Array:
        """The scores with scale, softcap, and dense mask or bias."""
        problem = self.problem
        scores = product
        if problem.softcap is not None:
            scores = capped(scores, problem.scale, problem.softcap)[0]
        elif self.factor == 1.0:
            scores = scores * (problem.scale * LOG2_E)
        if problem.dense is not None:
            dense = load_dense(self.extras["dense"], (batch, head), (row, column), (64, self.columns))
            if problem.dense == "bias":
                scores = scores + dense.astype(jnp.float32) * LOG2_E
            else:
                scores = jnp.where(dense != 0, scores, -jnp.inf)
        return scores

    def masked(
        self,
        scores: jax.Array,
        row: Any,
        column: Any,
        segments: tuple[jax.Array, jax.Array] | None,
        side: Side | None = None,
    ) -> jax.Array:
        """The scores, -inf where hidden. segments: those of the tile's queries and of its keys."""
        if self.short_masks and segments is None:
            return self._within_bounds(scores, row, column, side)
        rows, columns = self._places(row, column)
        own = () if segments is None else (lax.broadcast_in_dim(v, scores.shape, (i,)) for i, v in enumerate(segments))
        seen = self.problem.masking.visible(rows, columns, *own, tile=self.columns, side=side)
        return scores if seen is None else jnp.where(seen, scores, -jnp.inf)

    def _within_bounds(self, scores: jax.Array, row: Any, column: Any, side: Side | None) -> jax.Array:
        """`masked`, by comparing columns in the tile, which are constants, with bounds that are computed once a row."""
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

    def dropped(self, weights: jax.Array, batch: Any, head: Any, row: Any, column: Any) -> jax.Array:
        """The weights with dropped ones set to zero, without dropout's factor 1 / (1 - rate)."""
        problem = self.problem
        if not problem.dropout_rate:
            return weights
        assert self.words is not None
        place = {"words": self.words, "head": batch * problem.heads + head, "query": row, "key": column}
        return with_kept(weights, operator.mul, problem=problem, query_axis=0, **place)

    def _places(self, row: Any, column: Any) -> tuple[jax.Array, jax.Array]:
        shape, layout = (64, self.columns), plgpu.Layout.WGMMA
        rows = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=layout)
        columns = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=layout)
        return rows + row, columns + column


def load_dense(ref: Any, lead: tuple[Any, Any], starts: tuple[Any, Any], shape: tuple[int, int]) -> jax.Array:
    """A tile of a mask or bias in the accumulators' layout, broadcast along the array's axes of length 1.

    ref: to (1 or batch, 1 or heads, rows or 1, columns or 1). lead: the batch entry and the head.
    """
    places = [0 if size == 1 else place for size, place in zip(ref.shape, lead, strict=False)]
    axes = [axis for axis in (0, 1) if ref.shape[2 + axis] > 1]
    index = [pl.ds(starts[axis], shape[axis]) if axis in axes else 0 for axis in (0, 1)]
    if not axes:  # of a single query and a single key
        return lax.broadcast(ref[(*places, 0, 0)], shape)
    layout = plgpu.Layout.WGMMA if len(axes) == 2 else plgpu.Layout.WGMMA.reduce(1 - axes[0])
    values = plgpu.load(ref.at[(*places, *index)], layout=layout, optimized=False)
    return values if len(axes) == 2 else lax.broadcast_in_dim(values, shape, tuple(axes))
