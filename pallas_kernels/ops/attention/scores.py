"""Scores and weights of a tile of products query @ key: scale, softcap, bias, masks, dropout. Scores are in base 2."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.ops.attention.dense import REGISTER, load_bias, load_bits
from pallas_kernels.ops.attention.masking import Side
from pallas_kernels.ops.attention.problem import Problem
from pallas_kernels.primitives.exponents import LOG2_E

_LARGE_CAP, _SMALL_ANGLE = 1000, 0.02


def bounded(products: jax.Array, scale: float, softcap: float) -> jax.Array:
    """tanh(scale * products / softcap).

    It takes one exponential and is off by 3e-7; the hardware's tanh is off by 5e-4, which a softcap of 50 makes 2% of a
    weight. Where a large cap would show even the 3e-7, small scores come from the series.
    """
    found = 1 - 2 / (1 + jnp.exp2(products * (2 * LOG2_E * scale / softcap)))
    if softcap > _LARGE_CAP:
        small = products * (scale / softcap) * (1 - found * found * (1 / 3))
        found = jnp.where(jnp.abs(found) < _SMALL_ANGLE, small, found)
    return found


@dataclass(frozen=True, kw_only=True)
class Scores:
    """The forward pass's arithmetic on a tile of 64 queries by `columns` keys, in the accumulators' layout.

    extras: references to the arrays of `Extras`, padded to whole tiles.
    """

    problem: Problem
    columns: int
    extras: dict[str, Any]

    @property
    def factor(self) -> float:
        """A positive factor that `scaled` leaves to the exponential, whose own product has room for it."""
        problem = self.problem
        # A finite hidden score times a factor would be rounded in the maximum, and not where that is subtracted.
        is_plain = problem.softcap is None and not problem.has_bias and problem.mask_value is None and problem.scale > 0
        return problem.scale * LOG2_E if is_plain else 1.0

    def scaled(self, product: jax.Array, batch: Any, head: Any, row: Any, column: Any) -> jax.Array:
        """The scores with scale, softcap, bias and mask."""
        problem = self.problem
        scores = product
        if problem.softcap is not None:
            scores = bounded(scores, problem.scale, problem.softcap) * (problem.softcap * LOG2_E)
        elif self.factor == 1.0:
            scores = scores * (problem.scale * LOG2_E)
        place = (batch, head), (row, column), (64, self.columns)
        if problem.has_bias:
            scores = scores + load_bias(self.extras["bias"], *place).astype(jnp.float32) * LOG2_E
        if problem.has_mask:
            scores = jnp.where(load_bits(self.extras["mask"], *place), scores, problem.hidden)
        return scores

    def masked(
        self,
        scores: jax.Array,
        row: Any,
        column: Any,
        segments: tuple[jax.Array, jax.Array] | None,
        side: Side | None = None,
    ) -> jax.Array:
        """Masks the tile's scores: -inf where hidden.

        Columns in the tile, which are constants, are compared with bounds that are computed once a row.

        Args:
            segments: those of the tile's queries and of its keys. side: the only side of the band that may cut the
                tile, see `Masking.has_sides`; None: both may.
        """
        masking, layout = self.problem.masking, plgpu.Layout.WGMMA
        rows, places = (plgpu.broadcasted_iota(jnp.int32, (64, REGISTER), axis, layout=layout) for axis in (0, 1))
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
        for start in range(0, self.columns, REGISTER):
            part, place = scores[:, start : start + REGISTER], is_odd + start
            if last is not None:
                part = jnp.where(place <= last, part, -jnp.inf)
            if first is not None:
                part = jnp.where(place >= first, part, -jnp.inf)
            parts.append(part)
        scores = lax.concatenate(parts, 1)
        if segments is None:
            return scores
        own, other = (lax.broadcast_in_dim(numbers, scores.shape, (axis,)) for axis, numbers in enumerate(segments))
        return jnp.where(own == other, scores, -jnp.inf)

    def dropped(self, weights: jax.Array, batch: Any, head: Any, row: Any, column: Any) -> jax.Array:
        """The weights with dropped ones set to zero, without dropout's factor 1 / (1 - rate)."""
        problem = self.problem
        if not problem.dropout_rate:
            return weights
        kept = load_bits(self.extras["kept"], (batch, head), (row, column), (64, self.columns))
        return jnp.where(kept, weights, 0.0)
