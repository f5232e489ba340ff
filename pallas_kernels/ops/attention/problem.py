"""The problem that a call of attention poses: checks of its arguments, static facts, and further arrays."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NotRequired, TypedDict, Unpack

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.export import is_symbolic_dim

from pallas_kernels.ops.attention.dense import four_axes, packed_bits, padded, seen_bits, whole_rows
from pallas_kernels.ops.attention.dropout import keep_bits
from pallas_kernels.ops.attention.masking import Masking
from pallas_kernels.primitives.checks import as_arrays, dropout_words, positive_number, static_number
from pallas_kernels.primitives.exponents import LOG2_E, LOWEST_SCORE
from pallas_kernels.primitives.flop_metadata import Products, product
from pallas_kernels.primitives.row_tiles import TileForm

_UNDERFLOW = 104
"""exp(-104) is 0 in float32."""
_KEYS_TO_SKIP = 1024
"""The fewest keys with which tiles are skipped and XLA averages for queries that see none, which passes over the output
twice more. An estimate by bytes; nothing was timed."""


@dataclass(frozen=True, kw_only=True)
class Problem:
    """Static facts of a launch.

    heads: of queries; a multiple of key_heads, those of keys and values.
    head_size, value_size: columns of a head of queries and keys, and of values and the output.
    scale: of the scores.
    softcap: scores become softcap * tanh(score / softcap), after the scale and before bias and mask.
    dropout_rate: the share of weights set to zero; the others are divided by 1 - dropout_rate.
    has_bias, has_mask, has_sinks: whether the launch has these arrays (`Extras`).
    mask_value: the score that the mask gives to those that it hides; None: -inf. What hides is then all in the mask.
    value_of_none: the score of all keys of a query that sees none, where mask_value is None: the kernels give such
        queries zeros, and XLA then gives them the average of all values (`averaged`). None: they keep zeros.
    bounds_weights: whether to bound weights by 1. Those of keys of zeros beyond the last key may be infinite otherwise,
        and infinity times such a key is not zero.
    clips: whether heads are narrower in the arrays than tiles, which then lie in panels.
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


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Extras:
    """The further arrays of a launch; None for one that it does not have.

    query_segments, key_segments: (batch, queries), (batch, keys), integers.
    bias: (1 or batch, 1 or heads, 1 or queries, keys), floating.
    mask, kept: `packed_bits` of such arrays: what is not hidden, and what dropout keeps.
    sinks: (heads,), float32.
    """

    query_segments: jax.Array | None = None
    key_segments: jax.Array | None = None
    bias: jax.Array | None = None
    mask: jax.Array | None = None
    kept: jax.Array | None = None
    sinks: jax.Array | None = None

    def dense(self, rows: int, columns: int) -> dict[str, jax.Array]:
        """Bias, mask and kept, by name, padded to whole tiles."""
        found = {"bias": self.bias, "mask": self.mask, "kept": self.kept}
        # Rows of words are whole tiles already.
        return {n: padded(a, rows, columns if n == "bias" else 1) for n, a in found.items() if a is not None}


Window = int | tuple[int | None, int | None] | None
"""The number of keys seen before and after the query's own place, or one for both; None: all."""

Segments = jax.Array | tuple[jax.Array, jax.Array] | None
"""(batch, length) for both queries and keys, or one array for each."""


def masking_of(queries: int, keys: int, is_causal: bool, window: Window, has_segments: bool) -> Masking:
    """The mask of a launch; causal attention is a window that ends at the query."""
    left, right = sides_of(window)
    if is_causal:
        right = 0 if right is None else min(right, 0)
    # Bounds that hide nothing are left out.
    left = None if left is not None and left >= queries - 1 else left
    right = None if right is not None and right >= keys - 1 and not is_causal else right
    return Masking(queries=queries, keys=keys, left=left, right=right, has_segments=has_segments)


