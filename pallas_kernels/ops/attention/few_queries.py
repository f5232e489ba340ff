"""Attention with few queries, which would leave most of a tile's 64 rows empty (TUNING.md).

GQA packing: the queries of all heads that share a key head are rows of one tile, forward and backward. Where queries
see all keys and no gradient is needed, the kernel of `decode_attention` does that, and also splits the keys.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.ops.attention.forward.kernel import attention_forward
from pallas_kernels.ops.attention.problem import Extras, Problem, padded
from pallas_kernels.ops.decode_attention.mosaic_gpu import decode_forward
from pallas_kernels.ops.decode_attention.plan import Scores
from pallas_kernels.primitives.platform import target_device, varying_like

_MOST_QUERIES = 32
"""Queries of a head: with more, packing would save less than half of the tiles."""
_LARGEST_HEAD = 128
"""With a head size of 256 ptxas spills where the last key tile is not whole."""
_MASKED_ROWS, _MASKED_KEYS = 64, 128
"""A causal mask takes one tile: key ranges of several packed tiles are not implemented."""
_DECODED_ROWS = 64
"""Queries of all heads of a group: a tile of the decoding kernel. More would read the keys again."""
_DECODED_KEYS = 16384
"""Keys of all sequences: with more than one query, heads are transposed before and after, which costs 3 µs."""
_DECODED_SIZES = (64, 96, 128, 192, 256)
"""Head sizes that the decoding kernel takes. Other heads are padded with zeros."""
_LINES = 8
"""The decoding kernel's TMA loads groups of eight keys."""


def can_pack(problem: Problem) -> bool:
    """Whether queries of several heads may share a tile: they see the same keys, and nothing depends on the head."""
    masking = problem.masking
    is_plain = problem.dense is None and not problem.dropout_rate and not masking.has_segments and masking.left is None
    is_few = masking.queries <= _MOST_QUERIES and problem.head_size <= _LARGEST_HEAD
    if not is_plain or problem.group == 1 or not is_few:
        return False
    if masking.right is None:
        return True
    is_one_tile = masking.queries * problem.group <= _MASKED_ROWS and masking.keys <= _MASKED_KEYS
    return masking.right == 0 and is_one_tile


def packs_forward(problem: Problem) -> bool:
    """Whether the forward pass packs: where unpacked heads would make more tiles than run at once."""
    sees_all = can_pack(problem) and problem.masking.right is None
    return sees_all and problem.batch * problem.heads > target_device().core_count


def packed(problem: Problem) -> Problem:
    """The problem of packed arrays. A causal mask counts queries within their heads."""
    masking = replace(problem.masking, queries=problem.masking.queries * problem.group)
    return replace(problem, heads=problem.key_heads, masking=masking)


@dataclass(frozen=True, kw_only=True)
class Packing:
    """Packing of rows that stay where they are in memory: TMA loads those of each head.

    queries: of a head. group: query heads of a key head.
    """

    queries: int
    group: int

    def heads_of(self, rows: int) -> int:
        """The heads of a tile of so many rows."""
        return rows // self.queries


def packs_in_place(problem: Problem, rows: int) -> Packing | None:
    """The packing of tiles of so many rows; None where a tile does not have whole heads.

    TMA writes shared memory by groups of eight rows.
    """
    queries, group = problem.masking.queries, problem.group
    is_whole = queries % 8 == 0 and rows % queries == 0 and queries * group % rows == 0
    return Packing(queries=queries, group=group) if is_whole else None


def row_places(batch: Any, row: Any, head: Any, rows: int, packing: Packing | None) -> list[tuple[Any, Any]]:
    """The places of the `rows` rows from `row` on in (batch, queries, heads, head size), each with that in a tile."""
    if packing is None:
        return [((batch, pl.ds(row, rows), head), pl.ds(0, rows))]
    first = head * packing.group + lax.div(row, packing.queries)
    whole = pl.ds(0, packing.queries)
    heads = range(packing.heads_of(rows))
    return [((batch, whole, first + i), pl.ds(i * packing.queries, packing.queries)) for i in heads]


def pack(array: jax.Array, group: int) -> jax.Array:
    """(batch, queries, heads, head size) as (batch, group * queries, heads / group, head size), head by head."""
    batch, queries, heads, size = array.shape
    split = array.reshape(batch, queries, heads // group, group, size)
    return split.transpose(0, 3, 1, 2, 4).reshape(batch, group * queries, heads // group, size)


def unpack(array: jax.Array, group: int) -> jax.Array:
    """The inverse of `pack`."""
    batch, rows, key_heads, size = array.shape
    split = array.reshape(batch, group, rows // group, key_heads, size)
    return split.transpose(0, 2, 3, 1, 4).reshape(batch, rows // group, key_heads * group, size)


def packed_forward(
    query: jax.Array, key: jax.Array, value: jax.Array, *, problem: Problem
) -> tuple[jax.Array, jax.Array]:
    """`attention_forward` on packed arrays, where every query sees every key."""
    out, lse = attention_forward(pack(query, problem.group), key, value, Extras(), problem=packed(problem))
    return unpack(out, problem.group), lse.reshape(problem.batch, problem.heads, -1)


def has_few_queries(problem: Problem) -> bool:
    """Whether the decoding kernel computes this forward pass: nothing is hidden, added or dropped."""
    masking = problem.masking
    is_plain = problem.dense is None and not problem.dropout_rate and not masking.has_segments
    sees_all = masking.left is None and masking.right is None
    if not (is_plain and sees_all) or masking.keys % _LINES or masking.queries * problem.group > _DECODED_ROWS:
        return False
    return masking.queries == 1 or problem.batch * masking.keys >= _DECODED_KEYS


def few_queries_forward(query: jax.Array, key: jax.Array, value: jax.Array, *, problem: Problem) -> jax.Array:
    """Attention by the decoding kernel: the queries of all heads become heads of one token, which sees every key.

    query and the result: (batch, queries, heads, head size). key, value: (batch, keys, key heads, head size).
    """
    batch, queries, heads, size = query.shape
    key_heads, group = problem.key_heads, problem.group
    wide = next(whole for whole in _DECODED_SIZES if whole >= size)
    if wide > size:
        return few_queries_forward(*padded(wide, query, key, value), problem=problem)[..., :size]
    rows = query
    if queries > 1:
        rows = query.reshape(batch, queries, key_heads, group, size).swapaxes(1, 2)
        rows = rows.reshape(batch, 1, heads * queries, size)
    # A constant in the program, where `jnp.full` would be a kernel.
    lengths = varying_like(jnp.asarray(np.full(batch, key.shape[1], np.int32)), query, key, value)
    rule = Scores(scale=problem.scale, window=None, softcap=problem.softcap)
    (out,) = decode_forward(rows, key, value, lengths, scores=rule)
    if queries > 1:
        out = out.reshape(batch, key_heads, queries, group, size).swapaxes(1, 2)
    return out.reshape(query.shape)
