"""What the shared base cannot say of the linear layer with integer weights."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from draws import normal

from pallas_kernels import QuantizedWeight, quantize, quantized_linear
from pallas_kernels.ops.quantized_linear.reference import quantized_linear_reference


def weights(features=128, outputs=64):
    return normal(1, (features, outputs))


@pytest.mark.parametrize(("bits", "group_size", "steps"), [(8, None, 254), (8, 64, 254), (4, 128, 14), (4, None, 14)])
def test_integers_are_within_half_a_step(bits, group_size, steps):
    w = weights(256)
    q = quantize(w, bits=bits, group_size=group_size)
    groups = 1 if group_size is None else 256 // group_size
    assert (q.shape, q.integers.dtype, q.scales.shape) == ((256, 64), jnp.dtype(f"int{bits}"), (groups, 64))
    grouped = np.asarray(w).reshape(groups, -1, 64)
    step = (2 * np.abs(grouped).max(axis=1, keepdims=True) / steps + np.zeros_like(grouped)).reshape(256, 64)
    error = np.abs(np.asarray(q.dequantized(jnp.float32)) - np.asarray(w))
    assert (error <= 0.5001 * step).all()
    assert error.max() > 0.4 * step.min()


def test_zero_weights_stay_zero():
    q = quantize(jnp.zeros((128, 64), jnp.bfloat16), bits=4, group_size=64)
    np.testing.assert_array_equal(q.dequantized(jnp.bfloat16), 0)
    assert np.isfinite(np.asarray(q.scales)).all()


def test_eight_bits_are_kept_in_another_order_where_features_allow_it():
    w = weights(96)
    q = quantize(w)
    assert (q.values.dtype, quantize(w[:90]).values.dtype) == (jnp.uint8, jnp.int8)
    assert jax.tree.map(lambda array: array[None], q).shape == q.shape
    part = replace(q, values=q.values[8:24, 16:64], scales=q.scales[:, 8:24])
    np.testing.assert_array_equal(part.dequantized(jnp.float32), q.dequantized(jnp.float32)[16:64, 8:24])


@pytest.mark.usefixtures("interpreter")
def test_either_order_gives_the_same():
    x, q = normal(2, (3, 128), jnp.bfloat16), quantize(weights())
    natural = replace(q, values=q.integers)
    np.testing.assert_array_equal(natural.dequantized(jnp.float32), q.dequantized(jnp.float32))
    ours, theirs = (quantized_linear(x, each, implementation="mosaic") for each in (q, natural))
    np.testing.assert_array_equal(ours, theirs)


def test_weights_go_through_jit_and_map():
    q = quantize(weights())
    again = jax.jit(lambda q: jax.tree.map(lambda leaf: leaf + 0, q))(q)
    assert isinstance(again, QuantizedWeight)
    assert (again.bits, again.group_size) == (8, None)
    np.testing.assert_array_equal(again.values, q.values)


def test_weights_are_constants():
    x, q = jnp.ones((4, 128)), quantize(weights())

    def loss(x, scales):
        w = QuantizedWeight(values=q.values, scales=scales, bits=8, group_size=None)
        return quantized_linear(x, w).sum()

    dx, dscales = jax.grad(loss, argnums=(0, 1))(x, q.scales)
    np.testing.assert_allclose(dx[0], np.asarray(q.dequantized(jnp.float32)).sum(axis=1), rtol=1e-4, atol=1e-4)
    np.testing.assert_array_equal(dscales, 0)


def test_without_a_gpu_none_is_xla():
    x, q = jnp.ones((4, 128), jnp.bfloat16), quantize(weights())
    np.testing.assert_array_equal(quantized_linear(x, q), quantized_linear_reference(x, q))
    with pytest.raises(NotImplementedError, match="Hopper"):
        quantized_linear(x, q, implementation="mosaic")


@pytest.mark.parametrize(
    ("shape", "group_size", "rows", "words"),
    [
        ((192, 64), None, 4, "multiples of 128 features"),
        ((128, 96), None, 4, "64 outputs"),
        ((128, 64), 64, 65, "at most 64"),
    ],
)
@pytest.mark.usefixtures("interpreter")
def test_sizes_that_the_kernel_refuses(shape, group_size, rows, words):
    x, q = jnp.ones((rows, shape[0]), jnp.bfloat16), quantize(weights(*shape), group_size=group_size)
    with pytest.raises(NotImplementedError, match=words):
        quantized_linear(x, q, implementation="mosaic")
    np.testing.assert_array_equal(quantized_linear(x, q), quantized_linear(x, q, implementation="xla"))


@pytest.mark.parametrize("bits", [8, 4])
def test_what_no_scale_can_be_made_of(bits):
    w = weights(128).at[:, 0].multiply(1e-38).at[3, 1].set(jnp.nan).at[3, 2].set(jnp.inf)
    got = quantize(w, bits=bits).dequantized(jnp.float32)
    assert jnp.all(got[:, 0] == 0), "scales that are flushed to zero"
    assert jnp.all(jnp.isnan(got[:, 1:3])), "not finite is not hidden"
    assert jnp.all(jnp.isfinite(got[:, 3:]))


@pytest.mark.parametrize(
    ("changed", "error", "words"),
    [
        ({"w": jnp.ones((128, 64))}, TypeError, "`quantize` makes one"),
        ({"w": replace(quantize(weights()), bits=4)}, ValueError, r"of int4, got uint8\[64, 128\]"),
        (
            {"w": replace(quantize(weights()), values=jnp.ones((64, 120), jnp.uint8))},
            ValueError,
            "16 features, got 120",
        ),
        (
            {"w": replace(quantize(weights()), group_size=64)},
            ValueError,
            r"w.scales must be float32\[2, 64\].* got float32\[1, 64\]",
        ),
        ({"w": replace(quantize(weights()), scales=jnp.ones((1, 64), jnp.bfloat16))}, ValueError, r"bfloat16\[1, 64\]"),
        ({"w": replace(quantize(weights()), bits=5)}, ValueError, "of 8 or 4 bits"),
        ({"w": replace(quantize(weights()), group_size=0)}, ValueError, "64 or 128 features, got 8 and 0"),
        ({"x": jnp.ones((4, 64), jnp.bfloat16)}, ValueError, r"features of x \(4, 64\), got \(128, 64\)"),
        ({"x": jnp.ones((4, 128), jnp.int32)}, TypeError, "x must be floating"),
        ({"bias": jnp.ones(63)}, ValueError, r"\(64,\), got \(63,\)"),
        ({"residual": jnp.ones((4, 64))}, ValueError, r"bfloat16\[4, 64\], got float32\[4, 64\]"),
        ({"activation": "gelu_tan"}, ValueError, "Did you mean 'gelu_tanh'"),
    ],
)
def test_errors_say_what_is_wrong(changed, error, words):
    with pytest.raises(error, match=words):
        quantized_linear(**{"x": jnp.ones((4, 128), jnp.bfloat16), "w": quantize(weights()), **changed})


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"w": jnp.ones((128, 64), jnp.int8)}, TypeError, "floating, got int8"),
        ({"w": jnp.ones(128)}, ValueError, r"got shape \(128,\)"),
        ({"bits": 5}, ValueError, "8 or 4, got 5"),
        ({"bits": 8.0}, TypeError, "bits must be an integer, got 8.0"),
        ({"group_size": 64.0}, TypeError, "group_size must be an integer, got 64.0"),
        ({"group_size": 32}, ValueError, "None, 64 or 128 and divide the 128 features, got 32"),
    ],
)
def test_errors_of_quantize(arguments, error, words):
    with pytest.raises(error, match=words):
        quantize(**{"w": weights(), **arguments})
