"""Norms, softmax and activations: what is taken, in which spellings, and what only looks like one of them."""

from __future__ import annotations

from typing import Any

import flax.nnx as nnx
import jax
import jax.numpy as jnp
import pytest
from rewriting import normal

X = normal((4, 64), jnp.bfloat16)
WIDE = normal((4, 64))
SCALE, BIAS = normal((64,), seed=1), normal((64,), seed=2)


def rms(x, scale, *, epsilon=1e-6, axis: Any = -1):
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    inverse = jax.lax.rsqrt(jnp.mean(wide * wide, axis=axis, keepdims=True) + epsilon)
    return (wide * inverse * scale).astype(x.dtype)


def rms_by_division(x, scale):
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    return ((wide / jnp.sqrt(jnp.sum(wide**2, -1, keepdims=True) * (1 / 64) + 1e-5)) * scale).astype(x.dtype)


def rms_of_gemma(x, scale):
    return rms(x, 1 + scale)


def layer(x, scale, bias):
    mean = x.mean(-1, keepdims=True)
    return (x - mean) / jnp.sqrt(x.var(-1, keepdims=True) + 1e-5) * scale + bias


def layer_of_haiku(x, scale, bias):
    mean = jnp.mean(x, -1, keepdims=True)
    variance = jnp.mean(jnp.square(x - mean), -1, keepdims=True)
    return scale * jax.lax.rsqrt(variance + 1e-5) * (x - mean) + bias


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32, jnp.float16])
@pytest.mark.parametrize("spelling", [rms, rms_by_division, rms_of_gemma])
def test_rms_norm(sites, spelling, dtype):
    assert sites(spelling, X.astype(dtype), SCALE) == ["rms_norm"]


def test_rms_norm_takes_the_sum_before_it(sites):
    def add_norm(x, residual, scale):
        total = x + residual
        return rms(total, scale), total

    assert sites(add_norm, X, X[::-1], SCALE) == ["rms_norm"]


@pytest.mark.parametrize("spelling", [layer, layer_of_haiku])
def test_layer_norm(sites, spelling):
    assert sites(spelling, WIDE, SCALE, BIAS) == ["layer_norm"]


def test_norms_of_three_dimensions_and_transposed_back(sites):
    assert sites(lambda x, s: rms(x.T.reshape(2, 2, 64).swapaxes(0, 1), s).swapaxes(0, 1), X.T, SCALE) == ["rms_norm"]


def test_a_norm_of_a_transposed_sum_leaves_the_sum(sites):
    def fn(x, scale):
        total = x + x
        return total, rms(total.T, scale) + x

    reports = []
    assert sites(fn, normal((64, 64), jnp.bfloat16), SCALE, told=reports.append) == ["rms_norm"]
    assert "residual" not in reports[0].taken[0].arrays


NOT_RMS = {
    "epsilon outside the root": lambda x, s: x / (jnp.sqrt(jnp.mean(x * x, -1, keepdims=True)) + 1e-6) * s,
    "mean over rows": lambda x, s: rms(x, s, axis=0),
    "mean over both axes": lambda x, s: rms(x, s, axis=(0, 1)),
    "divided by one less": lambda x, s: x * jax.lax.rsqrt(jnp.sum(x * x, -1, keepdims=True) / 63 + 1e-6) * s,
    "square of another": lambda x, s: x * jax.lax.rsqrt(jnp.mean(x * x[::-1], -1, keepdims=True) ** 2 + 1e-6) * s,
    "absolute values": lambda x, s: x * jax.lax.rsqrt(jnp.mean(jnp.abs(x), -1, keepdims=True) + 1e-6) * s,
    "root and not its reciprocal": lambda x, s: x * jnp.sqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * s,
    "without gradient": lambda x, s: x * jax.lax.stop_gradient(jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True))) * s,
    "scale of rows": lambda x, s: x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * s[:4, None],
    "half of the row": lambda x, s: x * jax.lax.rsqrt(jnp.mean(x[:, :32] ** 2, -1, keepdims=True) + 1e-6) * s,
    "accumulated in bfloat16": lambda x, s: (
        lambda h: h * jax.lax.rsqrt(jax.lax.reduce_sum(h * h, axes=(1,))[:, None] / 64 + 1e-6) * s.astype(h.dtype)
    )(x.astype(jnp.bfloat16)),
}


