"""Norms, softmax and activations: what is taken, in which spellings, and what only looks like one of them."""

from __future__ import annotations

from typing import Any

import flax.nnx as nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rewriting import normal

from xlafuse import fuse

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


def rounded_rms(x, epsilon=1e-6):
    wide = x.astype(jnp.float32)
    return (wide * jax.lax.rsqrt(jnp.mean(wide**2, -1, keepdims=True) + epsilon)).astype(x.dtype)


def rounded_layer(x, epsilon=1e-6):
    wide = x.astype(jnp.float32)
    mean = wide.mean(-1, keepdims=True)
    return ((wide - mean) * jax.lax.rsqrt(wide.var(-1, keepdims=True) + epsilon)).astype(x.dtype)


def rounded_layer_of_flax(x):
    wide = x.astype(jnp.float32)
    mean = wide.mean(-1, keepdims=True)
    variance = jnp.maximum(0.0, jnp.mean(wide**2, -1, keepdims=True) - mean**2)
    return ((wide - mean) * jax.lax.rsqrt(variance + 1e-6)).astype(x.dtype)


SCALED_AFTER_ROUNDING = {
    "in 16 bits": lambda x, s, b: rounded_rms(x) * s.astype(x.dtype),
    "scale on the left, by division": lambda x, s, b: (
        s.astype(x.dtype)
        * (x / jnp.sqrt(jnp.mean(x.astype(jnp.float32) ** 2, -1, keepdims=True) + 1e-5)).astype(x.dtype)
    ),
    "in float32": lambda x, s, b: (rounded_rms(x) * s).astype(x.dtype),
    "a narrow scale in float32": lambda x, s, b: (rounded_rms(x) * s.astype(x.dtype).astype(jnp.float32)).astype(
        x.dtype
    ),
    "1 + scale in 16 bits": lambda x, s, b: rounded_rms(x) * (1 + s.astype(x.dtype)),
    "1 + scale in float32": lambda x, s, b: rounded_rms(x) * (1.0 + s).astype(x.dtype)[None],
    "layer": lambda x, s, b: rounded_layer(x) * s.astype(x.dtype) + b.astype(x.dtype),
    "layer in float32": lambda x, s, b: (rounded_layer(x) * s + b).astype(x.dtype),
    "layer of narrow parameters in float32": lambda x, s, b: (
        rounded_layer(x) * s.astype(x.dtype).astype(jnp.float32) + b.astype(x.dtype).astype(jnp.float32)
    ).astype(x.dtype),
    "layer with a scale": lambda x, s, b: rounded_layer(x) * s.astype(x.dtype),
    "layer with a bias": lambda x, s, b: (rounded_layer(x) + b).astype(x.dtype),
    "variance of Flax": lambda x, s, b: rounded_layer_of_flax(x) * s.astype(x.dtype) + b.astype(x.dtype),
}


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("name", SCALED_AFTER_ROUNDING)
def test_a_scale_after_the_rounding_has_the_same_bits(sites, name, dtype):
    x, reports, fn = X.astype(dtype), [], SCALED_AFTER_ROUNDING[name]
    operation = "layer_norm" if "layer" in name or "Flax" in name else "rms_norm"
    assert sites(fn, x, SCALE, BIAS, told=reports.append) == [operation]
    (site,) = reports[0].taken
    assert site.options["rounds_before_scale"]
    assert {"scale", "bias"} & site.arrays.keys()
    np.testing.assert_array_equal(fuse(fn)(x, SCALE, BIAS).astype("float32"), fn(x, SCALE, BIAS).astype("float32"))


NOT_SCALED_AFTER_ROUNDING = {
    "rounded in front of the deviation": lambda x, s, b: (
        x
        * (jax.lax.rsqrt(jnp.mean(x.astype(jnp.float32) ** 2, -1, keepdims=True) + 1e-6)).astype(x.dtype)
        * s.astype(x.dtype)
    ),
    "rounded to another dtype": lambda x, s, b: (
        rounded_rms(x.astype(jnp.float32)).astype("float16") * s.astype("float16")
    ).astype(x.dtype),
    "scale of rows": lambda x, s, b: rounded_rms(x) * s.astype(x.dtype)[:4, None],
    "bias before the rounding": lambda x, s, b: (
        (rounded_layer(x.astype(jnp.float32)) + b).astype(x.dtype) * s.astype(x.dtype)
    ),
    "rounded between a wide scale and the bias": lambda x, s, b: (
        (rounded_layer(x) * s).astype(x.dtype) + b.astype(x.dtype)
    ),
    "rounded after the scale alone": lambda x, s, b: (
        (rounded_layer(x.astype(jnp.float32)) * s).astype(x.dtype) + b.astype(x.dtype)
    ),
}


@pytest.mark.parametrize("name", NOT_SCALED_AFTER_ROUNDING)
def test_what_rounds_elsewhere_is_no_norm_with_scale_and_bias(sites, name):
    reports = []
    sites(NOT_SCALED_AFTER_ROUNDING[name], X, SCALE, BIAS, told=reports.append)
    for site in reports[0].taken:
        is_layer = site.operation == "layer_norm"
        assert not ({"scale", "bias"} if is_layer else {"scale"}) <= site.arrays.keys(), site.options
        assert is_layer or "rounds_before_scale" not in site.options


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
@pytest.mark.parametrize(
    "activation",
    [
        jax.nn.silu,
        jax.nn.gelu,
        jax.nn.relu,
        lambda x: x * jax.nn.sigmoid(x),
        lambda x: x * jax.nn.sigmoid(1.702 * x),
    ],
)
def test_activations(sites, activation, dtype):
    x, bias = X.astype(dtype), BIAS.astype(dtype)
    assert sites(lambda x, b: activation(x + b), x, bias) == ["bias_activation"]
    assert sites(lambda x, y: activation(x) * y, x, x[::-1]) == ["gated_activation"]
    assert sites(lambda xy: (lambda p: activation(p[0]) * p[1])(jnp.split(xy, 2, -1)), x) == ["gated_activation"]


def test_gates_of_another_function_are_left(sites):
    assert sites(lambda x, y: jax.nn.sigmoid(x) * y, WIDE, WIDE[::-1]) == []
    assert sites(lambda x, y: x * jax.nn.sigmoid(1.704 * x) * y, WIDE, WIDE[::-1]) == []
    assert sites(lambda x, y: jnp.tanh(x) * y, WIDE, WIDE[::-1]) == []


def test_a_custom_derivative_is_kept(sites):
    @jax.custom_jvp
    def relu(x):
        return jnp.maximum(x, 0)

    relu.defjvp(lambda primals, tangents: (relu(primals[0]), tangents[0]))
    assert sites(lambda x, y: relu(x) * y, WIDE, WIDE[::-1]) == []
