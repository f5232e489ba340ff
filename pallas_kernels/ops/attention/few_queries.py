"""Attention with few queries that see all keys, by the kernel of `decode_attention`, which also splits the keys.

A tile's 64 rows would be mostly empty; there they are the queries of all heads that share a key head (TUNING.md).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.ops.attention.problem import Problem
from pallas_kernels.ops.decode_attention.mosaic_gpu import decode_forward
from pallas_kernels.ops.decode_attention.plan import HEAD_SIZES, ScoreRule
from pallas_kernels.primitives.platform import varying_like

_DECODED_ROWS = 64
"""Queries of all heads of a group: a tile of the decoding kernel. More would read the keys again."""
_DECODED_KEYS = 16384
"""Keys of all sequences: with more than one query, heads are transposed before and after, which costs 3 µs."""


def decodes(problem: Problem) -> bool:
    """Whether the decoding kernel computes this forward pass. Its TMA loads groups of eight keys."""
    masking, is_like_key = problem.masking, problem.value_size == problem.head_size
    is_taken = is_like_key and problem.head_size in HEAD_SIZES and not problem.clips and masking.keys % 8 == 0
    is_tile = masking.queries * problem.group <= _DECODED_ROWS
    pays = masking.queries == 1 or problem.batch * masking.keys >= _DECODED_KEYS
    return problem.sees_all and is_taken and is_tile and pays


def decoded(query: jax.Array, key: jax.Array, value: jax.Array, *, problem: Problem) -> jax.Array:
    """Attention by the decoding kernel: a head's queries become heads of one token, which sees every key."""
    batch, queries, heads, size = query.shape
    rows = query.swapaxes(1, 2).reshape(batch, 1, heads * queries, size)
    # A constant in the program, where `jnp.full` would be a kernel.
    lengths = varying_like(jnp.asarray(np.full(batch, key.shape[1], np.int32)), query, key, value)
    rule = ScoreRule(scale=problem.scale, window=None, softcap=problem.softcap)
    (out,) = decode_forward(rows, key, value, lengths, scores=rule)
    return out.reshape(batch, heads, queries, size).swapaxes(1, 2)
