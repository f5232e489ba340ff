"""Attention's dropout mask: the same in kernels of every shape and in the reference, and random by the usual counts."""

from __future__ import annotations

import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from draws import normal

from pallas_kernels.ops.attention.dropout import keep_bits, keep_mask
from pallas_kernels.ops.attention.forward.config import ForwardConfig
from pallas_kernels.ops.attention.forward.kernel import attention_forward
from pallas_kernels.ops.attention.problem import problem_of
from pallas_kernels.ops.attention.reference import attention_reference
from pallas_kernels.specs import seeds_of

BATCH, HEADS, LENGTH = 2, 3, 512


def masks_of(seed, rate, length=LENGTH):
    return np.asarray(keep_mask(jax.random.key(seed), BATCH, HEADS, length, length, rate=rate))


def deviations(counts, expected_share, trials):
    """How many standard deviations binomial counts are off."""
    deviation = (trials * expected_share * (1 - expected_share)) ** 0.5
    return np.abs(np.asarray(counts, np.float64) - trials * expected_share) / deviation


def test_known_mask():
    """Another version must not change which weights a key drops."""
    mask = np.asarray(keep_mask(jax.random.key(0), 1, 2, 2, 10, rate=0.5)).astype(int)
    rows = ["".join(map(str, row)) for row in mask.reshape(4, 10)]
    assert rows == ["1101110101", "0001010111", "1010111001", "0110101011"]


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.002, 0.97])
def test_masks_keep_the_right_share_in_all_rows_and_columns(rate):
    mask = masks_of(3, rate)
    assert deviations(mask.sum(), 1 - rate, mask.size) < 5
    assert deviations(mask.sum((2, 3)), 1 - rate, LENGTH**2).max() < 5
    if rate in (0.1, 0.5):
        assert deviations(mask.sum((0, 1, 2)), 1 - rate, BATCH * HEADS * LENGTH).max() < 5
        assert deviations(mask.sum(3), 1 - rate, LENGTH).max() < 6
        spectrum = np.abs(np.fft.fft2(mask - mask.mean()))  # periods would stand out
        assert spectrum.max() < 6 * np.sqrt((spectrum**2).mean())


@pytest.mark.parametrize("rate", [0.5, 0.1])
def test_those_that_share_a_word_are_dropped_independently(rate):
    """Queries alike but for bit 3, keys but for bits 0, 3 and 4."""
    mask = masks_of(5, rate).reshape(BATCH * HEADS, LENGTH // 16, 2, 8, LENGTH // 32, 2, 2, 4, 2)
    sharing = mask.transpose(0, 1, 3, 4, 7, 2, 5, 6, 8).reshape(-1, 16)
    noise = (sharing - (1 - rate)) / (rate * (1 - rate)) ** 0.5
    correlations = noise.T @ noise / len(noise)
    assert np.abs(correlations - np.diag(np.diag(correlations))).max() < 5 / len(noise) ** 0.5
    counts = np.bincount(sharing.sum(1), minlength=17)
    for kept, count in enumerate(counts):
        share = math.comb(16, kept) * (1 - rate) ** kept * rate ** (16 - kept)
        assert deviations(count, share, len(sharing)) < 5 or count < 5, kept


@pytest.mark.parametrize("rate", [0.5, 0.1])
def test_neighbours_are_dropped_independently(rate):
    """Of batches, heads, queries and keys; those of a word, 8 and 16 apart; and beyond."""
    drop = ~masks_of(7, rate)
    noise = drop - np.float64(rate)
    steps = [(1, 0, 0, 0), (0, 1, 0, 0), (1, 1, 0, 0), (0, 1, 1, 1)]
    steps += [(0, 0, i, j) for i, j in itertools.product((0, 1, 2, 8, 16, 64), repeat=2) if i or j]
    for step in steps:
        here, there = tuple(slice(-s or None) for s in step), tuple(slice(s, None) for s in step)
        product = noise[here] * noise[there]
        assert abs(product.mean()) / (rate * (1 - rate)) < 5 / product.size**0.5, step


@pytest.mark.parametrize("pair", [(0, 1), (0, 2**31)])
def test_keys_have_nothing_in_common(pair):
    first, second = (masks_of(seed, 0.5) for seed in pair)
    assert deviations((first == second).sum(), 0.5, first.size) < 5


@pytest.mark.parametrize("length", [64, 4097])
def test_masks_of_other_lengths_are_as_random(length):
    mask = np.asarray(keep_mask(jax.random.key(1), 1, 1, 300, length, rate=0.1))
    assert deviations(mask.sum(), 0.9, mask.size) < 5


@pytest.mark.parametrize(("rate", "dtype"), [(0.1, jnp.bfloat16), (0.5, jnp.float16)])
def test_the_forward_kernel_drops_by_the_same_mask(interpreter, rate, dtype, seed):
    query, key, value = (normal(own, (1, 136, 1, 64), dtype) for own in seeds_of(seed, 3))
    nothing: dict[str, Any] = dict.fromkeys(("bias", "mask", "scale", "window", "segment_ids", "softcap"))
    dropout = {"dropout_rate": rate, "dropout_key": jax.random.key(seed + 1)}
    problem, extras = problem_of(query, key, **nothing, is_causal=True, **dropout)
    config = ForwardConfig(own_output=True, queries_in_registers=True)
    out, _ = attention_forward(query, key, value, extras, problem=problem, config=config)
    want = attention_reference(query, key, value, is_causal=True, **dropout)
    np.testing.assert_allclose(np.float32(out), np.asarray(want, np.float32), atol=0.04, err_msg=f"seed={seed}")


def test_queries_a_period_apart_have_key_words_of_their_own(seed):
    """Whole groups of 128 queries have one word, and each word serves at most a period."""
    whole, cut = (
        np.asarray(keep_bits(jax.random.key(seed), 1, 1, 512, 64, rate=0.5, period=period))[0, 0, :, :2]
        for period in (2**32, 2**14)
    )
    np.testing.assert_array_equal(cut[:256], whole[:256])
    assert (cut[256:] != whole[256:]).mean() > 0.9
