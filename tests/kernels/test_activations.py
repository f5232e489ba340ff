"""The activation functions of kernels against Python's and JAX's own, in float64."""

from __future__ import annotations

import math
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels
from pallas_kernels.primitives.activations import ACTIVATIONS, get_activation
from xlafuse.fusion.spelling import ACTIVATION_NEEDS

NAMES = tuple(ACTIVATIONS)
X = np.concatenate([np.linspace(-15, 15, 20001), np.linspace(-1, 1, 4001), [0.0]]).astype(np.float32)


def exact(name):
    """Value and derivative in float64."""
    with jax.enable_x64(True):
        value, pullback = jax.vjp(ACTIVATIONS[name].reference, jnp.asarray(X, jnp.float64))
        return np.asarray(value), np.asarray(pullback(jnp.ones_like(value))[0])


@pytest.mark.parametrize("name", NAMES)
def test_float32_results_are_as_good_as_jax_nn(name):
    value, derivative = exact(name)
    got_value, got_derivative = ACTIVATIONS[name].value_and_derivative(jnp.asarray(X), jnp.dtype("float32"))
    base, pullback = jax.vjp(ACTIVATIONS[name].reference, jnp.asarray(X))
    base_derivative = pullback(jnp.ones_like(base))[0]
    np.testing.assert_array_equal(got_value, ACTIVATIONS[name].value(jnp.asarray(X), jnp.dtype("float32")))
    for got, baseline, want in ((got_value, base, value), (got_derivative, base_derivative, derivative)):
        allowed = 2 * np.abs(baseline - want).max() + np.spacing(np.abs(want).astype(np.float32))
        assert (np.abs(got - want) <= allowed).all(), (name, np.abs(got - want).max(), np.abs(baseline - want).max())


@pytest.mark.parametrize("name", NAMES)
def test_16_bit_results_are_relatively_exact(name):
    """Also far in the left tail, where the textbook formulas have nothing left."""
    value, derivative = exact(name)
    if name == "gelu_tanh":  # jax.nn's own has nothing left there, either
        x = X.astype(np.float64)
        value = x / (1 + np.exp(-2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    got_value, got_derivative = ACTIVATIONS[name].value_and_derivative(jnp.asarray(X), jnp.dtype("bfloat16"))
    normal = (np.abs(value) > 1e-30) & (np.abs(X) < 9)
    np.testing.assert_allclose(np.asarray(got_value)[normal], value[normal], rtol=1e-4)
    np.testing.assert_allclose(got_derivative, derivative, rtol=1e-5, atol=5e-5)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_large_arguments_are_finite(name, dtype):
    limit = 1e18 if name == "relu_squared" else 3e38
    x = jnp.asarray([-limit, -1e10, -1e4, -128.0, -90.0, 0.0, 128.0, 1e4, 1e10, limit], jnp.float32)
    value, derivative = ACTIVATIONS[name].value_and_derivative(x, jnp.dtype(dtype))
    assert np.isfinite(value).all() and np.isfinite(derivative).all()
    np.testing.assert_allclose(value[:5], 0, atol=1e-30)
    np.testing.assert_allclose(derivative[:5], 0, atol=1e-30)
    if name != "relu_squared":
        np.testing.assert_allclose(value[6:], x[6:], rtol=1e-6)
        np.testing.assert_allclose(derivative[6:], 1, rtol=1e-6)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_infinities_are_those_of_jax_nn(name, dtype):
    """Or what the function goes to, where jax.nn has NaN: minus infinity times zero."""
    x = jnp.asarray([np.inf, -np.inf], dtype)
    value, pullback = jax.vjp(ACTIVATIONS[name].reference, x)
    baselines = (value, pullback(jnp.ones_like(x))[0])
    results = ACTIVATIONS[name].value_and_derivative(x.astype(jnp.float32), jnp.dtype(dtype))
    for got, baseline in zip(results, baselines, strict=True):
        is_known = ~np.isnan(baseline)
        np.testing.assert_array_equal(np.asarray(got)[is_known], np.asarray(baseline, np.float32)[is_known])
    if name == "gelu":
        np.testing.assert_array_equal(results[0], [np.inf, 0])
        np.testing.assert_array_equal(ACTIVATIONS[name].value(x.astype(jnp.float32), jnp.dtype(dtype)), [np.inf, 0])
    not_a_number = ACTIVATIONS[name].value(jnp.asarray([np.nan], jnp.float32), jnp.dtype(dtype))
    assert np.isnan(not_a_number).all()


@pytest.mark.parametrize("name", NAMES)
def test_each_is_zero_at_zero(name):
    """`fuse` counts on it: rows of no group are zero before the activation and after it."""
    assert float(ACTIVATIONS[name].reference(jnp.float32(0))) == 0


def test_gelu_is_the_normal_distribution():
    x = np.float32(-3.7)
    value, _ = ACTIVATIONS["gelu"].value_and_derivative(jnp.asarray([x]), jnp.dtype("float32"))
    assert float(value[0]) == pytest.approx(float(x) * 0.5 * math.erfc(-float(x) / math.sqrt(2)), rel=1e-6)


def test_unknown_names_get_the_nearest():
    with pytest.raises(ValueError, match=r"op: unknown activation 'gelu_tahn'. Did you mean 'gelu_tanh'\? There are"):
        get_activation("op", "gelu_tahn")


def test_other_lists_of_activations_have_all_of_them():
    """`fuse` looks each up, and Triton's kernel takes a name that it does not know for none."""
    source = (Path(pallas_kernels.__file__).parent / "ops" / "linear" / "triton.py").read_text(encoding="utf-8")
    assert set(re.findall(r'activation == "(\w+)"', source)) == set(NAMES)
    assert ACTIVATION_NEEDS.keys() == set(NAMES)
