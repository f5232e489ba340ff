"""Attention with sinks, and with values of another head size than keys, each as models write them."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from rewriting import normal

import xlafuse

BF16, F32 = jnp.bfloat16, jnp.float32
BATCH, LENGTH, HEADS, KEY_HEADS, SIZE = 2, 16, 4, 2, 32
GROUP = HEADS // KEY_HEADS
Q = normal((BATCH, LENGTH, HEADS, SIZE), seed=1)
K, V = (normal((BATCH, LENGTH, KEY_HEADS, SIZE), seed=seed) for seed in (2, 3))
SINKS = 2 * normal((HEADS,), seed=4)
CAUSAL = jnp.tril(jnp.ones((LENGTH, LENGTH), bool))

Attention = Callable[..., jax.Array]


def repeated(array):
    return jnp.repeat(array, GROUP, axis=2)


def scores_of(q, k, dtype=None):
    """(batch, heads, queries, keys), causal."""
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, repeated(k), preferred_element_type=dtype) * SIZE**-0.5
    return jnp.where(CAUSAL, scores, -1e30)


def column_of(sinks):
    return jnp.broadcast_to(sinks[None, :, None, None], (BATCH, HEADS, LENGTH, 1))


def mixed(weights, v):
    return jnp.einsum("bhqk,bkhd->bqhd", weights.astype(v.dtype), repeated(v))


def transformers(q, k, v, sinks):
    """The maximum is subtracted before the softmax subtracts it again."""
    q, k, v = (each.swapaxes(1, 2) for each in (q, repeated(k), repeated(v)))
    scores = q @ k.swapaxes(2, 3) * SIZE**-0.5 + jnp.where(CAUSAL, 0, jnp.finfo(q.dtype).min).astype(q.dtype)
    joined = jnp.concatenate([scores, jnp.broadcast_to(sinks.reshape(1, -1, 1, 1), (BATCH, HEADS, LENGTH, 1))], -1)
    joined = joined - joined.max(-1, keepdims=True)
    return (jax.nn.softmax(joined, -1)[..., :-1] @ v).swapaxes(1, 2)


def without_a_batch(q, k, v, sinks):
    """The axes of a head are its key head and its place in the group."""
    q = q[0].reshape(LENGTH, KEY_HEADS, GROUP, SIZE)
    k, v = (jnp.broadcast_to(each[0, :, :, None], q.shape) for each in (k, v))
    columns = jnp.broadcast_to(sinks.reshape(KEY_HEADS, GROUP, 1, 1), (KEY_HEADS, GROUP, LENGTH, 1))
    scores = jnp.einsum("qhmd,khmd->hmqk", q, k) * 0.125
    scores = scores + jnp.triu(jnp.full((LENGTH, LENGTH), -jnp.inf, scores.dtype), 1)
    weights = jax.nn.softmax(jnp.concatenate([scores, columns], -1), -1)[..., :-1]
    return jnp.einsum("hmqk,khmd->qhmd", weights, v).reshape(LENGTH, -1)


def sinks_first(q, k, v, sinks):
    joined = jnp.concatenate([column_of(sinks), scores_of(q, k)], -1)
    return mixed(jax.nn.softmax(joined)[..., 1:], v)


def in_float32(q, k, v, sinks):
    joined = jnp.concatenate([scores_of(q, k, F32), column_of(sinks).astype(F32)], -1)
    return mixed(jax.nn.softmax(joined)[..., :-1], v)


def cast_to_float32(q, k, v, sinks):
    joined = jnp.concatenate([scores_of(q, k), column_of(sinks)], -1).astype(F32)
    return mixed(jax.nn.softmax(joined)[..., :-1].astype(q.dtype), v)


def in_the_denominator(q, k, v, sinks, *, both=True, stops=True):
    scores = scores_of(q, k, F32).reshape(BATCH, KEY_HEADS, GROUP, LENGTH, LENGTH)
    sinks = sinks.astype(F32).reshape(1, KEY_HEADS, GROUP, 1, 1)
    highest = scores.max(-1, keepdims=True)
    highest = jnp.maximum(highest, sinks) if both else highest
    highest = lax.stop_gradient(highest) if stops else highest
    weights = jnp.exp(scores - highest)
    weights = weights / (jnp.exp(sinks - highest) + weights.sum(-1, keepdims=True))
    return mixed(weights.reshape(BATCH, HEADS, LENGTH, LENGTH), v)


FORMS: dict[str, Attention] = {
    "transformers": transformers,
    "without a batch": without_a_batch,
    "sinks first": sinks_first,
    "in float32": in_float32,
    "cast to float32": cast_to_float32,
    "in the denominator": in_the_denominator,
    "in the denominator, not stopped": lambda *own: in_the_denominator(*own, stops=False),
    "in the denominator, maximum of scores": lambda *own: in_the_denominator(*own, both=False),
}


@pytest.mark.drawn(1 / 4)
@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("name", FORMS)
def test_sinks(sites, name, dtype):
    told = []
    arguments = (each.astype(dtype) for each in (Q, K, V, SINKS))
    assert sites(FORMS[name], *arguments, told=told.append) == ["attention"]
    (site,) = told[0].taken
    assert site.arrays["sinks"] == f"{jnp.dtype(dtype).name}[{HEADS}]"


@pytest.mark.parametrize("name", ["transformers", "in the denominator"])
def test_gradients_of_sinks(name):
    def slopes(function):
        return jax.grad(lambda *own: jnp.sum(jnp.sin(function(*own))), range(4))(Q, K, V, SINKS)

    for ours, plain in zip(slopes(xlafuse.fuse(FORMS[name])), slopes(FORMS[name]), strict=True):
        assert jnp.allclose(ours, plain, rtol=1e-4, atol=1e-5)


def test_one_sink_for_all_heads(sites):
    def fn(q, k, v, sink):
        joined = jnp.concatenate([scores_of(q, k), jnp.broadcast_to(sink, (BATCH, HEADS, LENGTH, 1))], -1)
        return mixed(jax.nn.softmax(joined)[..., :-1], v)

    assert sites(fn, Q, K, V, SINKS[:1]) == ["attention"]


def test_sinks_with_a_bias_a_mask_and_dropout(sites):
    def fn(q, k, v, sinks, bias, mask, keep):
        scores = jnp.where(mask, jnp.einsum("bqhd,bkhd->bhqk", q, repeated(k)) * 0.2 + bias, -1e9)
        weights = jax.nn.softmax(jnp.concatenate([scores, column_of(sinks)], -1))[..., :-1]
        return mixed(jnp.where(keep, weights / 0.9, 0), v)

    bias, mask = normal((1, HEADS, LENGTH, LENGTH), seed=5), normal((BATCH, 1, 1, LENGTH), seed=6) > 0
    keep = jax.random.bernoulli(jax.random.key(7), 0.9, (BATCH, HEADS, LENGTH, LENGTH))
    assert sites(fn, Q, K, V, SINKS, bias, mask, keep) == ["attention"]


def unlike(q, k, v, sinks, *, column=None, cut=slice(None, -1), value=None):
    columns = column_of(sinks) if column is None else jnp.broadcast_to(column(sinks), (BATCH, HEADS, LENGTH, 1))
    weights = jax.nn.softmax(jnp.concatenate([scores_of(q, k), columns], -1))[..., cut]
    return mixed(weights, v if value is None else jnp.concatenate([v, value(v)], 1))


OTHERS: dict[str, Attention] = {
    "a sink a query": lambda *own: unlike(*own, column=lambda s: jnp.tile(s, LENGTH // HEADS)[:, None]),
    "a sink a sequence": lambda *own: unlike(*own, column=lambda s: s[:BATCH, None, None, None]),
    "the column is kept, and has a value": lambda *own: unlike(
        *own, cut=slice(None), value=lambda v: jnp.ones_like(v[:, :1])
    ),
    "another column is dropped": lambda *own: unlike(*own, cut=slice(1, None)),
    "two columns": lambda q, k, v, s: mixed(
        jax.nn.softmax(jnp.concatenate([scores_of(q, k), column_of(s), column_of(2 * s)], -1))[..., :-2], v
    ),
    "the sink is not shifted": lambda q, k, v, s: _not_shifted(q, k, v, s),
}


def _not_shifted(q, k, v, sinks):
    scores = scores_of(q, k)
    weights = jnp.exp(scores - scores.max(-1, keepdims=True))
    return mixed(weights / (jnp.exp(column_of(sinks)) + weights.sum(-1, keepdims=True)), v)


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_no_sink(sites, name):
    assert "attention" not in sites(OTHERS[name], Q, K, V, SINKS)


VALUE = 24


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("form", ["einsum", "products", "grouped"])
def test_values_of_another_size(sites, form, dtype):
    def fn(q, k, v):
        if form == "einsum":
            return mixed(jax.nn.softmax(scores_of(q, k, F32)), v)
        if form == "grouped":
            q = q.reshape(BATCH, LENGTH, KEY_HEADS, GROUP, SIZE)
            scores = jnp.einsum("btkgd,bskd->bkgts", q, k, preferred_element_type=F32)
            return jnp.einsum("bkgts,bskd->btkgd", jax.nn.softmax(scores).astype(v.dtype), v).reshape(
                BATCH, LENGTH, HEADS, VALUE
            )
        q, k, v = (each.swapaxes(1, 2) for each in (q, repeated(k), repeated(v)))
        return jax.nn.softmax(q @ k.swapaxes(2, 3)) @ v

    told = []
    values = normal((BATCH, LENGTH, KEY_HEADS, VALUE), seed=8)
    assert sites(fn, *(each.astype(dtype) for each in (Q, K, values)), told=told.append) == ["attention"]
    assert told[0].taken[0].arrays["value"].endswith(f"[{BATCH},{LENGTH},{KEY_HEADS},{VALUE}]")


def test_latent_attention(sites):
    """Keys have a part that all heads share, and values come from one projection with the rest: DeepSeek's."""
    own, shared = 24, 8

    def fn(q, compressed, positions, up):
        both = (compressed @ up).reshape(BATCH, LENGTH, HEADS, own + VALUE)
        rest = jnp.broadcast_to(jnp.sin(positions)[:, :, None], (BATCH, LENGTH, HEADS, shared))
        keys = jnp.concatenate([both[..., :own], rest], -1)
        scores = jnp.where(CAUSAL, jnp.einsum("bqhd,bkhd->bhqk", q, keys) * 0.2, -1e30)
        return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), both[..., own:])

    compressed, positions = normal((BATCH, LENGTH, 40), seed=9), normal((BATCH, LENGTH, shared), seed=10)
    assert sites(fn, Q, compressed, positions, normal((40, HEADS * (own + VALUE)), seed=11)) == ["attention"]
