"""The problem that a call of attention poses to the kernels: static facts, and further arrays."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.export import is_symbolic_dim

from pallas_kernels.ops.attention.arguments import Options
from pallas_kernels.ops.attention.dense import four_axes, packed_bits, padded, seen_bits, whole_rows
from pallas_kernels.ops.attention.dropout import keep_bits
from pallas_kernels.ops.attention.masking import Masking, padded_segments
from pallas_kernels.primitives.exponents import LOG2_E, LOWEST_SCORE
from pallas_kernels.primitives.flop_metadata import Products, product
from pallas_kernels.primitives.row_tiles import TileForm

HEAD_SIZES = (64, 96, 128, 160, 192, 256)
"""Head sizes that kernels have tiles for. Heads of 112 are faster in tiles of 128 than of 112 (TUNING.md)."""
TWO_SIZES = frozenset({(192, 128)})
"""Sizes of tiles of keys and of values that differ; other heads take the larger tiles for both."""
_UNDERFLOW = 104
"""exp(-104) is 0 in float32."""
_KEYS_TO_SKIP = 512
"""The fewest queries and keys with which tiles are skipped and XLA averages for queries that see none.

That passes over the output twice more. At 512 it takes the same time forward, and 25 % less with the gradient; 1 to 64
queries of 1024 keys take 36 µs, and 20 to 24 without (TUNING.md).
"""


@dataclass(frozen=True, kw_only=True)
class Problem:
    """Static facts of a launch.

    heads: of queries; a multiple of key_heads, those of keys and values.
    head_size, value_size: columns of a tile of queries and keys, and of values and the output.
    scale: of the scores.
    softcap: scores become softcap * tanh(score / softcap), after the scale and before bias and mask.
    dropout_rate: the share of weights set to zero; the others are divided by 1 - dropout_rate.
    has_bias, has_mask, has_sinks: whether the launch has these arrays (`Extras`).
    mask_value: the score that the mask gives to those that it hides; None: -inf. What hides is then all in the mask.
    value_of_none: the score of all keys of a query that sees none, where mask_value is None: the kernels give such
        queries zeros, and XLA then gives them the average of all values (`averaged`). None: they keep zeros.
    bounds_weights: whether to bound weights by 1. Those of keys of zeros beyond the last key may be infinite otherwise,
        and infinity times such a key is not zero.
    clips: whether arrays end within tiles, as heads are narrower than these or there are fewer keys. Tiles then lie in
        panels: TMA fills what is beyond with zeros, and does not store it.
    deterministic: whether gradients have the same bits in every run; only one kernel by keys asks.
    """

    batch: int
    heads: int
    key_heads: int
    head_size: int
    value_size: int
    dtype: jnp.dtype
    masking: Masking
    scale: float
    softcap: float | None = None
    dropout_rate: float = 0.0
    has_bias: bool = False
    has_mask: bool = False
    has_sinks: bool = False
    mask_value: float | None = None
    value_of_none: float | None = None
    bounds_weights: bool = False
    clips: bool = False
    deterministic: bool = True

    @property
    def hidden(self) -> float:
        """The score that the mask gives, in base 2."""
        return -math.inf if self.mask_value is None else max(self.mask_value * LOG2_E, LOWEST_SCORE)

    @property
    def kept_scale(self) -> float:
        """The factor by which dropout scales the weights that it keeps."""
        return 1 / (1 - self.dropout_rate)

    def products(self, of_keys: int, of_values: int) -> Products | None:
        """So many products with keys' or queries' columns and with values', for visible pairs of query and key.

        None where the number of pairs is not static.
        """
        pairs, columns = self.masking.pairs, of_keys * self.head_size + of_values * self.value_size
        return None if pairs is None else product(self.batch * self.heads * pairs, 1, columns, self.dtype)

    @property
    def forms(self) -> tuple[TileForm, TileForm]:
        """The layouts of tiles of queries and keys, and of values and the output."""
        form = TileForm(size=self.head_size, dtype=self.dtype, in_panels=self.in_panels)
        return form, replace(form, size=self.value_size)

    @property
    def in_panels(self) -> bool:
        """Whether tiles are loaded in panels (`row_tiles`): a length is no multiple of 8, or tiles exceed heads."""
        return self.clips or self.masking.queries % 8 > 0 or self.masking.keys % 8 > 0

    @property
    def group(self) -> int:
        """Query heads that share a key head."""
        return self.heads // self.key_heads

    @property
    def features(self) -> int:
        """The number of softcap, dropout, segments, mask and bias, each of which takes registers."""
        features = (self.softcap, self.dropout_rate, self.masking.has_segments, self.has_mask, self.has_bias)
        return sum(map(bool, features))

    @property
    def sees_all(self) -> bool:
        """Whether nothing is hidden, added or dropped."""
        masking, arrays = self.masking, self.has_bias or self.has_mask or self.has_sinks
        return not (masking.has_band or masking.has_segments or arrays or self.dropout_rate)


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Extras:
    """The further arrays of a launch; None for one that it does not have.

    segments: of the queries and of the keys, (batch, queries) and (batch, keys), integers.
    bias: (1 or batch, 1 or heads, 1 or queries, keys), floating.
    mask, kept: `packed_bits` of such arrays: what is not hidden, and what dropout keeps.
    sinks: (heads,), float32.
    """

    segments: tuple[jax.Array, jax.Array] | None = None
    bias: jax.Array | None = None
    mask: jax.Array | None = None
    kept: jax.Array | None = None
    sinks: jax.Array | None = None

    def padded(self, rows: int, columns: int) -> dict[str, jax.Array]:
        """The arrays but sinks, by name, padded to whole tiles."""
        found = {"bias": self.bias, "mask": self.mask, "kept": self.kept}
        # Rows of words are whole tiles already.
        arrays = {n: padded(a, rows, columns if n == "bias" else 1) for n, a in found.items() if a is not None}
        if self.segments is not None:
            arrays["query_segments"] = padded_segments(self.segments[0], rows)
            arrays["key_segments"] = padded_segments(self.segments[1], columns)
        return arrays


def masking_of(queries: int, keys: int, options: Options) -> Masking:
    """The mask of a launch; causal attention is a window that ends at the query."""
    left, right = options.window_sides
    if options.is_causal:
        right = 0 if right is None else min(right, 0)
    # Bounds that hide nothing are left out.
    left = None if left is not None and left >= queries - 1 else left
    right = None if right is not None and right >= keys - 1 and not options.is_causal else right
    return Masking(queries=queries, keys=keys, left=left, right=right, has_segments=options.segment_ids is not None)


def tiles_of(size: int, value_size: int) -> tuple[int, int] | None:
    """The columns of the kernels' tiles for keys and for values; None if they have none for such heads.

    Rows of arrays (batch, length, heads, head size) must have a multiple of 16 bytes for TMA.
    """
    own, other = (next((whole for whole in HEAD_SIZES if whole >= columns), None) for columns in (size, value_size))
    if own is None or other is None or size % 8 or value_size % 8:
        return None
    largest = max(own, other)
    return (own, other) if (own, other) in TWO_SIZES else (largest, largest)


def problem_of(
    query: jax.Array, key: jax.Array, value: jax.Array | None = None, **given: Any
) -> tuple[Problem, Extras]:
    """The static facts and the further arrays of a launch, from arguments of `attention`; value: None if like key."""
    options = Options(**given)
    problem = facts_of(query, key, value, options)
    return problem, extras_of(problem, options)


def facts_of(query: jax.Array, key: jax.Array, value: jax.Array | None, options: Options) -> Problem:
    """The static facts of a launch; see `problem_of`. Arrays may be shapes alone."""
    batch, queries, heads, size = query.shape
    keys, key_heads = key.shape[1:3]
    sizes = size, size if value is None else value.shape[3]
    tiles = tiles_of(*sizes) or sizes  # of no kernel
    problem = Problem(
        batch=batch,
        heads=heads,
        key_heads=key_heads,
        head_size=tiles[0],
        value_size=tiles[1],
        dtype=query.dtype,
        masking=masking_of(queries, keys, options),
        scale=1 / math.sqrt(size) if options.scale is None else options.scale,
        softcap=options.softcap,
        dropout_rate=options.dropout_rate,
        has_bias=options.bias is not None,
        has_mask=options.mask is not None,
        has_sinks=options.sinks is not None,
        mask_value=options.mask_value,
        clips=tiles != sizes,
        deterministic=options.deterministic,
    )
    if problem.mask_value is None:
        return problem
    masking = problem.masking
    has_bounds = masking.has_band or masking.has_segments
    in_band = masking.left is None or queries - masking.left <= keys
    sees_one = in_band and not problem.has_mask and not isinstance(options.segment_ids, tuple)
    is_far = _is_far(problem)
    if (not problem.has_mask and not has_bounds) or (is_far and sees_one):
        return replace(problem, mask_value=None)
    is_long = all(not is_symbolic_dim(length) and length >= _KEYS_TO_SKIP for length in (queries, keys))
    # A bias may be -inf for all that a query sees.
    if has_bounds and is_far and is_long and not (problem.dropout_rate or problem.has_bias):
        # A sink takes all the weight of a query that sees no key.
        return replace(problem, mask_value=None, value_of_none=None if problem.has_sinks else problem.mask_value)
    # Queries that see no key average all values, so that no tile may be skipped.
    return replace(problem, has_mask=True, masking=Masking(queries=queries, keys=masking.keys))


def _is_far(problem: Problem) -> bool:
    """Whether all scores are so far above the mask's value that beside one of them hiding by it is hiding by -inf.

    Softcap bounds scores, and so does the range of float16. The kernels take all others to be above `LOWEST_SCORE`.
    """
    assert problem.mask_value is not None
    most = float(jnp.finfo(problem.dtype).max)
    largest = problem.softcap or problem.head_size * abs(problem.scale) * most * most  # of float64: infinity
    largest = math.inf if problem.has_bias or problem.has_sinks else largest + _UNDERFLOW
    return problem.mask_value <= max(LOWEST_SCORE, -largest)


def extras_of(problem: Problem, options: Options) -> Extras:
    """The further arrays of a launch."""
    mask, segments, kept = options.mask, options.segments, options.dropout_mask
    queries, keys = problem.masking.queries, problem.masking.keys
    if problem.mask_value is not None:
        seen, segments = seen_pairs(masking_of(queries, keys, options), segments), None
        mask = seen if mask is None else mask if seen is None else four_axes(mask) & seen
    kept = None if kept is None else whole_rows(kept, keys)
    if problem.dropout_rate and options.dropout_key is not None:
        rate = problem.dropout_rate
        kept = keep_bits(options.dropout_key, problem.batch, problem.heads, queries, keys, rate=rate)
    return Extras(
        segments=segments,
        bias=None if options.bias is None else whole_rows(options.bias, keys),
        mask=None if mask is None else packed_bits(whole_rows(mask, keys)),
        kept=None if kept is None else seen_bits(kept, problem.masking),
        sinks=None if options.sinks is None else options.sinks.astype(jnp.float32),
    )


def seen_pairs(masking: Masking, segments: tuple[jax.Array, jax.Array] | None) -> jax.Array | None:
    """Which keys the queries see, boolean (1 or batch, 1, queries, keys); None if all. segments: see `Options`."""
    own, other = segments or (None, None)
    own, other = None if own is None else own[:, None, :, None], None if other is None else other[:, None, None]
    seen = masking.visible(jnp.arange(masking.queries)[:, None], jnp.arange(masking.keys), own, other, tile=1)
    return None if seen is None else four_axes(seen)


def averaged(problem: Problem, out: jax.Array, lse: jax.Array, value: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The output and log-sum-exp, with those of queries that see no key as the program has them; see `value_of_none`.

    lse: (batch, heads, queries).
    """
    if problem.value_of_none is None:
        return out, lse
    sees_none = lse == -math.inf
    average = jnp.mean(value, axis=1, keepdims=True, dtype=jnp.float32).astype(out.dtype)
    average = jnp.repeat(average, problem.group, axis=2)
    out = jnp.where(sees_none.swapaxes(1, 2)[..., None], average, out)
    return out, jnp.where(sees_none, problem.value_of_none + math.log(problem.masking.keys), lse)
