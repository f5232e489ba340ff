"""The weights that dropout keeps, by the operation's own generator, as bits that the kernels and the reference read.

16 weights share a random word: those whose queries differ in bit 3 alone, and whose keys differ in bits 0, 3 and 4
alone. For keys with bit 4 set, the halves of the word are swapped. The word is multiplied by four numbers, one for each
query and each value of the keys' bit 3; an even key and the odd one after it take 16 bits of a product each.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.ops.attention.dense import TILE, WORD, unpacked_bits
from pallas_kernels.primitives.random import (
    MEMBERS,
    PLACE_STEP,
    epoch_word,
    key_words,
    mixed_words,
    row_of_whole,
    shared_word,
)

_PERIOD = 2**32
_HALF, _OTHER, _FAR = 1, 8, 16
"""The bits in which the places of weights that share a word differ: all three of keys, the second of queries."""
_SHARING = [0, _HALF, _OTHER, _OTHER | _HALF, _FAR, _FAR | _HALF, _FAR | _OTHER, _FAR | _OTHER | _HALF]
"""The places of keys that share a random word, less the first one's. A word of bits has the keys of four such words."""
_WHOLE_QUERIES = 128


def keep_bits(
    key: jax.Array, batch: int, heads: int, queries: int, keys: int, *, rate: float, period: int = _PERIOD
) -> jax.Array:
    """`keep_mask` as `dense.packed_bits`: one fusion, of six instructions a weight.

    Bits beyond the last key are random. period: places after which whole groups of queries have another key word.
    """
    # Places have a row for each (batch, head, query), and a column for each key.
    whole_queries, whole_keys = -(-queries // _WHOLE_QUERIES) * _WHOLE_QUERIES, -(-keys // WORD) * WORD
    words = mixed_words(key_words(key))
    columns = -(-keys // TILE) * (TILE // WORD)
    # Places of one count are one fusion; of axes of their own, XLA would compute parts in four further launches.
    place = jnp.arange(batch * heads * queries * columns, dtype=jnp.uint32)
    column, place = place % jnp.uint32(columns), place // jnp.uint32(columns)
    query = place % jnp.uint32(queries)
    row = row_of_whole(words, place // jnp.uint32(queries)) * jnp.uint32(whole_queries) + query
    (start_word, second), is_part = words[:2], len(words) > 2
    a_period = max(1, period // whole_keys // _WHOLE_QUERIES) * _WHOLE_QUERIES
    # The rows of a part of an array on several devices may lie in further periods.
    if is_part or batch * heads * whole_queries > a_period:
        second = epoch_word(second, row // jnp.uint32(a_period))
    is_other = (query & _OTHER) != 0
    start = (row & jnp.uint32(_PERIOD - 1 - _OTHER)) * jnp.uint32(whole_keys) + column * jnp.uint32(WORD)
    found = jnp.uint32(0)
    for first in range(0, _OTHER, 2):
        word = shared_word((start + jnp.uint32(first)) * jnp.uint32(PLACE_STEP) + start_word, second)
        turned = (word << jnp.uint32(16)) | (word >> jnp.uint32(16))
        for key_place in _SHARING:
            own, other = (jnp.uint32(pair[(key_place & _OTHER) != 0]) for pair in MEMBERS)
            bits = (turned if key_place & _FAR else word) * jnp.where(is_other, other, own)
            bits = bits >> jnp.uint32(16) if key_place & _HALF else bits
            kept = (bits & jnp.uint32(2**15 - 1)) < jnp.uint32(round((1 - rate) * 2**15))
            found = found | jnp.where(kept, jnp.uint32(1 << (first + key_place)), jnp.uint32(0))
    return found.reshape(batch, heads, queries, columns)


def keep_mask(key: jax.Array, batch: int, heads: int, queries: int, keys: int, *, rate: float) -> jax.Array:
    """The weights that dropout keeps, boolean (batch, heads, queries, keys).

    Each is kept with probability 1 - rate, rounded to a multiple of 2**-15.
    """
    # Fused with what reads single bits, XLA would compute each word 32 times.
    bits = lax.optimization_barrier(keep_bits(key, batch, heads, queries, keys, rate=rate))
    return unpacked_bits(bits, keys)
