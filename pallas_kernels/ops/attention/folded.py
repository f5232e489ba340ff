"""A few queries of the heads of a group as rows of one tile: one head of the group's size times as many queries.

A tile has rows for 64 queries of a head, however few there are.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.experimental.pallas as pl
from jax import lax

from pallas_kernels.ops.attention.mosaic_gpu import attention_forward
from pallas_kernels.ops.attention.problem import Extras, Problem
from pallas_kernels.primitives.platform import target_device

_MOST_QUERIES = 32
"""Of a head. With more of them fewer than half of the tiles would go."""
_LARGEST_HEAD = 128
"""With 256 ptxas spills where the last tile of keys is not whole."""
_MASKED_ROWS, _MASKED_KEYS = 64, 128
"""With a causal mask: one tile, so that what is seen of it need not be worked out for others."""


def can_fold(problem: Problem) -> bool:
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


def folds_forward(problem: Problem) -> bool:
    """Whether the forward pass takes folded queries: where heads make more tiles of them than run at once."""
    sees_all = can_fold(problem) and problem.masking.right is None
    return sees_all and problem.batch * problem.heads > target_device().core_count


def folded(problem: Problem) -> Problem:
    """The problem of `fold`'s arrays. A causal mask is that of the queries' numbers in their heads."""
    masking = replace(problem.masking, queries=problem.masking.queries * problem.group)
    return replace(problem, heads=problem.key_heads, masking=masking)


@dataclass(frozen=True, kw_only=True)
class Folds:
    """Folded rows that stay where they are: TMA brings those of each head.

    queries: of a head. group: heads that have one key head.
    """

    queries: int
    group: int

    def heads_of(self, rows: int) -> int:
        """Heads of a tile of so many rows."""
        return rows // self.queries


def folds_in_place(problem: Problem, rows: int) -> Folds | None:
    """How a tile of so many rows lies in the arrays of a problem that can be folded; None where it is no whole heads.

    TMA writes shared memory by eight rows.
    """
    queries, group = problem.masking.queries, problem.group
    is_whole = queries % 8 == 0 and rows % queries == 0 and queries * group % rows == 0
    return Folds(queries=queries, group=group) if is_whole else None


def row_places(batch: Any, row: Any, head: Any, rows: int, folds: Folds | None) -> list[tuple[Any, Any]]:
    """Where `rows` rows of a head from `row` on are: places in (batch, queries, heads, head size), and in a tile."""
    if folds is None:
        return [((batch, pl.ds(row, rows), head), pl.ds(0, rows))]
    first = head * folds.group + lax.div(row, folds.queries)
    whole = pl.ds(0, folds.queries)
    heads = range(folds.heads_of(rows))
    return [((batch, whole, first + i), pl.ds(i * folds.queries, folds.queries)) for i in heads]


def fold(array: jax.Array, group: int) -> jax.Array:
    """(batch, queries, heads, head size) as (batch, group * queries, heads / group, head size), by heads of a group."""
    batch, queries, heads, size = array.shape
    split = array.reshape(batch, queries, heads // group, group, size)
    return split.transpose(0, 3, 1, 2, 4).reshape(batch, group * queries, heads // group, size)


def unfold(array: jax.Array, group: int) -> jax.Array:
    """The inverse of `fold`."""
    batch, rows, key_heads, size = array.shape
    split = array.reshape(batch, group, rows // group, key_heads, size)
    return split.transpose(0, 2, 3, 1, 4).reshape(batch, rows // group, key_heads * group, size)


def folded_forward(
    query: jax.Array, key: jax.Array, value: jax.Array, *, problem: Problem
) -> tuple[jax.Array, jax.Array]:
    """`attention_forward` by `fold`'s arrays, where every query sees every key."""
    out, lse = attention_forward(fold(query, problem.group), key, value, Extras(), problem=folded(problem))
    return unfold(out, problem.group), lse.reshape(problem.batch, problem.heads, -1)
