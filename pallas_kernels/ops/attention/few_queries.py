"""A few queries that see all keys: the kernel of decoding, which has a group's queries in one tile and splits the keys.

The kernel of many queries gives each head a tile of queries of its own, however few there are.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.ops.attention.problem import Problem
from pallas_kernels.ops.decode_attention.mosaic_gpu import decode_forward
from pallas_kernels.ops.decode_attention.plan import Scores
from pallas_kernels.primitives.platform import varying_like

MOST_ROWS = 64
"""Queries of all heads of a group: a tile of the kernel. More would read the keys again."""
MANY_KEYS = 16384
"""Of all sequences: with more than one query the heads have to be turned before and after, which costs 3 µs."""
_LINES = 8
"""TMA brings groups of eight keys."""


def has_few_queries(problem: Problem) -> bool:
    """Whether the kernel of decoding takes this forward pass: nothing is hidden, added or dropped."""
    masking = problem.masking
    is_plain = problem.dense is None and not problem.dropout_rate and not masking.has_segments
    sees_all = masking.left is None and masking.right is None
    if not (is_plain and sees_all) or masking.keys % _LINES or masking.queries * problem.group > MOST_ROWS:
        return False
    return masking.queries == 1 or problem.batch * masking.keys >= MANY_KEYS


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
