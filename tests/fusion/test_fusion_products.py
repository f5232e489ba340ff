"""Matrix products, attention and losses: what is taken, in which spellings, and what only looks like one of them."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import flax.nnx as nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from rewriting import normal

from xlafuse.fusion.binding import Binding, laid_out, transposed
from xlafuse.fusion.graph import Value

BF16 = jnp.bfloat16
X, W, B, R = (normal(s, BF16, k) for k, s in enumerate(((2, 16, 64), (64, 128), (128,), (2, 16, 128))))
W = W / 8

LINEAR = {
    "bias": lambda x, w, b, r: x @ w + b,
    "bias, activation and residual": lambda x, w, b, r: jax.nn.gelu(x @ w + b) + r,
    "residual first": lambda x, w, b, r: r + jnp.einsum("btf,fn->btn", x, w),
    "of the transposed": lambda x, w, b, r: jnp.einsum("nf,btf->btn", w.T, x) + b,
    "rows in one": lambda x, w, b, r: (x.reshape(-1, 64) @ w + b).reshape(2, 16, 128),
}


@pytest.mark.parametrize("name", LINEAR)
def test_linear(sites, name):
    assert sites(LINEAR[name], X, W, B, R) == ["linear"]


def test_gated_linear(sites):
    assert sites(lambda x, w, v: jax.nn.silu(x @ w) * (x @ v), X, W, W[::-1]) == ["gated_linear"]
    assert "gated_linear" not in sites(lambda x, y, w, v: jax.nn.silu(x @ w) * (y @ v), X, X[::-1], W, W[::-1])


def wide(x):
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


BIASED_GATES = {
    "in 16 bits": lambda x, w, v, b, c: jax.nn.silu(x @ w + b) * (x @ v + c),
    "second first": lambda x, w, v, b, c: (x @ v + c) * jax.nn.gelu(b + x @ w),
    "wide": lambda x, w, v, b, c: (jax.nn.silu(wide(x @ w) + wide(b)) * (wide(x @ v) + wide(c))).astype(x.dtype),
    "one weight": lambda x, w, v, b, c: (lambda y: jax.nn.gelu(y[..., 0, :]) * y[..., 1, :])(
        jnp.einsum("...d,cdf->...cf", x, jnp.stack([w, v])) + jnp.stack([b, c])
    ),
}


@pytest.mark.parametrize("name", BIASED_GATES)
def test_gated_linear_with_biases(sites, name):
    told = []
    assert sites(BIASED_GATES[name], X, W, W[::-1], B, B[::-1], told=told.append) == ["gated_linear"]
    assert {"bias_gate", "bias_up"} <= told[0].taken[0].arrays.keys()


BIASED_OTHERWISE = {
    "after the activation": lambda x, w, v, b, c: (jax.nn.silu(x @ w) + b) * (x @ v + c),
    "after the product": lambda x, w, v, b, c: jax.nn.silu(x @ w + b) * (x @ v) + c,
    "of rows": lambda x, w, v, b, c: jax.nn.silu(x @ w + b) * (x @ v + x[..., :1]),
    "scaled": lambda x, w, v, b, c: jax.nn.silu(x @ w + b) * ((x @ v + c) * c),
}


@pytest.mark.parametrize("name", BIASED_OTHERWISE)
def test_what_is_added_elsewhere_is_no_bias_of_gated_linear(sites, name):
    told = []
    sites(BIASED_OTHERWISE[name], X, W, W[::-1], B, B[::-1], told=told.append)
    taken = [each.arrays.keys() for each in told[0].taken if each.operation == "gated_linear"]
    assert not any({"bias_gate", "bias_up"} <= each for each in taken)


def test_a_product_used_elsewhere_is_left_to_itself(sites):
    def fn(x, w, b):
        y = x @ w
        return jax.nn.silu(y + b), y

    reports = []
    sites(fn, X, W, B, told=reports.append)
    assert not any("bias" in each.arrays for each in reports[0].taken if each.operation == "linear")


@pytest.mark.parametrize("parts", [lambda y: (y.reshape(32, 128),) * 2, lambda y: jnp.split(y, 2, axis=-1)])
def test_a_product_used_elsewhere_in_another_layout_is_not_computed_twice(sites, parts):
    def fn(x, w):
        activated, other = parts(x @ w)
        return jax.nn.silu(activated), other

    reports = []
    sites(fn, X, W, told=reports.append)
    assert not any("activation" in each.options for each in reports[0].taken)


def test_a_product_is_not_repeated_for_the_rows_that_it_is_broadcast_to(sites):
    def fn(h, t, w):
        return h + (t @ w)[:, None, :]

    reports = []
    sites(fn, R, X[:, 0], W, told=reports.append)
    (product,) = reports[0].taken
    assert (product.operation, product.arrays["x"]) == ("linear", "bfloat16[2,64]")
    assert [each.reason for each in reports[0].refused] == [
        "x is broadcast to its rows, and the operation would compute each of them again"
    ]


@pytest.mark.parametrize(("precision", "taken"), [("highest", ["linear"]), ("BF16_BF16_F32_X3", [])])
def test_a_precision_of_products_in_16_bits_changes_nothing_but_an_algorithm_may(sites, precision, taken):
    assert sites(lambda x, w, b: jnp.matmul(x, w, precision=precision) + b, X, W, B, checks=False) == taken


def test_a_precise_product_of_float32_is_left(sites):
    wide = [each.astype(jnp.float32) for each in (X, W, B)]
    assert sites(lambda x, w, b: jnp.matmul(x, w, precision="highest") + b, *wide, checks=False) == []


def attend(q, k, v, *, seen=None, scale=None, transposed=False, cap=None):
    group = q.shape[2] // k.shape[2]
    k, v = jnp.repeat(k, group, axis=2), jnp.repeat(v, group, axis=2)
    scores = jnp.einsum("bqhd,bkhd->bhkq" if transposed else "bqhd,bkhd->bhqk", q, k)
    scores = scores * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)
    scores = scores if cap is None else cap * jnp.tanh(scores / cap)
    scores = scores if seen is None else jnp.where(seen, scores, -1e30)
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores, axis=-1), v)


Q = normal((2, 16, 4, 32), seed=4)
K, V = normal((2, 16, 2, 32), seed=5), normal((2, 16, 2, 32), seed=6)
TRIL = jnp.tril(jnp.ones((16, 16), bool))


def hidden_by(number):
    def fn(q, k, v, seen):
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[-1] ** -0.5
        scores = jnp.where(seen, scores, number).astype(jnp.float32)
        return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores, axis=-1).astype(v.dtype), v)

    return fn


@pytest.mark.parametrize(
    ("dtype", "number"), [(jnp.float16, jnp.finfo(jnp.float16).min), (jnp.float16, -jnp.inf), (BF16, -1e9)]
)
def test_attention_whose_hidden_scores_have_no_weight(sites, dtype, number):
    q, k = Q.astype(dtype), Q[::-1].astype(dtype)
    assert sites(hidden_by(number), q, k, k, TRIL) == ["attention"]


def heads_first(q, k, v):
    q, k, v = (jnp.swapaxes(a, 1, 2) for a in (q, k.repeat(2, 2), v.repeat(2, 2)))
    return jnp.swapaxes(jax.nn.softmax(0.2 * q @ jnp.swapaxes(k, 2, 3), axis=-1) @ v, 1, 2)


ATTENTION = {
    "einsum": (attend, {}),
    "soft cap": (lambda q, k, v: attend(q, k, v, cap=20.0), {}),
    "causal": (lambda q, k, v: attend(q, k, v, seen=jnp.tril(jnp.ones((16, 16), bool))), {"is_causal": True}),
    "jax": (lambda q, k, v: jax.nn.dot_product_attention(q, k, v, implementation="xla"), {}),
    "jax, causal": (
        lambda q, k, v: jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="xla"),
        {"is_causal": True},
    ),
    "heads first": (heads_first, {}),
}


@pytest.mark.parametrize("name", ATTENTION)
def test_attention(sites, name):
    function, options = ATTENTION[name]
    reports = []
    assert sites(function, Q, K, V, told=reports.append) == ["attention"]
    assert reports[0].taken[0].options.items() >= options.items()
    assert reports[0].taken[0].arrays["key"] == "float32[2,16,2,32]"


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 1, 3), (1, 3, 0, 2)])
def test_a_product_of_attentions_result(sites, order):
    """Its argument is the result, of which attention computes the elements in another order."""

    def fn(q, k, v, w, b):
        y = jax.nn.dot_product_attention(q, k, v, implementation="xla").transpose(order)
        return y.reshape(*y.shape[:2], -1) @ w[: y.shape[2] * y.shape[3]] + b

    w, b = normal((512, 64), BF16, 8) / 16, normal((64,), BF16, 9)
    arguments = (*(normal((2, 16, 4, 32), BF16, seed) for seed in (4, 5, 6)), w, b)
    assert sites(fn, *arguments) == ["attention", "linear"]


@pytest.mark.parametrize("parts", [(6, 4), (2, 3, 4), (2, 3, 2, 2)])
def test_an_argument_is_the_same_of_a_transposed_value(parts):
    value = np.arange(24).reshape(6, 1, 4)

    def bound(array, order):
        places = tuple((0, 1, size) for size in array.shape)
        return Binding(Value(jax.ShapeDtypeStruct(array.shape, array.dtype)), places, parts, order, (24,))

    for axes, order in itertools.product(itertools.permutations(range(3)), itertools.permutations(range(len(parts)))):
        moved = value.transpose(axes)
        read = replace(transposed(bound(value, order), axes), places=bound(moved, order).places)
        expected = laid_out(bound(value, order), value, keeps_missing=True)
        np.testing.assert_array_equal(laid_out(read, moved, keeps_missing=True), expected)


@pytest.mark.parametrize("name", ["jax", "jax, causal"])
def test_attention_in_bfloat16(sites, name):
    assert sites(ATTENTION[name][0], *(a.astype(BF16) for a in (Q, K, V)), checks=False) == ["attention"]


NOT_ATTENTION = {
    "scores transposed": lambda q, k, v: attend(q, k, v, transposed=True),
    "softmax over queries": lambda q, k, v: jnp.einsum(
        "bhqk,bkhd->bqhd", jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, q), axis=2), q
    ),
    "heads in another order": lambda q, k, v: attend(q, jnp.tile(k, (1, 1, 2, 1)), jnp.tile(v, (1, 1, 2, 1))),
}


@pytest.mark.parametrize("name", NOT_ATTENTION)
def test_what_is_another_attention(sites, name):
    reports = []
    sites(NOT_ATTENTION[name], Q, K, V, told=reports.append)  # what is taken must give the same numbers
    assert not any(each.arrays.get("key") == "float32[2,16,2,32]" for each in reports[0].taken)


@pytest.mark.parametrize("seen", [~TRIL, jnp.tril(jnp.ones((16, 16), bool), 1), TRIL.T])
def test_masks_that_are_not_causal(sites, seen):
    reports = []
    assert sites(lambda q, k, v: attend(q, k, v, seen=seen), Q, K, V, told=reports.append) == ["attention"]
    assert reports[0].taken[0].options.keys() == {"scale", "mask_value"}


def test_attention_of_nnx(sites):
    module = nnx.MultiHeadAttention(4, 64, decode=False, rngs=nnx.Rngs(0))
    assert sites(lambda x: module(x), normal((2, 16, 64)), checks=False) == ["attention"]


LOGITS, LABELS = normal((8, 32), seed=7), jnp.arange(8) - 1  # -1 is the last class to JAX's indexing

LOSSES = {
    "optax": lambda x, y: optax.softmax_cross_entropy_with_integer_labels(x, y).mean(),
    "log_softmax": lambda x, y: -jnp.take_along_axis(jax.nn.log_softmax(x), y[:, None], -1).mean(),
    "one-hot": lambda x, y: optax.softmax_cross_entropy(x, jax.nn.one_hot(y, 32)).sum(),
    "logsumexp": lambda x, y: (jax.nn.logsumexp(x, axis=-1) - jnp.take_along_axis(x, y[:, None], -1)[:, 0]).sum(),
}


@pytest.mark.parametrize("name", LOSSES)
def test_cross_entropy(sites, name):
    assert sites(LOSSES[name], LOGITS, LABELS) == ["cross_entropy"]


def squared(x):
    return jax.nn.logsumexp(x, axis=-1) ** 2


def smooth(y, alpha: Any = 0.1, classes=32):
    return optax.smooth_labels(jax.nn.one_hot(y, classes), alpha)


def confident(y, on=0.9, classes=32):
    """As Flax's examples make them."""
    hot = y[..., None] == jnp.arange(classes).reshape((1,) * y.ndim + (-1,))
    return jnp.where(hot, on, (1 - on) / (classes - 1))


