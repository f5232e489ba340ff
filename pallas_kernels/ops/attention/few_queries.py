"""Few queries, of which a tile has rows for 64 of a head, however few there are (TUNING.md).

GQA packing: the queries of all heads that share a key head are rows of one tile, forward and backward. Where queries
see all keys and no gradient is asked for, the kernel of decoding does that, and splits the keys.
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
from pallas_kernels.ops.attention.problem import Extras, Problem
from pallas_kernels.ops.decode_attention.mosaic_gpu import decode_forward
from pallas_kernels.ops.decode_attention.plan import Scores
from pallas_kernels.primitives.platform import target_device, varying_like

_MOST_QUERIES = 32
"""Of a head. With more of them fewer than half of the tiles would go."""
_LARGEST_HEAD = 128
"""With 256 ptxas spills where the last tile of keys is not whole."""
_MASKED_ROWS, _MASKED_KEYS = 64, 128
"""With a causal mask: one tile, so that what is seen of it need not be worked out for others."""
_DECODED_ROWS = 64
"""Queries of all heads of a group: a tile of the kernel. More would read the keys again."""
_DECODED_KEYS = 16384
"""Of all sequences: with more than one query the heads have to be turned before and after, which costs 3 µs."""
_LINES = 8
"""TMA loads groups of eight keys."""


def can_pack(problem: Problem) -> bool:
    """Whether rows may be queries of several heads: of them all the same is seen, and nothing depends on the head."""
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
    """Whether the forward pass takes packed queries: where heads make more tiles of them than run at once."""
    sees_all = can_pack(problem) and problem.masking.right is None
    return sees_all and problem.batch * problem.heads > target_device().core_count


def packed(problem: Problem) -> Problem:
    """The problem of `pack`'s arrays. A causal mask is that of the queries' numbers in their heads."""
    masking = replace(problem.masking, queries=problem.masking.queries * problem.group)
    return replace(problem, heads=problem.key_heads, masking=masking)


@dataclass(frozen=True, kw_only=True)
class Packing:
    """Packed rows that stay where they are: TMA loads those of each head.

    queries: of a head. group: heads that have one key head.
    """

    queries: int
    group: int

    def heads_of(self, rows: int) -> int:
        """Heads of a tile of so many rows."""
        return rows // self.queries


def packs_in_place(problem: Problem, rows: int) -> Packing | None:
    """How a tile of so many rows lies in the arrays of a problem that can be packed; None where it is no whole heads.

    TMA writes shared memory by eight rows.
    """
    queries, group = problem.masking.queries, problem.group
    is_whole = queries % 8 == 0 and rows % queries == 0 and queries * group % rows == 0
    return Packing(queries=queries, group=group) if is_whole else None


def row_places(batch: Any, row: Any, head: Any, rows: int, packing: Packing | None) -> list[tuple[Any, Any]]:
    """Where `rows` rows of a head from `row` on are: places in (batch, queries, heads, head size), and in a tile."""
    if packing is None:
        return [((batch, pl.ds(row, rows), head), pl.ds(0, rows))]
    first = head * packing.group + lax.div(row, packing.queries)
    whole = pl.ds(0, packing.queries)
    heads = range(packing.heads_of(rows))
    return [((batch, whole, first + i), pl.ds(i * packing.queries, packing.queries)) for i in heads]


def pack(array: jax.Array, group: int) -> jax.Array:
    """(batch, queries, heads, head size) as (batch, group * queries, heads / group, head size), by heads of a group."""
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
    """`attention_forward` by `pack`'s arrays, where every query sees every key."""
    out, lse = attention_forward(pack(query, problem.group), key, value, Extras(), problem=packed(problem))
    return unpack(out, problem.group), lse.reshape(problem.batch, problem.heads, -1)


def has_few_queries(problem: Problem) -> bool:
    """Whether the kernel of decoding takes this forward pass: nothing is hidden, added or dropped."""
    masking = problem.masking
    is_plain = problem.dense is None and not problem.dropout_rate and not masking.has_segments
    sees_all = masking.left is None and masking.right is None
    if not (is_plain and sees_all) or masking.keys % _LINES or masking.queries * problem.group > _DECODED_ROWS:
        return False
    return masking.queries == 1 or problem.batch * masking.keys >= _DECODED_KEYS


def few_queries_forward(query: jax.Array, key: jax.Array, value: jax.Array, *, problem: Problem) -> jax.Array:
    """Like query, (batch, queries, heads, head size); key and value (batch, keys, key heads, head size).

    All queries of a head are heads of one token, which sees every key.
    """
    batch, queries, heads, size = query.shape
    key_heads, group = problem.key_heads, problem.group
    rows = query
    if queries > 1:
        rows = query.reshape(batch, queries, key_heads, group, size).swapaxes(1, 2)
        rows = rows.reshape(batch, 1, heads * queries, size)
    # A constant of the program: `jnp.full` would be a kernel.
    lengths = varying_like(jnp.asarray(np.full(batch, key.shape[1], np.int32)), query, key, value)
    rule = Scores(scale=problem.scale, window=None, softcap=problem.softcap)
    out = decode_forward(rows, key, value, lengths, scores=rule)
    if queries > 1:
        out = out.reshape(batch, key_heads, queries, group, size).swapaxes(1, 2)
    return out.reshape(query.shape)
