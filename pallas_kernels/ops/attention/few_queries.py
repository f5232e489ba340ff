"""Attention with few queries that see all keys, which would leave most of a tile's 64 rows empty (TUNING.md).

The queries of all heads that share a key head become queries of one head. Without a gradient, the kernel of
`decode_attention` computes them, which also splits the keys.
"""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.ops.attention.head_tiles import wider
from pallas_kernels.ops.attention.problem import Problem
from pallas_kernels.ops.decode_attention.mosaic_gpu import decode_forward
from pallas_kernels.ops.decode_attention.plan import ScoreRule
from pallas_kernels.primitives.platform import target_device, varying_like

_MOST_QUERIES = 32
"""Queries of a head: with more, packing would save less than half of the tiles."""
_DECODED_ROWS = 64
"""Queries of all heads of a group: a tile of the decoding kernel. More would read the keys again."""
_DECODED_KEYS = 16384
"""Keys of all sequences: with more than one query, heads are transposed before and after, which costs 3 µs."""
_DECODED_SIZES = (64, 96, 128, 192, 256)
"""Head sizes that the decoding kernel takes. Other heads are padded with zeros."""


def decodes(problem: Problem) -> bool:
    """Whether the decoding kernel computes this forward pass. Its TMA loads groups of eight keys."""
    masking = problem.masking
    if (
        not _all_is_seen(problem)
        or problem.value_size != problem.head_size
        or masking.keys % 8
        or masking.queries * problem.group > _DECODED_ROWS
    ):
        return False
    return masking.queries == 1 or problem.batch * masking.keys >= _DECODED_KEYS


def packed(problem: Problem) -> Problem:
    """Gives each key head one query head with the queries of its group, if that pays.

    It pays if the decoding kernel takes them, or if the heads would make more tiles than run at once.
    """
    masking, group = problem.masking, problem.group
    is_many = problem.batch * problem.heads > target_device().core_count
    pays = _all_is_seen(problem) and masking.queries <= _MOST_QUERIES and is_many
    if group == 1 or not (pays or decodes(problem)):
        return problem
    return replace(problem, heads=problem.key_heads, masking=replace(masking, queries=masking.queries * group))


def pack(query: jax.Array, heads: int) -> jax.Array:
    """(batch, queries, all heads, head size) with so many heads, each with the queries of its group, head by head."""
    batch, queries, all_heads, size = query.shape
    group = all_heads // heads
    split = query.reshape(batch, queries, heads, group, size)
    return split.transpose(0, 3, 1, 2, 4).reshape(batch, group * queries, heads, size) if group > 1 else query


def unpack(packed: jax.Array, heads: int) -> jax.Array:
    """The inverse of `pack`, of an array that had so many heads."""
    batch, rows, key_heads, size = packed.shape
    group = heads // key_heads
    split = packed.reshape(batch, group, rows // group, key_heads, size)
    return split.transpose(0, 2, 3, 1, 4).reshape(batch, rows // group, heads, size) if group > 1 else packed


def decoded(query: jax.Array, key: jax.Array, value: jax.Array, *, problem: Problem) -> jax.Array:
    """Attention by the decoding kernel: a key head's queries become heads of one token, which sees every key."""
    batch, queries, heads, size = query.shape
    wide = next(whole for whole in _DECODED_SIZES if whole >= size)
    if wide > size:
        return decoded(*wider(wide, query, key, value), problem=problem)[..., :size]
    rows = query.swapaxes(1, 2).reshape(batch, 1, heads * queries, size)
    # A constant in the program, where `jnp.full` would be a kernel.
    lengths = varying_like(jnp.asarray(np.full(batch, key.shape[1], np.int32)), query, key, value)
    rule = ScoreRule(scale=problem.scale, window=None, softcap=problem.softcap)
    (out,) = decode_forward(rows, key, value, lengths, scores=rule)
    return out.reshape(batch, heads, queries, size).swapaxes(1, 2)


def _all_is_seen(problem: Problem) -> bool:
    """Whether nothing is hidden, added or dropped."""
    masking, arrays = problem.masking, problem.has_bias or problem.has_mask or problem.has_sinks
    return not (masking.has_band or masking.has_segments or arrays or problem.dropout_rate)