INTEGERS = optax.softmax_cross_entropy_with_integer_labels
Z_LOSSES = {
    "of each row": lambda x, y: jnp.sin(INTEGERS(x, y) + 1e-3 * squared(x)),
    "means": lambda x, y: INTEGERS(x, y).mean() + 1e-3 * squared(x).mean(),
    "mean of both": lambda x, y: (1e-3 * squared(x) + INTEGERS(x, y)).mean(),
    "log_softmax": lambda x, y: -jnp.take_along_axis(jax.nn.log_softmax(x), y[:, None], -1)[:, 0] + 1e-3 * squared(x),
    "one-hot": lambda x, y: optax.softmax_cross_entropy(x, jax.nn.one_hot(y, 32)) + squared(x) * 1e-3,
    "smoothed": lambda x, y: optax.softmax_cross_entropy(x, smooth(y)) + 1e-3 * jnp.square(jax.nn.logsumexp(x, -1)),
}
SMOOTHED = {
    "optax": lambda x, y: optax.softmax_cross_entropy(x, smooth(y)),
    "mean": lambda x, y: optax.softmax_cross_entropy(x, smooth(y)).mean(),
    "by hand": lambda x, y: -(jax.nn.log_softmax(x) * smooth(y)).sum(-1).sum(),
    "chosen": lambda x, y: optax.softmax_cross_entropy(x, confident(y)),
    "added": lambda x, y: -jnp.sum((0.9 * jax.nn.one_hot(y, 32) + 0.1 / 32) * jax.nn.log_softmax(x)) / 8,
}