def sides_of(window: Window) -> tuple[int | None, int | None]:
    """The numbers of keys seen before and after, as Python integers."""
    left, right = window if isinstance(window, tuple) else (window, window)
    return None if left is None else operator.index(left), None if right is None else operator.index(right)


def segments_of(segment_ids: Segments) -> tuple[jax.Array, jax.Array]:
    """The segments of queries and of keys."""
    own, other = segment_ids if isinstance(segment_ids, tuple) else (segment_ids, segment_ids)
    return jnp.asarray(own), jnp.asarray(other)


class Options(TypedDict):
    """The keyword arguments of `attention`, but for `return_residuals` and `implementation`."""

    bias: jax.Array | None
    mask: jax.Array | None
    is_causal: bool
    scale: float | None
    window: Window
    segment_ids: Segments
    softcap: float | None
    dropout_rate: float
    dropout_key: jax.Array | None
    dropout_mask: NotRequired[jax.Array | None]
    mask_value: NotRequired[float | None]
    sinks: NotRequired[jax.Array | None]
    deterministic: NotRequired[bool]


def problem_of(
    query: jax.Array, key: jax.Array, value: jax.Array | None = None, **options: Unpack[Options]
) -> tuple[Problem, Extras]:
    """The static facts and the further arrays of a launch, from arguments of `attention`; value: None if like key."""
    problem = facts_of(query, key, value, **options)
    return problem, extras_of(problem, **options)


def facts_of(query: jax.Array, key: jax.Array, value: jax.Array | None = None, **options: Unpack[Options]) -> Problem:
    """The static facts of a launch; see `problem_of`. Arrays may be shapes alone."""
    batch, queries, heads, size = query.shape
    keys, key_heads = key.shape[1:3]
    segment_ids = options["segment_ids"]
    problem = Problem(
        batch=batch,
        heads=heads,
        key_heads=key_heads,
        head_size=size,
        value_size=size if value is None else value.shape[3],
        dtype=query.dtype,
        masking=masking_of(queries, keys, options["is_causal"], options["window"], segment_ids is not None),
        scale=1 / math.sqrt(size) if options["scale"] is None else options["scale"],
        softcap=options["softcap"],
        dropout_rate=options["dropout_rate"],
        has_bias=options["bias"] is not None,
        has_mask=options["mask"] is not None,
        has_sinks=options.get("sinks") is not None,
        mask_value=options.get("mask_value"),
        deterministic=options.get("deterministic", True),
    )
    if problem.mask_value is None:
        return problem
    has_bounds = problem.masking.has_band or problem.masking.has_segments
    is_far, sees_one = _is_far(problem), not problem.has_mask and _sees_one(problem, segment_ids)
    if (not problem.has_mask and not has_bounds) or (is_far and sees_one):
        return replace(problem, mask_value=None)
    # A bias may be -inf for all that a query sees.
    if has_bounds and is_far and not (problem.dropout_rate or problem.has_bias) and _is_long(keys):
        # A sink takes all the weight of a query that sees no key.
        return replace(problem, mask_value=None, value_of_none=None if problem.has_sinks else problem.mask_value)
    # Queries that see no key average all values, so that no tile may be skipped.
    return replace(problem, has_mask=True, masking=Masking(queries=queries, keys=keys))


def extras_of(problem: Problem, **options: Unpack[Options]) -> Extras:
    """The further arrays of a launch."""
    bias, mask, segment_ids = options["bias"], options["mask"], options["segment_ids"]
    queries, keys = problem.masking.queries, problem.masking.keys
    if problem.mask_value is not None:
        bounds = masking_of(queries, keys, options["is_causal"], options["window"], segment_ids is not None)
        seen = seen_pairs(bounds, segment_ids)
        mask = seen if mask is None else mask if seen is None else four_axes(mask) & seen
        segment_ids = None
    own, other = (None, None) if segment_ids is None else segments_of(segment_ids)
    kept, key, sinks = options.get("dropout_mask"), options["dropout_key"], options.get("sinks")
    kept = None if kept is None else whole_rows(kept, keys)
    if problem.dropout_rate and key is not None:
        kept = keep_bits(key, problem.batch, problem.heads, queries, keys, rate=problem.dropout_rate)
    return Extras(
        query_segments=own,
        key_segments=other,
        bias=None if bias is None else whole_rows(bias, keys),
        mask=None if mask is None else packed_bits(whole_rows(mask, keys)),
        kept=None if kept is None else seen_bits(kept, problem.masking),
        sinks=None if sinks is None else sinks.astype(jnp.float32),
    )


