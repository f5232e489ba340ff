"""Causal parts, windows and segments that masks of attention are defined by."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn
from flax import nnx
from rewriting import normal

BATCH, LENGTH, HEADS, SIZE = 2, 16, 4, 32
Q, K, V = (normal((BATCH, LENGTH, HEADS, SIZE), seed=seed) for seed in (1, 2, 3))
PADDING = jnp.arange(LENGTH) < jnp.asarray([[16], [9]])
SEGMENTS = (jnp.arange(LENGTH) + jnp.asarray([[0], [3]])) // 6
LOWEST = float(jnp.finfo(jnp.float32).min)
ROWS, COLUMNS = f"bool[{BATCH},1,{LENGTH},1]", f"bool[{BATCH},1,1,{LENGTH}]"
NUMBERS = f"int32[{BATCH},{LENGTH}]"

Mask = Callable[[jax.Array, jax.Array], Any]


def places():
    """Of queries, and of keys."""
    return jnp.arange(LENGTH)[:, None], jnp.arange(LENGTH)[None]


def by_places(condition):
    return condition(*places())


def lower(k: int = 0, dtype: Any = bool):
    return jnp.tril(jnp.ones((LENGTH, LENGTH), dtype), k)


def of_keys(padding):
    return padding[:, None, None]


def same(segments):
    return (segments[:, :, None] == segments[:, None])[:, None]


def attend(q, k, v, mask, *, value=LOWEST, added=False):
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * SIZE**-0.5
    scores = scores + jnp.where(mask, 0, value) if added else jnp.where(mask, scores, value)
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v)


CAUSAL, WINDOW, PADDED = {"is_causal": True}, {"is_causal": True, "window": (4, 0)}, {"mask": COLUMNS}
MASKS: dict[str, tuple[Mask, dict[str, Any]]] = {
    "causal and padding": (lambda p, s: lower() & of_keys(p), CAUSAL | PADDED),
    "padding and causal": (lambda p, s: of_keys(p) & by_places(lambda i, j: i >= j), CAUSAL | PADDED),
    "hidden by either": (lambda p, s: ~(jnp.triu(jnp.ones((LENGTH, LENGTH), bool), 1) | ~of_keys(p)), CAUSAL | PADDED),
    "numbers times padding": (lambda p, s: jnp.logical_and(lower(0, jnp.float32), of_keys(p)), CAUSAL | PADDED),
    "a choice of False": (lambda p, s: jnp.where(of_keys(p), lower(), False), CAUSAL | PADDED),
    "of both paddings": (
        lambda p, s: lower() & p[:, None, :, None] & of_keys(p),
        CAUSAL | {"mask": ROWS, "mask2": COLUMNS},
    ),
    "a window": (lambda p, s: by_places(lambda i, j: (j <= i) & (i - j < 5)), WINDOW),
    "a window by a sum": (lambda p, s: by_places(lambda i, j: (i >= j) & (j + 5 > i)), WINDOW),
    "a window by triangles": (lambda p, s: lower() & ~lower(-5), WINDOW),
    "a window by numbers": (lambda p, s: jnp.logical_and(lower(0, int), jnp.triu(jnp.ones(2 * (LENGTH,)), -4)), WINDOW),
    "a window to both sides": (lambda p, s: by_places(lambda i, j: jnp.abs(i - j) <= 3), {"window": (3, 3)}),
    "a window ahead": (lambda p, s: by_places(lambda i, j: j >= i), {"window": (0, None)}),
    "a window and padding": (lambda p, s: by_places(lambda i, j: (j <= i) & (i < j + 5)) & of_keys(p), WINDOW | PADDED),
    "segments": (lambda p, s: same(s), {"segments": NUMBERS}),
    "not other segments": (lambda p, s: ~(s[:, None, :, None] != s[:, None, None]), {"segments": NUMBERS}),
    "segments, causal, padding": (
        lambda p, s: same(s) & lower() & of_keys(s > 0),
        CAUSAL | PADDED | {"segments": NUMBERS},
    ),
    "Flax's": (
        lambda p, s: nn.combine_masks(nn.make_causal_mask(s), nn.make_attention_mask(s, s, jnp.equal)),
        CAUSAL | {"segments": NUMBERS},
    ),
}
OTHERS: dict[str, Mask] = {
    "keys before alone": lambda p, s: by_places(lambda i, j: j < i),
    "one of two": lambda p, s: by_places(lambda i, j: (j <= i) | (j < 4)),
    "every other key": lambda p, s: by_places(lambda i, j: (i - j) % 2 == 0),
    "twice the place": lambda p, s: by_places(lambda i, j: i + i >= j),
    "the sum of places": lambda p, s: by_places(lambda i, j: i + j < LENGTH),
    "bytes overflow": lambda p, s: by_places(lambda i, j: (i * 16).astype(jnp.int8) >= (j * 16).astype(jnp.int8)),
    "later segments": lambda p, s: s[:, None, :, None] >= s[:, None, None],
}


def found(sites, fn, *arguments) -> tuple[dict[str, Any], float | None]:
    """The site's options and masks; and the mask value."""
    told = []
    assert sites(fn, *arguments, told=told.append) == ["attention"]
    (site,) = told[0].taken
    others = {**site.arrays, **site.options}
    return {
        name: own for name, own in others.items() if name not in ("query", "key", "value", "scale", "mask_value")
    }, (site.options.get("mask_value"))


