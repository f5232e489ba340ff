"""The kernels' random bits: the same everywhere, and random by the usual counts."""

from __future__ import annotations

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from pallas_kernels.primitives.random import array_keep_mask, keep_mask, key_words, mixed_words, random_bits
from pallas_kernels.primitives.rows import split_row, store_row

ROWS, FEATURES = 512, 1024


def bits_of(key, rows=ROWS, features=FEATURES):
    row, column = jnp.arange(rows)[:, None], jnp.arange(features)
    return np.asarray(random_bits(mixed_words(key_words(key)), row, column, features=features))


def deviations(counts, expected_share, trials):
    """How many standard deviations binomial counts are off."""
    deviation = (trials * expected_share * (1 - expected_share)) ** 0.5
    return np.abs(np.asarray(counts, np.float64) - trials * expected_share) / deviation


def test_known_bits():
    """The bits are part of what a key means: another version must not change them."""
    bits = bits_of(jax.random.key(0), 2, 2)
    assert bits.tolist() == [[785235723, 3119173374], [931453206, 1339920403]]


@pytest.mark.parametrize("seed", [0, 1, 2**31])
def test_every_bit_is_fair_and_independent_of_its_neighbours(seed):
    bits = bits_of(jax.random.key(seed))
    planes = (bits[..., None] >> np.arange(32, dtype=np.uint32)) & 1
    assert deviations(planes.sum((0, 1)), 0.5, bits.size).max() < 5
    # A bit against the same bit one column, one row, and a block of eight columns on; and against every other bit.
    for step in ((0, 1), (1, 0), (0, 8), (1, 1)):
        other = np.roll(planes, step, (0, 1))
        assert deviations((planes == other).sum((0, 1)), 0.5, bits.size).max() < 5
    signs = 1 - 2 * planes.reshape(-1, 32).astype(np.float32)
    correlation = np.abs(signs.T @ signs / len(signs) - np.eye(32))
    assert correlation.max() < 5.5 / len(signs) ** 0.5


@pytest.mark.parametrize("pair", [(0, 1), (1, 2), (0, 2**31)])
def test_neighbouring_keys_have_nothing_in_common(pair):
    first, second = (bits_of(jax.random.key(seed)) for seed in pair)
    planes = ((first ^ second)[..., None] >> np.arange(32, dtype=np.uint32)) & 1
    assert deviations(planes.sum((0, 1)), 0.5, first.size).max() < 5
    # Nor is one a shifted or swapped copy of the other: as many equal values as chance has, 2**38 pairs of 2**32.
    assert np.intersect1d(first, second).size < 2 * first.size**2 / 2**32


def test_values_spread_evenly():
    bits = bits_of(jax.random.key(5)).reshape(-1)
    counts = np.bincount(bits >> 20, minlength=4096)
    chi_square = ((counts - bits.size / 4096) ** 2 / (bits.size / 4096)).sum()
    assert abs(chi_square - 4095) < 5 * (2 * 4095) ** 0.5