@pytest.mark.parametrize("name", NOT_RMS)
def test_what_is_no_rms_norm_with_a_scale(sites, name):
    reports = []
    found = sites(NOT_RMS[name], WIDE, SCALE, checks=False, told=reports.append)
    assert "rms_norm" not in found or name == "scale of rows"  # a norm without a scale, times the rows'
    assert not any("scale" in each.arrays for each in reports[0].taken if each.operation == "rms_norm")


NOT_LAYER = {
    "sample variance": lambda x, s, b: (
        (x - x.mean(-1, keepdims=True)) / jnp.sqrt(x.var(-1, ddof=1, keepdims=True)) * s + b
    ),
    "bias before the scale": lambda x, s, b: (
        ((x - x.mean(-1, keepdims=True)) / jnp.sqrt(x.var(-1, keepdims=True)) + b) * s
    ),
    "variance of another": lambda x, s, b: (
        (x - x.mean(-1, keepdims=True)) / jnp.sqrt(x[::-1].var(-1, keepdims=True)) * s + b
    ),
    "mean of another axis": lambda x, s, b: (x - x.mean(0, keepdims=True)) / jnp.sqrt(x.var(-1, keepdims=True)) * s + b,
    "bias taken off": lambda x, s, b: (x - x.mean(-1, keepdims=True)) / jnp.sqrt(x.var(-1, keepdims=True)) * s - b,
}


@pytest.mark.parametrize("name", NOT_LAYER)
def test_what_is_no_layer_norm_with_scale_and_bias(sites, name):
    reports = []
    sites(NOT_LAYER[name], WIDE, SCALE, BIAS, told=reports.append)
    assert not any({"scale", "bias"} <= each.arrays.keys() for each in reports[0].taken)


def test_a_scale_after_the_cast_is_refused_unless_allowed(sites):
    def late(x, scale):
        wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        return (wide * jax.lax.rsqrt(jnp.mean(wide**2, -1, keepdims=True) + 1e-6)).astype(x.dtype) * scale.astype(
            x.dtype
        )

    reports = []
    assert sites(late, X, SCALE, told=reports.append) == ["rms_norm"]  # without the scale
    assert reports[0].taken[0].arrays.keys() == {"x"}
    assert [each.operation for each in reports[0].refused] == ["rms_norm"]
    assert sites(late, X, SCALE, allow={"rounding"}, told=reports.append) == ["rms_norm"]
    assert reports[1].taken[0].arrays.keys() == {"x", "scale"} and not reports[1].refused


def test_a_value_used_elsewhere_keeps_its_equations(sites):
    def twice(x, scale):
        mean = jnp.mean(x * x, -1, keepdims=True)
        return x * jax.lax.rsqrt(mean + 1e-6) * scale, mean

    assert sites(twice, WIDE, SCALE) == []


@pytest.mark.parametrize("dtype", [None, jnp.bfloat16])
@pytest.mark.parametrize(("layer", "operation"), [(nnx.RMSNorm, "rms_norm"), (nnx.LayerNorm, "layer_norm")])
def test_norms_of_nnx(sites, layer, operation, dtype):
    module = layer(64, dtype=dtype, rngs=nnx.Rngs(0))
    assert sites(lambda x: module(x), X if dtype else WIDE, checks=False) == [operation]


