"""Random bits from a key and an element's index, the same inside a kernel as in `jax.numpy`.

The generator is counter-based: an element's bits depend only on the key and the element's position in its array. So
masks are the same however a kernel splits its work, and the backward pass computes them again instead of reading them.

The generator is Wellons' `triple32`, a 32-bit mixing permutation whose avalanche cannot be told from a random
permutation's (bias 0.0209, the limit is 0.021), run over the element's linear index, with one key word added to the
index and the other mixed in after the first multiplication. That is about 12 integer instructions (JAX's threefry2x32:
35), of kinds that Mosaic GPU has: it lowers no high half of a product, which Philox needs. A dropout mask needs them
once for two elements. It is suitable for dropout, but not for cryptography.

Source: Wellons, "Prospecting for hash functions", 2018, https://nullprogram.com/blog/2018/07/31/ and
https://github.com/skeeto/hash-prospector. Counter-based generators: Salmon et al., "Parallel random numbers: as easy as
1, 2, 3", 2011, https://doi.org/10.1145/2063384.2063405
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp

Words = tuple[jax.Array, ...]
"""Two uint32 scalars; for a part of an array also the numbers of `part_words`."""

_PERIOD = 2**32
_PART_WORDS = 6
_MULTIPLIERS = (0xED5AD4BB, 0xAC4C1B51, 0x31848BAB)


def key_words(key: jax.Array) -> jax.Array:
    """Returns the first two words of a key, (2,) uint32, as kernels take them.

    Args:
        key: one key of `jax.random.key` (typed) or `jax.random.PRNGKey` (raw, uint32).

    Raises:
        TypeError: the argument is no key.
        ValueError: an array of keys.
    """
    key = jnp.asarray(key)
    if jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        if key.ndim:
            raise ValueError(f"expected one key, got an array of keys of shape {key.shape}; use jax.vmap over them.")
        key = jax.random.key_data(key)
    if key.dtype != jnp.uint32:
        raise TypeError(f"expected a key of jax.random.key or uint32 key data, got {jax.typeof(key)}.")
    if key.ndim != 1 or key.size < 2:
        raise ValueError(f"expected the data of one key, (2,) uint32 or longer, got shape {key.shape}.")
    return key if key.size == 2 or key.size >= _PART_WORDS else key[:2]


def part_words(
    key: jax.Array, *, whole: Sequence[int], part: Sequence[int], start: Sequence[jax.Array | int]
) -> jax.Array:
    """Returns words by which a part of a (..., features) array has the same bits as in the whole array.

    They stand wherever a key's words do; rows and columns are then those of the part.

    Args:
        key: as for `key_words`.
        whole, part: the shapes of the array and of the part.
        start: the part's first index in each dimension.
    """
    first_row, inner_rows = _uint32(0), []
    for i in range(len(whole) - 1):
        stride = math.prod(whole[i + 1 : -1])
        first_row += _uint32(start[i]) * jnp.uint32(stride)
        if whole[i] != part[i] and math.prod(part[:i]) != 1:
            inner_rows += [math.prod(part[i:-1]), stride * whole[i]]  # the same rows in the part and in the whole
    numbers = (first_row, start[-1], whole[-1], _rows_a_period(whole[-1]), *inner_rows)
    return jnp.concatenate([key_words(key)[:2], jnp.stack([jnp.asarray(number, jnp.uint32) for number in numbers])])


def of_part(words: jax.Array) -> bool:
    """Returns whether words are those of `part_words`."""
    return words.shape[-1] >= _PART_WORDS


def row_of_whole(words: Words, row: jax.Array | int) -> jax.Array:
    """Returns a row's number in the whole array, of which the row's array may be a part."""
    row = _uint32(row)
    if len(words) == 2:
        return row
    found, inner_rows = words[2], words[_PART_WORDS:]
    for part, whole in zip(inner_rows[::2], inner_rows[1::2], strict=True):
        found, row = found + row // part * whole, row % part
    return found + row


def mixed_words(words) -> Words:
    """Mixes a key's words for `random_bits`, so that keys 0, 1, 2... have nothing in common.

    Args:
        words: `key_words`, an array or, inside a kernel, a reference in GMEM or SMEM. One call per block is enough.
    """
    first = _mix(words[0] + jnp.uint32(0x9E3779B9))  # the golden ratio, so that a zero key is not mixed to zero
    second = _mix(words[1] ^ first)
    return first ^ _mix(second + jnp.uint32(0x85EBCA6B)), second, *(words[i] for i in range(2, words.shape[0]))


def random_bits(words: Words, row: jax.Array | int, column: jax.Array, *, features: int) -> jax.Array:
    """Returns 32 random bits for each element of a (rows, features) array.

    Args:
        words: from `mixed_words`.
        row: the element's row, an integer scalar (in a kernel) or array.
        column: its column, any integer array; `row` and `column` broadcast.
        features: the length of a row.

    Returns:
        uint32, of the broadcast shape. Elements in different periods of 2**32 have different keys.
    """
    start, column, (first, second) = _place(words, row, column, features)
    return _mix(first + start + column, second)


def keep_mask(words: Words, row: jax.Array | int, column: jax.Array, *, features: int, rate: float) -> jax.Array:
    """Returns which elements dropout keeps: each with probability 1 - `rate`, exact to 2**-32.

    Elements 2 i and 2 i + 1 share the `random_bits` of position i; the first one swaps its halves. Each compares all 32
    bits with the threshold. The comparisons are correlated only if the upper 16 bits equal the threshold's, one time in
    65536. A thread that holds both elements computes the word once, which halves the work.

    The other arguments are those of `random_bits`.

    Raises:
        ValueError: `rate` outside [0, 1).
    """
    check_rate(rate)
    threshold = min(round(rate * _PERIOD), _PERIOD - 1)
    start, column, (first, second) = _place(words, row, column, features)
    # Start and column are halved separately, before the key is added. So the compiler sees which columns share a word,
    # if it sees which columns are even (see `elementwise.Part.segment_columns`).
    one = jnp.uint32(1)
    if len(words) > 2 and features % 2:
        column = column + words[3]
    is_second = column & one
    place = (column - is_second) >> one
    if len(words) > 2 and features % 2 == 0:
        place = place + (words[3] >> one)
    if features % 2:
        place, is_second = place + (is_second & start), is_second ^ (start & one)
    word = _mix((first + (start >> one)) + place, second)
    swapped = (word << jnp.uint32(16)) | (word >> jnp.uint32(16))
    bits = jnp.where(is_second == jnp.uint32(0), swapped, word)
    return bits >= jnp.uint32(threshold)


def array_keep_mask(key: jax.Array, shape: tuple[int, ...], *, rate: float) -> jax.Array:
    """Computes `keep_mask` for a whole (..., features) array in plain `jax.numpy`: the kernels' reference.

    Leading dimensions are flattened to rows, in order.
    """
    *leading, features = shape or (1,)
    row = jnp.arange(math.prod(leading), dtype=jnp.uint32)[:, None]
    column = jnp.arange(features, dtype=jnp.uint32)
    return keep_mask(mixed_words(key_words(key)), row, column, features=features, rate=rate).reshape(shape)


def dropped(
    values: jax.Array, words: Words, row: jax.Array | int, column: jax.Array, *, features: int, rate: float
) -> jax.Array:
    """Applies dropout to float32 elements: 0 where `keep_mask` drops one, else the element times 1 / (1 - `rate`)."""
    mask = keep_mask(words, row, column, features=features, rate=rate)
    return jnp.where(mask, values * (1.0 / (1.0 - rate)), jnp.float32(0))


def array_dropped(values: jax.Array, key: jax.Array, *, rate: float) -> jax.Array:
    """Applies dropout to a whole (..., features) array in plain `jax.numpy`, as `dropped` does to its elements."""
    return jnp.where(array_keep_mask(key, values.shape, rate=rate), values * (1.0 / (1.0 - rate)), 0)


def check_rate(rate: float) -> None:
    """Raises a ValueError unless `rate` is a dropout rate."""
    if not 0 <= rate < 1:
        raise ValueError(f"a dropout rate is the share of elements set to zero, 0 <= rate < 1, got {rate}.")


def _place(words: Words, row: jax.Array | int, column: jax.Array, features: int) -> tuple[jax.Array, jax.Array, Words]:
    """Returns the elements' row start and column in their period of 2**32 (whole rows), and the period's words."""
    first, second, *_ = words
    row, size, rows_a_period = row_of_whole(words, row), jnp.uint32(features), jnp.uint32(_rows_a_period(features))
    if len(words) > 2:
        size, rows_a_period = words[4:_PART_WORDS]
    # Rows before the 2**32nd element have epoch 0, whose mix is 0 and changes nothing.
    epoch = row // rows_a_period
    return row * size, _uint32(column), (first, second ^ _mix(epoch))


def _rows_a_period(features: int) -> int:
    return min(_PERIOD - 1, max(1, _PERIOD // max(1, features)))


def _mix(value: jax.Array, key: jax.Array | None = None) -> jax.Array:
    """Computes triple32, with `key` mixed in after the first product (in the same three-input logic instruction)."""
    value = (value ^ (value >> jnp.uint32(17))) * jnp.uint32(_MULTIPLIERS[0])
    shifted = value >> jnp.uint32(11)
    value = (value ^ (shifted if key is None else shifted ^ key)) * jnp.uint32(_MULTIPLIERS[1])
    value = (value ^ (value >> jnp.uint32(15))) * jnp.uint32(_MULTIPLIERS[2])
    return value ^ (value >> jnp.uint32(14))


def _uint32(value: jax.Array | int) -> jax.Array:
    return jnp.asarray(value).astype(jnp.uint32)


MEMBERS = ((0x7B2A0FA7, 0x54791297), (0xB6928C45, 0x38F9075D))
"""The factors of `shared_word`'s word: four products, each with two halves for two elements.

