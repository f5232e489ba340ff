"""Attention with masks, biases and dropout, each in the ways that libraries write them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn
from flax import nnx
from rewriting import normal

import xlafuse

BF16, F32 = jnp.bfloat16, jnp.float32
BATCH, LENGTH, HEADS, SIZE = 2, 16, 4, 32
Q, K, V = (normal((BATCH, LENGTH, HEADS, SIZE), seed=seed) for seed in (1, 2, 3))
BIAS = normal((1, HEADS, LENGTH, LENGTH), seed=4)
SCORES = (BATCH, HEADS, LENGTH, LENGTH)
KEEP = jax.random.bernoulli(jax.random.key(5), 0.9, SCORES)
PADDING = (normal((BATCH, 1, 1, LENGTH), seed=6) > 0).at[0].set(False)
"""A padding mask that hides every key of the first sequence."""

Step = Callable[[jax.Array], jax.Array]


def wide(x):
    return x.astype(jnp.promote_types(x.dtype, F32))


def attend(
    q, k, v, *, mask: Step = lambda scores: scores, drop: Step = lambda weights: weights, casts: str = "first"
) -> jax.Array:
    """casts: when weights are cast to 16 bits, "first" or "last"; "scores": those are in 16 bits, too."""
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k, preferred_element_type=None if casts == "scores" else wide(q).dtype)
    weights = jax.nn.softmax(mask(scores * SIZE**-0.5))
    weights = weights if casts == "last" else weights.astype(v.dtype)
    return jnp.einsum("bhqk,bkhd->bqhd", drop(weights).astype(v.dtype), v)


DROPOUTS: dict[str, tuple[Callable[..., Any], float]] = {
    "Flax": (lambda w, keep: w * (keep.astype(w.dtype) / jnp.asarray(0.9, w.dtype)), 0.1),
    "module": (lambda w, keep: jax.lax.select(jnp.broadcast_to(keep, w.shape), w / 0.9, jnp.zeros_like(w)), 0.1),
    "Haiku": (lambda w, keep: keep * w / 0.9, 0.1),
    "dropped first": (lambda w, keep: jnp.where(keep, w, 0) / 0.9, 0.1),
    "times the reciprocal": (lambda w, keep: jnp.where(keep, w * (1 / 0.9), 0), 0.1),
    "another number": (lambda w, keep: jnp.where(keep, w / 0.25, 0), 0.75),
    "inverted": (lambda w, drop: jnp.where(drop, 0, w / 0.9), 0.1),
    "negated": (lambda w, drop: jnp.where(~drop, w / 0.9, 0), 0.1),
    "one minus": (lambda w, drop: w * (1 - drop.astype(w.dtype)) / 0.9, 0.1),
    "other axes": (lambda w, keep: jnp.where(keep.swapaxes(-1, -2), w / 0.9, 0), 0.1),
}


@pytest.mark.drawn(1 / 4)
@pytest.mark.parametrize("casts", ["first", "last", "scores"])
@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("name", DROPOUTS)
def test_dropout(sites, name, dtype, casts):
    drop, rate = DROPOUTS[name]
    told = []

    def fn(q, k, v, keep):
        return attend(q, k, v, drop=lambda weights: drop(weights, keep), casts=casts)

    q, k, v = (each.astype(dtype) for each in (Q, K, V))
    assert sites(fn, q, k, v, KEEP, told=told.append) == ["attention"]
    assert told[0].taken[0].options["dropout_rate"] == rate


@pytest.mark.parametrize("rate", [0.1, 0.15, 0.25, 0.3, 0.5, 0.8, 0.95])
@pytest.mark.parametrize("dtype", [F32, BF16, jnp.float16])
def test_the_rate_is_found_as_it_is_written(sites, rate, dtype):
    """And not what 16 bits make of it: bfloat16 has 0.8984375 for 0.9."""
    told = []

    def fn(q, k, v, keep):
        return attend(q, k, v, drop=lambda w: w * (keep.astype(w.dtype) / jnp.asarray(1 - rate, w.dtype)))

    sites(fn, *(each.astype(dtype) for each in (Q, K, V)), KEEP, told=told.append)
    assert told[0].taken[0].options["dropout_rate"] == rate


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("library", [nn, nnx])
def test_dropout_of_flax_with_a_bias_and_a_mask(sites, library, shared):
    """The masks are drawn by any generator, outside attention; the results are those of one trace."""

    def fn(q, k, v, bias, mask, key):
        return library.dot_product_attention(
            q, k, v, bias=bias, mask=mask, dropout_rng=jax.random.wrap_key_data(key), dropout_rate=0.1,
            broadcast_dropout=shared, deterministic=False,
        )  # fmt: skip

    told = []
    arguments = Q, K, V, BIAS, PADDING, jax.random.key_data(jax.random.key(0))
    assert sites(fn, *arguments, checks=False, told=told.append) == ["attention"]
    (site,) = told[0].taken
    shape = (1, 1, LENGTH, LENGTH) if shared else SCORES
    assert site.arrays["dropout_mask"] == f"bool[{','.join(map(str, shape))}]"
    assert site.arrays["mask"] == f"bool[{BATCH},1,1,{LENGTH}]"
    assert jnp.allclose(xlafuse.fuse(fn)(*arguments), fn(*arguments), rtol=1e-5, atol=1e-6)
    ours, plain = (
        jax.grad(lambda q, k, v, b, fn=fn: jnp.sum(fn(q, k, v, b, *arguments[4:]) ** 2), (0, 1, 2, 3))(*arguments[:4])
        for fn in (xlafuse.fuse(fn), fn)
    )
    assert all(jnp.allclose(one, other, rtol=1e-4, atol=1e-5) for one, other in zip(ours, plain, strict=True))


def test_dropped_values_are_no_dropped_weights(sites):
    told = []

    def fn(q, k, v, keep):
        return attend(q, k, jnp.where(keep[:, 0, :, :1, None], v / 0.9, 0))

    assert sites(fn, Q, K, V, KEEP, told=told.append) == ["attention"]
    assert "dropout_rate" not in told[0].taken[0].options


@pytest.mark.parametrize("hidden", [-1e9, -1e4, -5.0, float(jnp.finfo(F32).min)])
@pytest.mark.parametrize("form", ["seen", "padding", "negated", "lengths"])
def test_a_mask_hides_scores_by_a_number(sites, form, hidden):
    """Queries that see nothing have the mean of all values."""

    def fn(q, k, v, mask):
        seen = jnp.arange(LENGTH) < mask if form == "lengths" else mask
        hides = {
            "seen": lambda scores: jnp.where(seen, scores, hidden),
            "lengths": lambda scores: jnp.where(seen, scores, hidden),
            "padding": lambda scores: jnp.where(seen, hidden, scores),
            "negated": lambda scores: jnp.where(~seen, hidden, scores),
        }[form]
        return attend(q, k, v, mask=hides)

    told = []
    mask = jnp.asarray([0, 9]).reshape(2, 1, 1, 1) if form == "lengths" else ~PADDING if form == "padding" else PADDING
    assert sites(fn, Q, K, V, mask, told=told.append) == ["attention"]
    assert told[0].taken[0].options["mask_value"] == pytest.approx(hidden)
    assert f"bool[{BATCH},1,1,{LENGTH}]" in told[0].taken[0].arrays.values()


def test_no_mask_is_written_out_to_the_scores():
    def fn(q, k, v, bias, mask, padding):
        return jax.nn.dot_product_attention(q, k, v, bias=bias + jnp.where(padding, 0, -1e9), mask=mask)

    padding = jnp.ones((1, 1, 1, LENGTH), bool)
    fused = jax.make_jaxpr(xlafuse.fuse(fn))(Q, K, V, BIAS[:, :, :1], PADDING, padding)
    sizes = [each.aval for equation in fused.jaxpr.eqns for each in equation.outvars if each.aval.dtype == jnp.bool_]
    assert max((each.size for each in sizes), default=0) <= BATCH * LENGTH


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("form", ["added", "added opposite", "added in 16 bits"])
def test_an_added_lowest_number_is_a_mask(sites, form, dtype):
    """So that it needs no gradient, as a bias would."""
    lowest = float(jnp.finfo(BF16).min)

    def fn(q, k, v, seen):
        number = jnp.asarray(lowest, BF16 if form == "added in 16 bits" else F32)
        bias = jnp.where(~seen, number, 0) if form == "added opposite" else jnp.where(seen, 0, number)
        return attend(q, k, v, mask=lambda scores: scores + bias.astype(scores.dtype))

    told = []
    arguments = [each.astype(dtype) for each in (Q, K, V)]
    sites(fn, *arguments, PADDING, told=told.append)
    (site,) = told[0].taken
    expected = {"mask"} if form != "added in 16 bits" or dtype == BF16 else {"bias"}
    assert site.arrays.keys() - {"query", "key", "value"} in (expected, {"hiding"})


@pytest.mark.parametrize("added", [-1e9, -1e4])
def test_an_added_number_that_scores_may_show_through_is_a_bias(sites, added):
    told = []
    sites(lambda q, k, v, m: attend(q, k, v, mask=lambda s: s + jnp.where(m, 0, added)), Q, K, V, PADDING,
          told=told.append)  # fmt: skip
    assert told[0].taken[0].arrays["bias"] == f"float32[{BATCH},1,1,{LENGTH}]"


@pytest.mark.parametrize("hidden", [-jnp.inf, -1e9, -1e4, -5.0])
@pytest.mark.parametrize("added", [True, False])
def test_causal_masks(sites, hidden, added):
    """A query sees itself: a number low enough needs no mask_value, and kernels skip what it hides."""
    told = []

    def fn(q, k, v):
        seen = jnp.tril(jnp.ones((LENGTH, LENGTH), bool))
        return attend(q, k, v, mask=lambda s: s + jnp.where(seen, 0, hidden) if added else jnp.where(seen, s, hidden))

    assert sites(fn, Q, K, V, told=told.append) == ["attention"]
    (site,) = told[0].taken
    assert site.options.get("mask_value") == (None if hidden < -1e5 or added else pytest.approx(hidden))


BIASES = {
    "two": lambda s, a, mask: s + a + jnp.where(mask, 0, -1e9),
    "one sum": lambda s, a, mask: s + (a + jnp.where(mask, 0, -1e9)),
    "AlphaFold": lambda s, a, mask: s + 1e9 * (mask.astype(s.dtype) - 1) + a,
    "subtracted": lambda s, a, mask: s - 1e9 * (1 - mask.astype(s.dtype)) + a,
    "and a mask": lambda s, a, mask: jnp.where(mask, s + a, -1e9),
    "and an added mask": lambda s, a, mask: s + jnp.where(mask, 0, -1e38) + a,
}


@pytest.mark.drawn(1 / 3)
@pytest.mark.parametrize("casts", ["first", "scores"])
@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("name", BIASES)
def test_biases_and_masks(sites, name, dtype, casts):
    mask = PADDING.at[0].set(True)  # of a row that sees nothing, sums of numbers of 1e9 keep no digits
    bias = BIAS.astype(dtype if casts == "scores" else F32)

    def fn(q, k, v, bias, mask):
        return attend(q, k, v, mask=lambda s: BIASES[name](s, bias, mask).astype(s.dtype), casts=casts)

    q, k, v = (each.astype(dtype) for each in (Q, K, V))
    assert sites(fn, q, k, v, bias, mask) == ["attention"]


@pytest.mark.parametrize("is_causal", [True, False])
def test_the_attention_of_jax_with_a_bias_and_a_mask(sites, is_causal):
    def fn(q, k, v, bias, mask):
        return jax.nn.dot_product_attention(q, k, v, bias=bias, mask=mask, is_causal=is_causal, implementation="xla")

    told = []
    assert sites(fn, Q, K, V, BIAS, PADDING, told=told.append) == ["attention"]
    assert {"bias", "mask"} < told[0].taken[0].arrays.keys()


def lower(length: int = LENGTH) -> jax.Array:
    return jnp.tril(jnp.ones((length, length)))


CAUSAL = {
    "numbers, as in minGPT": lambda s: jnp.where(lower() == 0, -jnp.inf, s),
    "numbers above 0": lambda s: jnp.where(lower() > 0, s, -1e9),
    "made to numbers twice": lambda s: jnp.where(nn.combine_masks(lower(), dtype=BF16), s, -1e30),
    "of the whole scores": lambda s: jnp.where(jnp.broadcast_to(lower(), s.shape) != 0, s, -1e30),
    "of Flax": lambda s: jnp.where(nnx.make_causal_mask(jnp.ones((BATCH, LENGTH))), s, -1e30),
    "upper, added": lambda s: s + jnp.triu(jnp.full((LENGTH, LENGTH), -1e9), 1),
}


@pytest.mark.parametrize("name", CAUSAL)
def test_causal_masks_of_numbers(sites, name):
    told = []
    assert sites(lambda q, k, v: attend(q, k, v, mask=CAUSAL[name]), Q, K, V, told=told.append) == ["attention"]
    assert told[0].taken[0].options.keys() == {"scale", "is_causal"}


@pytest.mark.parametrize("number", [-1.0, 2.0])
def test_numbers_that_are_no_truth(sites, number):
    """`where(mask, number, 0)` is above 0 where the mask is True only if the number is."""

    def fn(q, k, v, mask):
        return attend(q, k, v, mask=lambda s: jnp.where(jnp.where(mask, number, 0) > 0, s, -1e9))

    assert sites(fn, Q, K, V, PADDING) == ["attention"]


@pytest.mark.parametrize("number", [-1e9, float(jnp.finfo(BF16).min)])
def test_layers_share_an_added_mask(sites, number):
    def fn(q, k, v, seen):
        added = jnp.where(seen, 0, jnp.asarray(number, F32))
        for _ in range(2):
            q = attend(q, k, v, mask=lambda scores: scores + added)
        return q

    assert sites(fn, Q, K, V, PADDING) == ["attention", "attention"]
