"""Attention of one token over a cache."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from rewriting import normal

from xlafuse.fusion import fuse

BATCH, LENGTH, HEADS, KEY_HEADS, SIZE = 2, 16, 4, 2, 32
QUERY = normal((BATCH, 1, HEADS, SIZE))
KEY, VALUE = (normal((BATCH, LENGTH, KEY_HEADS, SIZE), seed=seed) for seed in (1, 2))
LENGTHS = jnp.asarray([5, 16], jnp.int32)
LOWEST = float(jnp.finfo(jnp.float32).min)


def places(length=LENGTH):
    return jnp.arange(length, dtype=jnp.int32)


def attend(query, key, value, seen, *, hidden=LOWEST, added=False):
    """seen: broadcastable to (batch, 1, 1, keys)."""
    key, value = (jnp.repeat(each, query.shape[2] // each.shape[2], axis=2) for each in (key, value))
    scores = jnp.einsum("bqhd,bkhd->bhqk", query, key) * SIZE**-0.5
    scores = scores + jnp.where(seen, 0, hidden) if added else jnp.where(seen, scores, hidden)
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), value)


def of_sequences(condition):
    return condition[:, None, None, :]


def cut(condition, row, column=0, dtype=jnp.int32):
    """A row of a mask by the places of queries and keys."""
    start = tuple(map(dtype, (0, 0, row, column)))
    return jax.lax.dynamic_slice(condition[None, None], start, (1, 1, 1, LENGTH))


def row(start, rows=LENGTH):
    return cut(places(rows)[:, None] >= places(), start)


ENDS = {
    "lengths": (lambda n: of_sequences(places() < n[:, None]), {"end"}),
    "last places": (lambda n: of_sequences(places() <= n[:, None]), {"last"}),
    "the other way": (lambda n: of_sequences(n[:, None] > places()), {"end"}),
    "hidden": (lambda n: ~of_sequences(places() >= n[:, None]), {"end"}),
    "one for all": (lambda n: (places() < n[0])[None, None, None], {"end"}),
    "a row of a causal mask": (lambda n: row(n[0]), {"row"}),
    "a row of bytes": (lambda n: cut(places()[:, None] >= places(), n[0].astype(jnp.int8), dtype=jnp.int8), {"row"}),
    "a row and an end": (lambda n: row(n[0]) & of_sequences(places() < n[:, None]), {"row", "end"}),
    "first keys": (lambda n: of_sequences((places() <= n[:, None]) & (places() < 12)), {"last", "end"}),
    "a window in front": (
        lambda n: of_sequences((places() < n[:, None]) & jnp.tril(jnp.ones((1, LENGTH), bool), 9)),
        {"end", "last"},
    ),
    "all keys and an end": (
        lambda n: of_sequences((jnp.ones((BATCH, LENGTH), jnp.int32) != 0) & (places() < n[:, None])),
        {"end"},
    ),
}
OTHERS = {
    "all keys": lambda n: of_sequences(places() >= 0 * n[:, None]),
    "all keys by a number": lambda n: of_sequences(places()[None] >= 0),
    "a window behind": lambda n: of_sequences((places() < n[:, None]) & (places() >= n[:, None] - 4)),
    "first keys hidden": lambda n: of_sequences((places() < n[:, None]) & (places() > 0)),
    "given": lambda n: of_sequences((n[:, None] * places()) % 3 > 0),
    "either": lambda n: of_sequences((places() < n[:, None]) | (places() == 15)),
    "later keys": lambda n: of_sequences(places() > n[:, None]),
    "the next place": lambda n: of_sequences((places() < n[:, None]) & (places() < places() + 1)),
    "a number of each key": lambda n: of_sequences(places() < n[:, None] + places()[::-1]),
    "every other place": lambda n: of_sequences(2 * places() < n[:, None]),
    "of bytes": lambda n: of_sequences(places().astype(jnp.int8) < n[:, None].astype(jnp.int8)),
    "a row of a short mask": lambda n: row(n[0], rows=LENGTH - 4),
    "a row of a mask before": lambda n: cut(places()[:, None] > places(), n[0]),
    "columns of a causal mask": lambda n: cut(places()[:, None] >= places(2 * LENGTH), 3, n[0]),
}


@pytest.mark.drawn(1 / 4)
@pytest.mark.parametrize("added", [False, True])
@pytest.mark.parametrize("name", ENDS)
def test_ends(sites, name, added):
    mask, names = ENDS[name]
    told = []

    def fn(query, key, value, lengths):
        return attend(query, key, value, mask(lengths), added=added)

    assert sites(fn, QUERY, KEY, VALUE, LENGTHS, told=told.append) == ["decode_attention"]
    (site,) = told[0].taken
    assert set(site.arrays) == {"query", "key", "value"} | names
    assert set(site.options) == {"scale"}


@pytest.mark.drawn(1 / 4)
@pytest.mark.parametrize("lengths", [[0, 3], [-2, 1], [40, 17], [2**31 - 1, -(2**31)]])
@pytest.mark.parametrize("name", ENDS)
def test_a_token_without_keys_averages_values_and_others_stop_at_the_cache(sites, name, lengths):
    mask, _ = ENDS[name]

    def fn(query, key, value, lengths):
        return attend(query, key, value, mask(lengths))

    assert sites(fn, QUERY, KEY, VALUE, jnp.asarray(lengths, jnp.int32)) == ["decode_attention"]


@pytest.mark.parametrize("name", OTHERS)
def test_other_masks(sites, name):
    def fn(query, key, value, lengths):
        return attend(query, key, value, OTHERS[name](lengths))

    assert "decode_attention" not in sites(fn, QUERY, KEY, VALUE, LENGTHS)


@pytest.mark.parametrize(("heads", "key_heads", "batch"), [(4, 4, 2), (4, 1, 2), (1, 1, 2), (4, 2, 1), (4, 1, 1)])
def test_heads(sites, heads, key_heads, batch):
    query = normal((batch, 1, heads, SIZE))
    key, value = (normal((batch, LENGTH, key_heads, SIZE), seed=seed) for seed in (1, 2))

    def fn(query, key, value, lengths):
        return attend(query, key, value, of_sequences(places() < lengths[:, None]))

    assert sites(fn, query, key, value, LENGTHS[:batch]) == ["decode_attention"]


def test_groups_of_heads_without_repeats_and_a_cap(sites):
    def fn(query, key, value, lengths):
        grouped = query.reshape(BATCH, 1, KEY_HEADS, HEADS // KEY_HEADS, SIZE)
        scores = 5 * jnp.tanh(jnp.einsum("btkgh,bskh->btkgs", grouped, key) / 5)
        scores = jnp.where((places() < lengths[:, None])[:, None, None, None], scores, LOWEST)
        return jnp.einsum("btkgs,bskh->btkgh", jax.nn.softmax(scores), value).reshape(query.shape)

    told = []
    assert sites(fn, QUERY, KEY, VALUE, LENGTHS, told=told.append) == ["decode_attention"]
    assert told[0].taken[0].options == {"scale": 1.0, "softcap": 5.0}


def test_what_hides_little_is_attention(sites):
    def fn(query, key, value, lengths):
        return attend(query, key, value, of_sequences(places() < lengths[:, None]), hidden=-100.0)

    assert sites(fn, QUERY, KEY, VALUE, LENGTHS) == ["attention"]


def test_one_query_that_sees_all_keys_is_left(sites):
    assert sites(lambda *arrays: attend(*arrays, jnp.asarray(True)), QUERY, KEY, VALUE) == ["softmax"]


def test_several_queries_are_attention(sites):
    query = normal((BATCH, 3, HEADS, SIZE))

    def fn(query, key, value, lengths):
        return attend(query, key, value, of_sequences(places() < lengths[:, None]))

    assert sites(fn, query, KEY, VALUE, LENGTHS) == ["attention"]


def test_the_cache_is_updated_in_place_before(sites):
    new = normal((BATCH, 1, KEY_HEADS, SIZE), seed=3)

    def fn(query, key, value, new, place):
        key, value = (
            jax.lax.dynamic_update_slice(each, new, tuple(map(jnp.int32, (0, place, 0, 0)))) for each in (key, value)
        )
        return attend(query, key, value, (places() < place + 1)[None, None, None]), key, value

    assert sites(fn, QUERY, KEY, VALUE, new, jnp.int32(7)) == ["decode_attention"]


def test_a_gradient(sites):
    def loss(query, key, value, lengths):
        return jnp.sum(attend(query, key, value, of_sequences(places() < lengths[:, None])) ** 2)

    expected = jax.grad(loss, (0, 1, 2))(QUERY, KEY, VALUE, LENGTHS)
    found = jax.grad(fuse(loss), (0, 1, 2))(QUERY, KEY, VALUE, LENGTHS)
    for own, other in zip(found, expected, strict=True):
        assert jnp.allclose(own, other, rtol=1e-5, atol=1e-5)


def test_rounding_that_is_allowed(sites):
    query, key, value = (each.astype(jnp.bfloat16) for each in (QUERY, KEY, VALUE))

    def fn(query, key, value, lengths):
        key, value = (jnp.repeat(each, HEADS // KEY_HEADS, axis=2) for each in (key, value))
        scores = jnp.einsum("bqhd,bkhd->bhqk", query, key) * SIZE**-0.5
        scores = jnp.where(of_sequences(places() < lengths[:, None]), scores.astype(jnp.float32), LOWEST)
        weights = jax.nn.softmax(scores).astype(query.dtype)
        return jnp.einsum("bhqk,bkhd->bqhd", weights, value)

    told = []
    assert "decode_attention" not in sites(fn, query, key, value, LENGTHS, told=told.append)
    assert "decode_attention in float32; allow={'rounding'} takes it" in str(told[0])
    assert sites(fn, query, key, value, LENGTHS, allow={"rounding"}) == ["decode_attention"]