SOFTMAX = {
    "jax": lambda x: jax.nn.softmax(x, axis=-1),
    "scaled": lambda x: jax.nn.softmax(x * 0.125, axis=-1),
    "divided": lambda x: jax.nn.softmax(x / 8.0, axis=-1),
    "by hand": lambda x: (
        jnp.exp(x - x.max(-1, keepdims=True)) / jnp.exp(x - x.max(-1, keepdims=True)).sum(-1, keepdims=True)
    ),
    "causal": lambda x: jax.nn.softmax(jnp.where(jnp.tril(jnp.ones((64, 64), bool)), x, -1e30), axis=-1),
    "causal by positions": lambda x: jax.nn.softmax(
        jnp.where(jnp.arange(64)[:, None] < jnp.arange(64), -jnp.inf, x * 0.5), axis=-1
    ),
}


@pytest.mark.parametrize("name", SOFTMAX)
def test_softmax(sites, name):
    x = normal((2, 64, 64))
    reports = []
    assert sites(SOFTMAX[name], x, told=reports.append) == ["softmax"]
    assert reports[0].taken[0].options.get("is_causal", False) == ("causal" in name)


NOT_CAUSAL = {
    "offset": lambda x: jnp.where(jnp.tril(jnp.ones((64, 64), bool), 1), x, -1e30),
    "other polarity": lambda x: jnp.where(jnp.tril(jnp.ones((64, 64), bool)), -1e30, x),
    "upper": lambda x: jnp.where(jnp.triu(jnp.ones((64, 64), bool)), x, -1e30),
    "strict": lambda x: jnp.where(jnp.arange(64)[:, None] > jnp.arange(64), x, -1e30),
    "hidden scores of 0": lambda x: jnp.where(jnp.tril(jnp.ones((64, 64), bool)), x, 0.0),
}


@pytest.mark.parametrize("name", NOT_CAUSAL)
def test_masks_that_are_not_causal(sites, name):
    def fn(x):
        return jax.nn.softmax(NOT_CAUSAL[name](x), axis=-1)

    reports = []
    x = normal((2, 64, 64))
    assert sites(fn, x, told=reports.append) in (["softmax"], [])
    assert not any("is_causal" in each.options for each in reports[0].taken)


def test_softmax_over_another_axis_is_left(sites):
    assert sites(lambda x: jax.nn.softmax(x, axis=0), WIDE) == []


@pytest.mark.parametrize("hidden", [-jnp.inf, -1e30])
def test_a_masked_softmax(sites, hidden):
    """A row that is hidden by a number has equal weights: there the mask stays before the softmax."""

    def masked(x, mask):
        return jax.nn.softmax(jnp.where(mask, x, hidden), axis=-1)

    x = normal((2, 4, 64))
    mask = (normal((2, 1, 64)) > 0).at[0].set(hidden == -jnp.inf)
    report = []
    assert sites(masked, x, mask, told=report.append) == ["softmax"]
    assert ("mask" in report[0].taken[0].arrays) == (hidden == -jnp.inf)
    assert not report[0].refused


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("activation", [jax.nn.silu, jax.nn.gelu, jax.nn.relu, lambda x: x * jax.nn.sigmoid(x)])
def test_activations(sites, activation, dtype):
    x, bias = X.astype(dtype), BIAS.astype(dtype)
    assert sites(lambda x, b: activation(x + b), x, bias) == ["bias_activation"]
    assert sites(lambda x, y: activation(x) * y, x, x[::-1]) == ["gated_activation"]
    assert sites(lambda xy: (lambda p: activation(p[0]) * p[1])(jnp.split(xy, 2, -1)), x) == ["gated_activation"]


def test_gates_of_another_function_are_left(sites):
    assert sites(lambda x, y: jax.nn.sigmoid(x) * y, WIDE, WIDE[::-1]) == []
    assert sites(lambda x, y: x * jax.nn.sigmoid(1.702 * x) * y, WIDE, WIDE[::-1]) == []
    assert sites(lambda x, y: jnp.tanh(x) * y, WIDE, WIDE[::-1]) == []


def test_a_custom_derivative_is_kept(sites):
    @jax.custom_jvp
    def relu(x):
        return jnp.maximum(x, 0)

    relu.defjvp(lambda primals, tangents: (relu(primals[0]), tangents[0]))
    assert sites(lambda x, y: relu(x) * y, WIDE, WIDE[::-1]) == []