The factors are odd, so each product is as uniform as the word. Only the last 15 bits of a half decide. The upper halves
of two products lie on a lattice modulo 2**31 whose shortest dual vector has at least 0.6 of the greatest possible
length. The lower halves depend on 15 bits of the word. Whether two, three or four of them are below a limit is as for
independent values, except for correlations of 5e-4 (limits of 0.4 to 0.97), 1.6e-3 and 2.5e-3 (0.7 to 0.95). The
factors were found by random search.
"""

PLACE_STEP = 0x9E3779B9
"""The factor of positions, modulo 2**32, before the first key word is added: 2**32 over the golden ratio."""


def shared_word(stepped: jax.Array, second: jax.Array) -> jax.Array:
    """Returns a random word for elements that share it, each of which uses a half of its product with one of `MEMBERS`.

    This takes two rounds; `random_bits` has three. The first multiplication is `PLACE_STEP`'s, and the last one is the
    members'.

    Args:
        stepped: place * PLACE_STEP + the first of `mixed_words`, uint32.
        second: the second of `mixed_words`, or `epoch_word` for positions from 2**32 on.
    """
    value = (stepped ^ ((stepped >> jnp.uint32(16)) ^ second)) * jnp.uint32(0x7FEB352D)
    return value ^ (value >> jnp.uint32(15))


def epoch_word(second: jax.Array, epoch: jax.Array) -> jax.Array:
    """Returns the second key word of the positions from epoch * 2**32 on; epoch 0 changes nothing."""
    return second ^ _mix(epoch)
