"""Arrays made longer or shorter, where a kernel takes another length than the caller has.

XLA's kernels move so many elements at a time, whatever their size: as words of 32 bits they take about half of the time
(*Keys that nobody sees* in TUNING.md).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax


def padded(array: jax.Array, length: int) -> jax.Array:
    """(batch, tokens, heads, head size), of 16-bit numbers and an even head size, with zeros up to so many tokens."""
    extra = length - array.shape[1]
    return _of_words(jnp.pad(_words(array), ((0, 0), (0, extra), (0, 0))), array) if extra else array


def cut(array: jax.Array, length: int) -> jax.Array:
    """Its first tokens, likewise."""
    return _of_words(_words(array)[:, :length], array) if length < array.shape[1] else array


def _words(array: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(array.reshape(*array.shape[:2], -1, 2), jnp.int32)


def _of_words(words: jax.Array, like: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(words, like.dtype).reshape(*words.shape[:2], *like.shape[2:])
