"""Attention with few queries that see all keys, which would leave most of a tile's 64 rows empty (TUNING.md).

The queries of all heads that share a key head become queries of one head. Without a gradient, the kernel of
`decode_attention` computes them, which also splits the keys.
"""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.ops.attention.problem import Problem
from pallas_kernels.ops.decode_attention.config import HEAD_SIZES
from pallas_kernels.ops.decode_attention.mosaic_gpu import decode_forward
from pallas_kernels.ops.decode_attention.plan import ScoreRule
from pallas_kernels.primitives.platform import target_device, varying_like

_MOST_QUERIES = 32
"""Queries of a head: with more, packing would save less than half of the tiles."""
_DECODED_ROWS = 64
"""Queries of all heads of a group: a tile of the decoding kernel. More would read the keys again."""
_DECODED_KEYS = 16384
"""Keys of all sequences: with more than one query, heads are transposed before and after, which costs 3 µs."""


def decodes(problem: Problem) -> bool:
    """Whether the decoding kernel computes this forward pass. Its TMA loads groups of eight keys."""
    masking, is_like_key = problem.masking, problem.value_size == problem.head_size
    is_taken = is_like_key and problem.head_size in HEAD_SIZES and masking.keys % 8 == 0
    is_tile = masking.queries * problem.group <= _DECODED_ROWS
    pays = masking.queries == 1 or problem.batch * masking.keys >= _DECODED_KEYS
    return problem.sees_all and is_taken and is_tile and pays


def packed(problem: Problem) -> Problem:
    """Gives each key head one query head with the queries of its group, if that pays.

    It pays if the decoding kernel takes them, or if the heads would make more tiles than run at once.
    """
    masking, group = problem.masking, problem.group
    is_many = problem.batch * problem.heads > target_device().core_count
    pays = problem.sees_all and masking.queries <= _MOST_QUERIES and is_many
    if group == 1 or not (pays or decodes(problem)):
        return problem
    return replace(problem, heads=problem.key_heads, masking=replace(masking, queries=masking.queries * group))


def pack(query: jax.Array, heads: int) -> jax.Array:
    """(batch, queries, all heads, head size) with so many heads, each with the queries of its group, head by head."""
    batch, queries, all_heads, size = query.shape
    split = query.reshape(batch, queries, heads, all_heads // heads, size)
    return query if all_heads == heads else split.transpose(0, 3, 1, 2, 4).reshape(batch, -1, heads, size)


def unpack(packed: jax.Array, heads: int) -> jax.Array:
    """The inverse of `pack`, of an array that had so many heads."""
    batch, _, key_heads, size = packed.shape
    split = packed.reshape(batch, heads // key_heads, -1, key_heads, size)
    return packed if heads == key_heads else split.transpose(0, 2, 3, 1, 4).reshape(batch, -1, heads, size)


def decoded(query: jax.Array, key: jax.Array, value: jax.Array, *, problem: Problem) -> jax.Array:
    """Attention by the decoding kernel: a key head's queries become heads of one token, which sees every key."""
    batch, queries, heads, size = query.shape
    rows = query.swapaxes(1, 2).reshape(batch, 1, heads * queries, size)
    # A constant in the program, where `jnp.full` would be a kernel.
    lengths = varying_like(jnp.asarray(np.full(batch, key.shape[1], np.int32)), query, key, value)
    rule = ScoreRule(scale=problem.scale, window=None, softcap=problem.softcap)
    (out,) = decode_forward(rows, key, value, lengths, scores=rule)
    return out.reshape(batch, heads, queries, size).swapaxes(1, 2)