@pytest.mark.drawn(1 / 4)
@pytest.mark.parametrize("added", [False, True])
@pytest.mark.parametrize("name", MASKS)
def test_bounds(sites, name, added):
    mask, expected = MASKS[name]
    options, value = found(
        sites, lambda q, k, v, p, s: attend(q, k, v, mask(p, s) != 0, added=added), Q, K, V, PADDING, SEGMENTS
    )
    assert options == expected
    assert value == (pytest.approx(LOWEST) if expected.keys() & {"mask", "mask2"} else None)


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_no_bound(sites, name):
    options, _ = found(sites, lambda q, k, v, p, s: attend(q, k, v, OTHERS[name](p, s)), Q, K, V, PADDING, SEGMENTS)
    assert set(options) <= {"mask", "hiding", "mask2", "hiding2"}


def test_places_of_another_axis(sites):
    """Of the heads, and not of the keys."""

    def fn(q, k, v):
        return attend(q, k, v, jnp.arange(LENGTH)[:, None] >= 4 * jnp.arange(HEADS)[:, None, None])

    assert found(sites, fn, Q, K, V)[0].keys() & {"is_causal", "window"} == set()


@pytest.mark.parametrize("value", [-jnp.inf, -1e9, -5.0])
def test_values_beside_bounds(sites, value):
    """Each query sees itself, so that a value that is low enough need not be known."""
    options, kept = found(sites, lambda q, k, v: attend(q, k, v, lower() & ~lower(-5), value=value), Q, K, V)
    assert options == WINDOW
    assert kept == (pytest.approx(-5) if value == -5 else None)


@pytest.mark.parametrize("value", [LOWEST, -1e9])
def test_a_mask_after_another(sites, value):
    def fn(q, k, v, p, second=value):
        scores = jnp.where(of_keys(p), jnp.einsum("bqhd,bkhd->bhqk", q, k), value)
        return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(jnp.where(lower() == 0, second, scores)), v)

    assert found(sites, fn, Q, K, V, PADDING) == (CAUSAL | PADDED, pytest.approx(value))
    assert "attention" not in sites(lambda *own: fn(*own, second=-2e9), Q, K, V, PADDING)


@pytest.mark.parametrize("given", [{"is_causal": True}, {}])
def test_the_attention_of_jax_and_flax(sites, given):
    def fn(q, k, v, p):
        if given:
            return jax.nn.dot_product_attention(q, k, v, mask=of_keys(p), is_causal=True)
        return nnx.dot_product_attention(q, k, v, mask=nn.combine_masks(nn.make_causal_mask(p), of_keys(p)))

    assert found(sites, fn, Q, K, V, PADDING)[0] == CAUSAL | PADDED
