"""What the shared base cannot say of the linear layer."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from draws import normal

from pallas_kernels import linear
from pallas_kernels.ops.linear.reference import linear_reference


def arrays(rows=8, features=64, outputs=128, dtype=jnp.bfloat16):
    x = normal(0, (rows, features), dtype)
    w = normal(1, (features, outputs), dtype)
    return x, w


def test_without_a_gpu_none_is_xla():
    x, w = arrays()
    np.testing.assert_array_equal(linear(x, w), linear(x, w, implementation="xla"))
    with pytest.raises(NotImplementedError, match="Hopper"):
        linear(x, w, implementation="mosaic")


@pytest.mark.parametrize(
    ("changed", "error", "words"),
    [
        ({"w": jnp.ones((65, 128), jnp.bfloat16)}, ValueError, r"features of x \(8, 64\), got \(65, 128\)"),
        ({"w": jnp.ones((64, 128), jnp.float16)}, TypeError, "x's dtype bfloat16, got float16"),
        ({"bias": jnp.ones(127, jnp.bfloat16)}, ValueError, r"shape \(128,\), got \(127,\)"),
        ({"bias": jnp.ones(128, jnp.int32)}, TypeError, "bias must be floating, got int32"),
        ({"residual": jnp.ones((8, 128), jnp.float32)}, ValueError, r"bfloat16\[8, 128\], got float32\[8, 128\]"),
        ({"x": jnp.ones((), jnp.bfloat16)}, ValueError, "x must have a features axis, got a scalar"),
        ({"out_dtype": jnp.int8}, TypeError, "out_dtype must be floating, got int8"),
        ({"activation": "gelu_tan"}, ValueError, "Did you mean 'gelu_tanh'"),
        ({"implementation": "mosiac"}, ValueError, "Did you mean 'mosaic'"),
    ],
)
def test_errors_say_what_is_wrong(changed, error, words):
    x, w = arrays()
    with pytest.raises(error, match=words):
        linear(**{"x": x, "w": w, **changed})


@pytest.mark.parametrize(
    ("shape", "words"), [((96, 128), "multiples of 64"), ((64, 64), "at least 128 outputs"), ((64, 96), "multiples")]
)
@pytest.mark.usefixtures("interpreter")
def test_sizes_that_the_kernel_refuses(shape, words):
    x, w = arrays(features=shape[0], outputs=shape[1])
    with pytest.raises(NotImplementedError, match=words):
        linear(x, w, implementation="mosaic")
    np.testing.assert_array_equal(linear(x, w), linear(x, w, implementation="xla"))


@pytest.mark.usefixtures("interpreter")
def test_float32_operands_are_refused():
    x, w = arrays(dtype=jnp.float32)
    with pytest.raises(NotImplementedError, match="x is float32, the kernels take bfloat16, float16"):
        linear(x, w, implementation="mosaic")
    np.testing.assert_array_equal(linear(x, w), linear(x, w, implementation="xla"))


@pytest.mark.usefixtures("interpreter")
def test_float32_results_are_not_rounded_on_the_way():
    x, w = arrays(rows=8)
    y = linear(x, w, out_dtype=jnp.float32, implementation="mosaic")
    exact = np.asarray(x, np.float64) @ np.asarray(w, np.float64)
    assert y.dtype == jnp.float32
    np.testing.assert_allclose(y, exact, atol=1e-5 * np.abs(exact).max())


@pytest.mark.usefixtures("interpreter")
def test_gradients_of_float32_results_are_those_of_xla():
    x, w = arrays(rows=8)
    dy = normal(2, (8, 128))

    def gradients(implementation):
        def forward(x, w):
            return linear(x, w, activation="silu", out_dtype=jnp.float32, implementation=implementation)

        return jax.vjp(forward, x, w)[1](dy)

    for got, expected in zip(gradients("mosaic"), gradients("xla"), strict=True):
        np.testing.assert_array_equal(got, expected)


def test_reference_of_a_plain_product():
    x, w = arrays()
    np.testing.assert_array_equal(linear_reference(x, w), x @ w)
