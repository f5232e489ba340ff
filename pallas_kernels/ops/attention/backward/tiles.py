"""What the backward kernels share: their inputs, the order of blocks, and the gradients of a tile of scores."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.ops.attention.dense import load_bias, load_bits
from pallas_kernels.ops.attention.launch import hidden
from pallas_kernels.ops.attention.problem import Problem
from pallas_kernels.ops.attention.scores import bounded
from pallas_kernels.primitives.exponents import LOG2_E, LOWEST_SCORE
from pallas_kernels.primitives.platform import target_device


class Inputs(NamedTuple):
    """A kernel's arguments: arrays at the call, references in the kernel.

    query, key, value, dout: like `attention`'s. rows: `gradients.rows_of`. extras: further arrays by name, where the
    problem has them: "bias", "mask", "kept", "query_segments" and "key_segments" (padded to whole tiles), "tiles" (with
    segments: (batch, tiles, 4), the `TileRange` of each tile), and "places", the numbers of the keys (padded, int32).
    """

    query: Any
    key: Any
    value: Any
    dout: Any
    rows: Any
    extras: Mapping[str, Any]


def added(parts: jax.Array) -> jax.Array:
    """The sum over the last axis but one, in float32 and then rounded: one elementwise kernel."""
    wide = parts.astype(jnp.float32)
    whole = wide[..., 0, :]
    for i in range(1, parts.shape[-2]):
        whole = whole + wide[..., i, :]
    return whole.astype(parts.dtype)


_LONGEST_TILE = 128
"""Keys of the longest key tile; the lengths of the others divide it."""


@dataclass(frozen=True, kw_only=True)
class Tile:
    """A warpgroup's tile of scores, with queries along axis 0 or along axis 1.

    query_axis: 0 or 1.
    batch, head: of the queries. row, column: the first query and key.
    extras: see `Inputs`; the last two axes of bias and masks are in the order of the tile's.
    segments: the segments along axis 0, in registers, and a reference in shared memory to those along axis 1.
    places: a reference to the numbers, from 0 on or from a later one, along axis 1: of queries in shared memory
        (float32) or of keys in device memory. If threads computed their 16 or 32 numbers, the compiler would hold them
        in registers throughout the loop.
    """

    problem: Problem
    query_axis: int
    shape: tuple[int, int]
    batch: Any
    head: Any
    row: Any
    column: Any
    extras: Mapping[str, Any]
    places: Any
    segments: tuple[Any, Any] | None

    def weights(self, products: jax.Array, lse: jax.Array, *, is_masked: bool) -> tuple[jax.Array, jax.Array | None]:
        """Returns exp(score - lse), and the derivative of the scores by the products where softcap makes it vary.

        products: query @ key. lse: of the tile's queries, in base 2.
        """
        problem = self.problem
        slope = None
        if problem.softcap is None:
            scores = products * (problem.scale * LOG2_E)
        else:
            shares = bounded(products, problem.scale, problem.softcap)
            scores = shares * (problem.softcap * LOG2_E)
            # Between 0 and 1, and in 16 bits for want of registers.
            slope = (1 - shares * shares).astype(jnp.float16)
        seen = self._seen() if is_masked else None
        if problem.has_bias:
            scores = scores + load_bias(self.extras["bias"], *self._place).astype(jnp.float32) * LOG2_E
        exponents = scores - self._along_queries(lse)
        if problem.bounds_weights:
            exponents = jnp.minimum(exponents, 0.0)
        if problem.has_mask:
            others = LOWEST_SCORE if problem.mask_value is None else self._along_queries(self._hidden(lse))
            exponents = jnp.where(self._bits("mask"), exponents, others)
        if seen is not None:
            exponents = jnp.where(seen, exponents, LOWEST_SCORE)
        return jnp.exp2(exponents), slope

    def _hidden(self, lse: jax.Array) -> jax.Array:
        """The exponents of the scores that the mask hides."""
        return jnp.where(lse > MARK / 2, math.log2(MARK) - jnp.log2(lse), self.problem.hidden - lse)

    def marked(self, weights: jax.Array) -> jax.Array:
        """With dropout, half of the weights, negative where dropped: registers have no room for a mask beside them."""
        if not self.problem.dropout_rate:
            return weights
        return weights * jnp.where(self._bits("kept"), 0.5, -0.5)

    def dropped(self, marked: jax.Array) -> jax.Array:
        """The weights after dropout, without its factor `Problem.kept_scale`, of `marked` ones.

        By addition, which runs at twice the rate of a maximum.
        """
        return marked + jnp.abs(marked) if self.problem.dropout_rate else marked

    def score_gradients(self, marked: jax.Array, dweights: jax.Array, delta: jax.Array) -> jax.Array:
        """The gradients of the scores after softcap and bias; delta: see `gradients.rows_of`."""
        if self.problem.dropout_rate:
            # The dweights of dropped weights cancel, without a comparison or another mask in registers.
            dweights = dweights * self.problem.kept_scale
            found = jnp.abs(marked) * (dweights - self._along_queries(2 * delta)) + marked * dweights
        else:
            found = marked * (dweights - self._along_queries(delta))
        # Bits are loaded again: held in registers, they would be too many.
        return found if self.problem.mask_value is None else jnp.where(self._bits("mask"), found, 0.0)

    @property
    def _place(self) -> tuple[tuple[Any, Any], tuple[Any, Any], tuple[int, int]]:
        starts = (self.column, self.row) if self.query_axis else (self.row, self.column)
        return (self.batch, self.head), starts, self.shape

    def _bits(self, name: str) -> jax.Array:
        return load_bits(self.extras[name], *self._place, self.query_axis)

    def _along_queries(self, vector: jax.Array) -> jax.Array:
        return lax.broadcast_in_dim(vector, self.shape, (self.query_axis,))

    def _seen(self) -> jax.Array:
        layout, segments = plgpu.Layout.WGMMA, []
        if self.segments is not None:
            first, second = self.segments
            second = plgpu.load(second, layout=layout.reduce(0), optimized=False)
            both = [lax.broadcast_in_dim(vector, self.shape, (axis,)) for axis, vector in enumerate((first, second))]
            segments = both[::-1] if self.query_axis else both
        masking = self.problem.masking
        # Counted from where axis 0 begins, a thread's few numbers along that axis are the same in every step.
        begin = self.column if self.query_axis else self.row
        first = plgpu.broadcasted_iota(jnp.int32, self.shape, 0, layout=layout)
        second = plgpu.load(self.places, layout=layout.reduce(0), optimized=False).astype(jnp.int32) - begin
        second = lax.broadcast_in_dim(second, self.shape, (1,))
        row, column = (second, first) if self.query_axis else (first, second)
        is_ragged = masking.keys % _LONGEST_TILE > 0
        if is_ragged:
            masking = replace(masking, keys=masking.keys - begin)
        return masking.visible(row, column, *segments, tile=0 if is_ragged else _LONGEST_TILE)


def counted(problem: Problem, steps: Any) -> Any:
    """A loop's end: `hidden`, but where a mask has a value, and its second reading takes the registers for that."""
    is_tight = problem.mask_value is not None and not problem.in_panels and problem.head_size <= 128
    return steps if is_tight else hidden(steps)


def block_place(block: Any, *, tiles: int, lanes: int, waves: int = 2) -> tuple[Any, Any]:
    """(tile, lane) of a block of a one-dimensional grid.

    Lanes come in sections. A section starts with the first tiles of all its lanes, then the second ones, and so on: if
    the first tiles have the most work, no long block starts late. The first section has the remaining lanes: at the
    end, their long blocks would start when little other work is left.
    Source: the order of blocks of Shah et al., "FlashAttention-3", 2024, https://arxiv.org/abs/2407.08608

    waves: a section has at most so many times the blocks that run at once, which read its lanes from the L2 cache.
    """
    section = max(1, min(lanes, waves * target_device().core_count // tiles))
    missing = -lanes % section
    number = lax.div(block + missing * tiles, section * tiles)
    first = jnp.maximum(number * section - missing, 0) if missing else number * section
    here = jnp.where(number == 0, section - missing, section) if missing else section
    rest = block - first * tiles
    tile = lax.div(rest, here)
    return tile, first + rest - tile * here


MARK = 2.0**100
"""Times a number, what stands for the log-sum-exp of so many hidden scores and no others: far above all others."""
