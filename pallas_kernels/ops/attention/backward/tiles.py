"""What both kernels of the backward pass do with a tile of scores.

A tile lies with its queries along axis 0 (the kernel of dquery) or along axis 1 (that of dkey and dvalue); everything
else is the same, and is said here once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.ops.attention.backward.config import columns_at_once
from pallas_kernels.ops.attention.dropout import with_kept
from pallas_kernels.ops.attention.masking import TileRange
from pallas_kernels.ops.attention.problem import LOG2_E, LOWEST, Problem
from pallas_kernels.ops.attention.row_tiles import RowTiles, TileForm
from pallas_kernels.ops.attention.scores import capped


class Inputs(NamedTuple):
    """A kernel's arguments: arrays at the call, references in the kernel.

    query, key, value, dout: like `attention`'s. rows: of `rows_of`. extras: further arrays by name, those that there
    are of "words", "dense", "query_segments", "key_segments" (padded to whole tiles), "tiles" (with segments: (batch,
    tiles, 4), those that a block's tile sees), and "places", the keys' numbers (padded, int32).
    """

    query: Any
    key: Any
    value: Any
    dout: Any
    rows: Any
    extras: Mapping[str, Any]


def lane_place(lane: jax.Array, heads: int, parts: int) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """(batch entry, head, part of its work or None) of a lane."""
    part = None
    if parts > 1:
        lane, part = lax.div(lane, parts), lax.rem(lane, parts)
    return lax.div(lane, heads), lax.rem(lane, heads), part


class KeyGradients(NamedTuple):
    """References to dkey and dvalue, or to their parts."""

    dkey: Any
    dvalue: Any

    @staticmethod
    def types(key: jax.Array, parts: int) -> list[jax.ShapeDtypeStruct]:
        """Of a kernel's results: both, or their parts in one array."""
        if parts > 1:
            return [jax.ShapeDtypeStruct((2, parts, *key.shape), key.dtype)]
        return [jax.ShapeDtypeStruct(key.shape, key.dtype)] * 2

    @classmethod
    def of(cls, results: list[Any]) -> KeyGradients:
        """References to `types`."""
        return cls(*results) if len(results) == 2 else cls(results[0].at[0], results[0].at[1])

    @staticmethod
    def summed(results: list[jax.Array]) -> tuple[jax.Array, jax.Array]:
        """dkey and dvalue of a kernel's results."""
        dkey, dvalue = results if len(results) == 2 else map(added, results[0])
        return dkey, dvalue


def added(parts: jax.Array) -> jax.Array:
    """The sum over the first axis, in float32 and then rounded: one elementwise kernel."""
    whole, *others = parts.astype(jnp.float32)
    for other in others:
        whole = whole + other
    return whole.astype(parts.dtype)


_LONGEST_TILE = 128
"""Keys of the longest tile; the others divide it."""


@dataclass(frozen=True, kw_only=True)
class Tile:
    """A tile of scores of one warpgroup.

    query_axis: 0 or 1.
    batch, head: of the queries. row, column: its first query and key.
    extras: references in device memory, of which "dense" is read where there is one (as the tile lies: its last two
        axes are those of the tile, each padded or of length 1).
    segments: with them, the numbers of what lies along axis 0, and a reference in shared memory to those of axis 1.
    words: of the dropout key, mixed.
    places: numbers, from 0 on or further, of what lies along axis 1: queries' in shared memory, float32, or keys' in
        device memory. Numbers that a thread works out by itself, 16 or 32 of them, the compiler holds in registers
        throughout the loop.
    numbers: of the queries along axis 0, where those are not their places.
    """

    problem: Problem
    query_axis: int
    shape: tuple[int, int]
    batch: Any
    head: Any
    row: Any
    column: Any
    extras: Mapping[str, Any] = field(default_factory=dict)
    words: Any = None
    places: Any = None
    numbers: Any = None
    segments: tuple[Any, Any] | None = None

    def weights(self, products: jax.Array, lse: jax.Array, *, is_masked: bool) -> tuple[jax.Array, jax.Array | None]:
        """exp(score - lse) of the products query @ key, and the scores' slope by them where that is not constant.

        lse: of the tile's queries, in base 2.
        """
        problem = self.problem
        slope = None
        if problem.softcap is None:
            scores = products * (problem.scale * LOG2_E)
        else:
            scores, bounded = capped(products, problem.scale, problem.softcap)
            # Between 0 and 1, and in 16 bits for want of registers.
            slope = (1 - bounded * bounded).astype(jnp.float16)
        seen = self._seen() if is_masked else None
        if problem.dense is not None:
            dense = self._dense()
            if problem.dense == "bias":
                scores = scores + dense.astype(jnp.float32) * LOG2_E
            else:
                shown = dense.astype(jnp.int32) != 0
                seen = shown if seen is None else seen & shown
        exponents = scores - self._along_queries(lse)
        if problem.bounds_weights:
            exponents = jnp.minimum(exponents, 0.0)
        if seen is not None:
            exponents = jnp.where(seen, exponents, LOWEST)
        return jnp.exp2(exponents), slope

    def marked(self, weights: jax.Array) -> jax.Array:
        """Half of the weights, with a minus sign on those that dropout sets to zero: a mask of its own would not fit in
        registers beside them. Without dropout the weights themselves."""
        problem = self.problem
        if not problem.dropout_rate:
            return weights
        return with_kept(
            weights,
            lambda own, kept: own * (kept - 0.5),
            problem=problem,
            words=self.words,
            query_axis=self.query_axis,
            head=self.batch * problem.heads + self.head,
            query=self.row,
            key=self.column,
        )

    def dropped(self, marked: jax.Array) -> jax.Array:
        """The weights that value is multiplied by, of what `marked` gives, up to the factor `kept_scale`.

        An addition: it runs at twice the rate of a maximum.
        """
        return marked + jnp.abs(marked) if self.problem.dropout_rate else marked

    def score_gradients(self, marked: jax.Array, dweights: jax.Array, delta: jax.Array) -> jax.Array:
        """The gradients of the scores after softcap and bias; delta as in `rows_of`."""
        if self.problem.dropout_rate:
            # Of what is dropped, dweights cancel; no comparison, and nothing held besides the marked weights.
            dweights = dweights * kept_scale(self.problem)
            return jnp.abs(marked) * (dweights - self._along_queries(2 * delta)) + marked * dweights
        return marked * (dweights - self._along_queries(delta))

    def row_layout(self) -> Any:
        """Of a vector with one value a query."""
        return plgpu.Layout.WGMMA.reduce(1 - self.query_axis)

    def _along_queries(self, vector: jax.Array) -> jax.Array:
        return lax.broadcast_in_dim(vector, self.shape, (self.query_axis,))

    def _places(self, begin: Any = 0) -> tuple[jax.Array, jax.Array]:
        """Of each element's query and key, less `begin`."""
        starts = (self.column, self.row) if self.query_axis else (self.row, self.column)
        first, second = (
            plgpu.broadcasted_iota(jnp.int32, self.shape, axis, layout=plgpu.Layout.WGMMA) + (start - begin)
            for axis, start in enumerate(starts)
        )
        if self.numbers is not None:
            first = lax.broadcast_in_dim(self.numbers - begin, self.shape, (0,))
        if self.places is not None:
            numbers = plgpu.load(self.places, layout=plgpu.Layout.WGMMA.reduce(0), optimized=False)
            second = lax.broadcast_in_dim(numbers.astype(jnp.int32) - begin, self.shape, (1,))
        return (second, first) if self.query_axis else (first, second)

    def _seen(self) -> jax.Array:
        segments = []
        if self.segments is not None:
            first, second = self.segments
            second = plgpu.load(second, layout=plgpu.Layout.WGMMA.reduce(0), optimized=False)
            both = [lax.broadcast_in_dim(vector, self.shape, (axis,)) for axis, vector in enumerate((first, second))]
            segments = both[::-1] if self.query_axis else both
        masking = self.problem.masking
        # Places from where axis 0 begins, so that the few that a thread has of that axis are the same every step.
        begin = self.column if self.query_axis else self.row
        row, column = self._places(begin)
        is_ragged = masking.keys % _LONGEST_TILE > 0
        if is_ragged:
            masking = replace(masking, keys=masking.keys - begin)
        return masking.visible(row, column, *segments, tile=0 if is_ragged else _LONGEST_TILE)

    def _dense(self) -> jax.Array:
        ref = self.extras["dense"]
        starts = (self.row, self.column) if self.query_axis == 0 else (self.column, self.row)
        lead = tuple(0 if size == 1 else place for size, place in zip(ref.shape, (self.batch, self.head), strict=False))
        axes = [axis for axis in (0, 1) if ref.shape[2 + axis] > 1]
        index = [pl.ds(starts[axis], self.shape[axis]) if axis in axes else 0 for axis in (0, 1)]
        layout = plgpu.Layout.WGMMA if len(axes) == 2 else plgpu.Layout.WGMMA.reduce(1 - axes[0])
        values = plgpu.load(ref.at[(*lead, *index)], layout=layout, optimized=False)
        return values if len(axes) == 2 else lax.broadcast_in_dim(values, self.shape, tuple(axes))


@dataclass(frozen=True, kw_only=True)
class Visits:
    """The tiles that a block goes over: first those whose elements are masked, on both sides, then the full ones.

    tiles: less `begin`, so that their number is known where that is not.
    """

    tiles: TileRange
    begin: Any = None

    @property
    def before(self) -> Any:
        """Masked tiles in front of the full ones."""
        return self.tiles.full_first - self.tiles.first

    @property
    def masked(self) -> Any:
        """Masked tiles."""
        return self.before + self.tiles.last - self.tiles.full_last

    @property
    def full(self) -> Any:
        """Full tiles."""
        return self.tiles.full_last - self.tiles.full_first

    def masked_tile(self, i: Any) -> Any:
        """The i-th masked tile."""
        return jnp.where(i < self.before, self.tiles.first + i, self.tiles.full_last + i - self.before)

    def full_tile(self, i: Any) -> Any:
        """The i-th full tile."""
        tile = self.tiles.full_first + i
        return tile if self.begin is None else self.begin + tile


_SMALL_HEAD, _MANY_STEPS = 128, 8


def hides_steps(problem: Problem, form: TileForm, length: int, tile: int) -> bool:
    """Whether a block's steps are hidden from the compiler, which else writes few ones out one by one: for that large
    heads, and products by panels, leave no registers."""
    masking = problem.masking
    if form.in_panels:
        return form.size >= _SMALL_HEAD
    if masking.is_causal:
        length = min(masking.queries, masking.keys)
    return form.size > _SMALL_HEAD and (length < _MANY_STEPS * tile or masking.keys % 64 > 0)


def hidden(tiles: TileRange) -> TileRange:
    """The same, in numbers that the compiler does not know."""
    return TileRange(*lax.optimization_barrier(tuple(jnp.asarray(bound, jnp.int32) for bound in tiles)))


def kept_scale(problem: Problem) -> float:
    """What dropout multiplies the weights by that it keeps."""
    return 1 / (1 - problem.dropout_rate)


def not_invariant(step: Any) -> jax.Array:
    """Zero, for all that the compiler knows another one each step (there are fewer than 2**30 of them).

    Added to the place of an operand that stays where it is, it keeps the compiler from computing all of the operand's
    descriptors in front of the loop and holding them in registers: 25 too many with a head size of 256.
    """
    return lax.shift_right_logical(step, 30)


_CACHE_BYTES = 40 * 2**20
"""Of the H200's 50 MiB of L2 cache, what blocks that run together may read again and again."""


def block_place(block: Any, *, tiles: int, lanes: int, lane_bytes: int, section_blocks: int = 0) -> tuple[Any, Any]:
    """(tile, lane) of a block of a one-dimensional grid; lanes are heads of a batch whose blocks read the same arrays.

    Lanes are taken in sections. In a section all lanes' first tiles come first: so a tile's number should fall as its
    work grows, and no long block starts late. In a lane, tiles come in the order of their numbers.
    Source: the order of blocks of Shah et al., "FlashAttention-3", 2024, https://arxiv.org/abs/2407.08608

    lane_bytes: of a lane's arrays; a section's fit in the L2 cache together, and the last one has the lanes that are
        left. Where those are few, their long blocks start when little else is left to do.
    section_blocks: not 0: a section has as many lanes as come to so many blocks, and the first one those left over.
    """
    section = max(1, min(lanes, section_blocks // tiles if section_blocks else _CACHE_BYTES // lane_bytes))
    missing = -lanes % section if section_blocks else 0
    number = lax.div(block + missing * tiles, section * tiles)
    first = jnp.maximum(number * section - missing, 0) if missing else number * section
    here = jnp.minimum(jnp.where(number == 0, section - missing, section) if missing else section, lanes - first)
    rest = block - first * tiles
    tile = lax.div(rest, here)
    return tile, first + rest - tile * here


def rows_of(
    out: jax.Array, lse: jax.Array, dout: jax.Array, dlse: jax.Array | None, rows: int, *, group: int = 1
) -> jax.Array:
    """What the kernels need to know of each query: (batch, heads, 3, queries padded to a multiple of `rows`), float32.

    The first is lse in base 2, the second "delta", the sum of dout * out less dlse: what each weight's gradient is
    lowered by on its way through the softmax. The third is the query's number. Zeros beyond the queries.
    """
    delta = jnp.sum(out.astype(jnp.float32) * dout.astype(jnp.float32), axis=-1)
    # Kept apart from the transposition, with which XLA's reduction takes five times as long.
    delta = lax.optimization_barrier(delta).transpose(0, 2, 1)
    if dlse is not None:
        delta = delta - dlse
    places = jnp.broadcast_to(jnp.arange(lse.shape[2], dtype=jnp.float32), lse.shape)
    lines = [lse * LOG2_E, delta, places]
    if group > 1:  # packed: the heads of a group are one head, their queries one after the other
        lines = [line.reshape(line.shape[0], line.shape[1] // group, -1) for line in lines]
    stacked = jnp.stack(lines, axis=2)
    return jnp.pad(stacked, ((0, 0), (0, 0), (0, 0), (0, -stacked.shape[3] % rows)))


def row_sums(left: RowTiles, right: RowTiles) -> jax.Array:
    """The sum of left * right along each row, in float32, of tiles of 64 rows; some columns at a time."""

    def parts(tiles):
        for _, part in tiles.panels(columns_at_once(tiles.form.size)):
            yield plgpu.load(part, layout=plgpu.Layout.WGMMA).astype(jnp.float32)

    first, *others = (own * other for own, other in zip(parts(left), parts(right), strict=True))
    return jnp.sum(sum(others, first), axis=1)