def _is_far(problem: Problem) -> bool:
    """Whether all scores are so far above the mask's value that beside one of them hiding by it is hiding by -inf.

    Softcap bounds scores, and so does the range of float16. The kernels take all others to be above `LOWEST_SCORE`.
    """
    assert problem.mask_value is not None
    most = float(jnp.finfo(problem.dtype).max)
    largest = problem.softcap or problem.head_size * abs(problem.scale) * most * most  # of float64: infinity
    largest = math.inf if problem.has_bias or problem.has_sinks else largest + _UNDERFLOW
    return problem.mask_value <= max(LOWEST_SCORE, -largest)


def _sees_one(problem: Problem, segment_ids: Segments) -> bool:
    """Whether each query sees a key within the band and its segment."""
    masking = problem.masking
    in_band = masking.left is None or masking.queries - masking.left <= masking.keys
    return in_band and not isinstance(segment_ids, tuple)


def _is_long(keys: Any) -> bool:
    return not is_symbolic_dim(keys) and keys >= _KEYS_TO_SKIP


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


def seen_pairs(masking: Masking, segment_ids: Segments) -> jax.Array | None:
    """Which keys the queries see, boolean (1 or batch, 1, queries, keys); None if all."""
    row, column = jnp.arange(masking.queries)[:, None], jnp.arange(masking.keys)
    segments = (None, None)
    if segment_ids is not None:
        own, other = segments_of(segment_ids)
        segments = (own[:, None, :, None], other[:, None, None])
    seen = masking.visible(row, column, *segments, tile=1)
    return None if seen is None else four_axes(seen)


def check(query: jax.Array, key: jax.Array, value: jax.Array, **options: Unpack[Options]) -> None:
    """Raises TypeError or ValueError where arguments do not belong together."""
    scale, softcap = options["scale"], options["softcap"]
    for name, array in (("query", query), ("key", key), ("value", value)):
        if not jnp.issubdtype(array.dtype, jnp.floating):
            raise TypeError(f"attention: {name} must be floating, got {array.dtype.name}; cast it first.")
        if array.dtype != query.dtype:
            raise TypeError(f"attention: {name} must have query's dtype {query.dtype.name}, got {array.dtype.name}.")
        if array.ndim != 4:
            raise ValueError(f"attention: {name} must be (batch, length, heads, head size), got shape {array.shape}.")
    batch, queries, heads, size = query.shape
    keys, key_heads = key.shape[1:3]
    if (key.shape[0], key.shape[3]) != (batch, size) or value.shape[:3] != key.shape[:3]:
        raise ValueError(
            f"attention: key must be (batch, keys, key heads, head size) with the batch and head size of query "
            f"{query.shape}, and value like it up to its own head size; got {key.shape} and {value.shape}."
        )
    if not key_heads or heads % key_heads:
        raise ValueError(f"attention: query's {heads} heads must be a multiple of key's {key_heads}.")
    for name, number in (("scale", scale), ("softcap", softcap)):
        if isinstance(number, jax.Array):
            raise TypeError(f"attention: {name} must be a Python number, got an array.")
    if scale is not None:
        static_number("attention", "scale", scale)
    if softcap is not None:
        positive_number("attention", "softcap", softcap)
    _check_window(options["window"])
    dropout_key, dropout_mask = options["dropout_key"], options.get("dropout_mask")
    dense = {"bias": options["bias"], "mask": options["mask"], "dropout_mask": dropout_mask}
    _check_dense(dense, (batch, heads, queries, keys))
    _check_sinks(options.get("sinks"), heads)
    _check_segments(options["segment_ids"], batch, queries, keys)
    _check_dropout(options["dropout_rate"], dropout_key, dropout_mask)
    if options.get("mask_value") is not None:
        _check_mask_value(options.get("mask_value"))