@pytest.mark.parametrize("rate", [0.0, 0.1, 0.5, 0.999])
def test_masks_keep_the_right_share_in_all_rows_and_columns(rate):
    mask = np.asarray(array_keep_mask(jax.random.key(3), (4, ROWS // 4, FEATURES), rate=rate)).reshape(ROWS, FEATURES)
    if rate == 0:
        assert mask.all()
        return
    assert deviations(mask.sum(), 1 - rate, mask.size) < 5
    if rate in (0.1, 0.5):
        assert deviations(mask.sum(0), 1 - rate, ROWS).max() < 6
        assert deviations(mask.sum(1), 1 - rate, FEATURES).max() < 6
    spectrum = np.abs(np.fft.fft2(mask - mask.mean()))  # periods would stand out
    assert spectrum.max() < 6 * np.sqrt((spectrum**2).mean())


def test_known_mask():
    """Nor may another version change which elements a key drops."""
    mask = np.asarray(array_keep_mask(jax.random.key(0), (2, 8), rate=0.5))
    assert mask.astype(int).tolist() == [[1, 0, 1, 1, 1, 0, 1, 0], [0, 0, 0, 1, 1, 0, 0, 0]]


@pytest.mark.drawn(1 / 3)
@pytest.mark.parametrize("rate", [0.5, 0.1, 0.01])
@pytest.mark.parametrize("features", [1024, 1023])  # odd rows: pairs lie across their ends
def test_elements_that_share_a_word_are_dropped_independently(rate, features):
    mask = np.asarray(array_keep_mask(jax.random.key(11), (4096, features), rate=rate)).reshape(-1)
    for first in (0, 1):  # the two of a word, and two of different words
        pairs = mask[first : first + (mask.size - 1) // 2 * 2].reshape(-1, 2).astype(int)
        counts = np.bincount(pairs[:, 0] * 2 + pairs[:, 1], minlength=4)
        shares = np.outer([rate, 1 - rate], [rate, 1 - rate]).reshape(-1)
        assert deviations(counts, shares, len(pairs)).max() < 5


def test_a_mask_compares_all_32_bits():
    """Rates that differ by 2**-32 differ in the one element whose bits are the threshold, at either half of a word."""
    words, row, column = mixed_words(key_words(jax.random.key(2))), jnp.uint32(0), jnp.arange(64, dtype=jnp.uint32)
    word = np.asarray(random_bits(words, row, column // 2, features=64)).astype(np.uint64)
    bits = np.where(column % 2 == 0, (word >> 16) | ((word & 0xFFFF) << 16), word)
    for place in (6, 7):
        below, above = (
            np.asarray(keep_mask(words, row, column, features=64, rate=float(bits[place] + step) / 2**32))
            for step in (0, 1)
        )
        np.testing.assert_array_equal(below, bits >= bits[place])
        assert np.flatnonzero(below != above).tolist() == [place]


def test_elements_a_whole_period_apart_differ():
    words, column = mixed_words(key_words(jax.random.key(0))), jnp.arange(4096)
    near, far = (np.asarray(random_bits(words, row, column, features=4096)) for row in (3, 3 + 2**20))
    assert (near == far).mean() < 0.01


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("features", [1024, 1152, 4097])
def test_kernels_make_the_same_mask(seed, features):
    segments = split_row(features, 4)

    def body(words_ref, mask_ref):
        row, words = lax.axis_index("row"), mixed_words(words_ref)
        masks = (
            keep_mask(words, row, segment.columns(jnp.uint32), features=features, rate=0.3) for segment in segments
        )
        store_row(mask_ref.at[row], tuple(jnp.where(m, jnp.float32(1), jnp.float32(0)) for m in masks), segments)

    key = jax.random.key(seed)
    params = plgpu.CompilerParams(unsafe_no_auto_barriers=True)
    out_type = jax.ShapeDtypeStruct((3, features), jnp.float32)
    got = plgpu.kernel(body, out_type=out_type, grid=(3,), grid_names=("row",), compiler_params=params)(key_words(key))
    np.testing.assert_array_equal(got, array_keep_mask(key, (3, features), rate=0.3), err_msg=f"seed={seed}")


def test_typed_and_raw_keys_are_the_same():
    np.testing.assert_array_equal(key_words(jax.random.key(9)), key_words(jax.random.PRNGKey(9)))
    assert key_words(jax.random.key(9, impl="rbg")).shape == (2,)


@pytest.mark.parametrize(
    ("key", "error", "message"),
    [
        (jnp.ones(2), TypeError, "float32"),
        (jax.ShapeDtypeStruct((1,), jnp.uint32), ValueError, r"shape \(1,\)"),
        (jax.ShapeDtypeStruct((3,), jax.random.key(0).dtype), ValueError, "one key"),
    ],
)
def test_what_is_no_key_is_refused(key, error, message):
    with pytest.raises(error, match=message):
        jax.eval_shape(key_words, key)


@pytest.mark.parametrize("rate", [-0.1, 1.0, float("nan")])
def test_what_is_no_rate_is_refused(rate):
    with pytest.raises(ValueError, match="0 <= rate < 1"):
        array_keep_mask(jax.random.key(0), (2, 2), rate=rate)