@pytest.mark.parametrize("name", Z_LOSSES)
def test_z_loss(sites, name):
    told = []
    assert sites(Z_LOSSES[name], LOGITS, LABELS, told=told.append) == ["cross_entropy"]
    assert told[0].taken[0].options["z_loss"] == pytest.approx(1e-3)


@pytest.mark.parametrize("name", SMOOTHED)
def test_label_smoothing(sites, name):
    """Also for labels outside the vocabulary, which leave the smoothing term alone."""
    told = []
    assert sites(SMOOTHED[name], LOGITS, LABELS.at[3].set(40), told=told.append) == ["cross_entropy"]
    smoothing = 0.1 * 32 / 31 if name == "chosen" else 0.1
    assert told[0].taken[0].options["label_smoothing"] == pytest.approx(smoothing)


NO_Z_LOSS = {
    "of other logits": lambda x, y: INTEGERS(x, y) + 1e-3 * squared(x[::-1]),
    "over another axis": lambda x, y: INTEGERS(x, y) + 1e-3 * jax.nn.logsumexp(x[:, :8], axis=0) ** 2,
    "not squared": lambda x, y: INTEGERS(x, y) + 1e-3 * jax.nn.logsumexp(x, axis=-1),
    "of the maximum": lambda x, y: INTEGERS(x, y) + 1e-3 * jnp.max(x, axis=-1) ** 2,
    "of some rows": lambda x, y: INTEGERS(x, y).mean() + 1e-3 * squared(x)[:4].mean(),
    "an array": lambda x, y: INTEGERS(x, y) + x[:, 0] * squared(x),
}
NO_SMOOTHING = {
    "not to one": lambda x, y: optax.softmax_cross_entropy(x, 0.9 * jax.nn.one_hot(y, 32) + 0.1),
    "of all but the label": lambda x, y: optax.softmax_cross_entropy(x, 0.9 * jax.nn.one_hot(y, 32) + 0.1 / 31),
    "negative": lambda x, y: optax.softmax_cross_entropy(x, smooth(y, -0.5)),
    "over the rows": lambda x, y: optax.softmax_cross_entropy(x, 0.9 * jax.nn.one_hot(y, 32) + 0.1 / 8),
    "an array": lambda x, y: optax.softmax_cross_entropy(x, smooth(y, jnp.abs(x[:, :1]))),
}


@pytest.mark.parametrize("name", NO_Z_LOSS)
def test_what_is_no_z_loss(sites, name):
    told = []
    sites(NO_Z_LOSS[name], LOGITS, LABELS, told=told.append)
    assert not any("z_loss" in each.options for each in told[0].taken)


@pytest.mark.parametrize("name", NO_SMOOTHING)
def test_what_is_no_label_smoothing(sites, name):
    assert sites(NO_SMOOTHING[name], LOGITS, LABELS) == []


def test_losses_over_another_axis_are_left(sites):
    def fn(x, y):
        return -jnp.take_along_axis(jax.nn.log_softmax(x, axis=0), y[:, None], -1).mean()

    assert sites(fn, LOGITS, LABELS) == []