def _check_window(window: Any) -> None:
    expected = "an integer or a tuple (left, right), each 0 or more or None"
    if isinstance(window, tuple) and len(window) != 2:
        raise ValueError(f"attention: window must be {expected}; got {window!r}.")
    try:
        sides = sides_of(window)
    except TypeError as error:
        hint = ", and not traced" if any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(window)) else ""
        raise ValueError(f"attention: window must be {expected}{hint}; got {window!r}.") from error
    if any(side is not None and side < 0 for side in sides):
        raise ValueError(f"attention: window must be {expected}; got {window!r}.")


def _check_dense(arrays: Mapping[str, jax.Array | None], scores: tuple[int, ...]) -> None:
    for name, array in arrays.items():
        if array is None:
            continue
        if name == "bias" and not jnp.issubdtype(array.dtype, jnp.floating):
            raise TypeError(f"attention: bias must be floating, got {array.dtype.name}.")
        if name != "bias" and array.dtype != jnp.bool_:
            hint = "; pass bias to add" if name == "mask" else ""
            raise TypeError(f"attention: {name} must be boolean (True keeps), got {array.dtype.name}{hint}.")
        pairs = zip(reversed(array.shape), reversed(scores), strict=False)
        if array.ndim > 4 or any(own not in (1, full) for own, full in pairs):
            raise ValueError(
                f"attention: {name} must broadcast to (batch, heads, queries, keys) {scores}, got {array.shape}."
            )


def _check_dropout(rate: Any, key: jax.Array | None, mask: jax.Array | None) -> None:
    if mask is None:
        dropout_words(
            "attention", rate, key, key_name="dropout_key" if key is not None else "dropout_mask or dropout_key"
        )
        return
    if key is not None:
        raise ValueError("attention: dropout_mask and dropout_key are both given; pass one of them.")
    if static_number("attention", "dropout_rate", rate) == 0:
        raise ValueError("attention: dropout_mask needs the dropout_rate that it was drawn with, above 0; got 0.")
    dropout_words("attention", rate, jnp.zeros(2, jnp.uint32))  # for the rate alone


def _check_mask_value(value: Any) -> None:
    """The value of hidden scores must be a finite float32, as the scores are, below 0."""
    number = static_number("attention", "mask_value", value)
    if not float(jnp.finfo(jnp.float32).min) <= number < 0:
        raise ValueError(
            f"attention: mask_value must be below 0 and finite in float32, got {value!r}; None stands for -inf."
        )


def _check_sinks(sinks: jax.Array | None, heads: int) -> None:
    if sinks is not None and not jnp.issubdtype(sinks.dtype, jnp.floating):
        raise TypeError(f"attention: sinks must be floating, got {sinks.dtype.name}.")
    if sinks is not None and sinks.shape != (heads,):
        raise ValueError(f"attention: sinks must be one number a query head, shape {(heads,)}; got {sinks.shape}.")


def _check_segments(segment_ids: Any, batch: int, queries: int, keys: int) -> None:
    if segment_ids is None:
        return
    if isinstance(segment_ids, tuple) and len(segment_ids) != 2:
        raise ValueError("attention: segment_ids must be one array or (of queries, of keys).")
    pair = segment_ids if isinstance(segment_ids, tuple) else (segment_ids, segment_ids)
    for ids, length in zip(pair, (queries, keys), strict=True):
        (array,) = as_arrays("attention", segment_ids=ids)
        if not jnp.issubdtype(array.dtype, jnp.integer):
            raise TypeError(f"attention: segment_ids must be integers, got {array.dtype.name}.")
        if array.shape != (batch, length):
            raise ValueError(f"attention: segment_ids must be (batch, length) {(batch, length)}, got {array.shape}.")
