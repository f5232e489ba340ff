"""What is particular to the bias and activation: the bias's gradient, and dropout."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from draws import normal

from pallas_kernels import bias_activation
from pallas_kernels.ops.bias_activation.api import is_best_by_xla
from pallas_kernels.ops.bias_activation.mosaic_gpu_vjp import ColumnSumConfig, bias_activation_backward
from pallas_kernels.primitives.activations import ACTIVATIONS
from pallas_kernels.primitives.elementwise import FOLD_FROM, accesses_a_value, folded_rows


def test_known_values():
    y = bias_activation(jnp.array([[-3.0, 1.0]]), jnp.array([1.0, 1.0]), activation="relu", residual=jnp.ones((1, 2)))
    np.testing.assert_allclose(y, [[1.0, 3.0]])


@pytest.mark.parametrize(
    ("shape", "dtype", "by_xla"),
    [((16384, 64), "float32", False), ((16376, 64), "float32", True), ((7553, 136), "float32", True),
     ((4096, 136), "float32", True), ((4095, 136), "float32", False), ((4096, 192), "float32", True),
     ((4096, 200), "float32", False), ((7553, 136), "bfloat16", False), ((8192, 136), "float32", False)],
)  # fmt: skip
def test_where_xla_is_best(shape, dtype, by_xla):
    x: Any = jax.ShapeDtypeStruct(shape, dtype)
    bias: Any = jax.ShapeDtypeStruct(shape[1:], dtype)
    assert is_best_by_xla(x, bias, "gelu") == by_xla
    assert is_best_by_xla(x, bias, "relu") == (shape[1] <= 192)
    assert not is_best_by_xla(x, None, "relu")
    assert not is_best_by_xla(x, bias, "relu", is_plain=False)


@pytest.mark.usefixtures("interpreter")
def test_of_short_rows_the_forward_pass_is_xla_s(seed):
    x, residual = (normal(seed + i, (5, 128), "bfloat16") for i in range(2))
    bias = normal(seed + 2, (128,))

    def loss(x, bias, residual, implementation=None):
        y = bias_activation(x, bias, activation="silu", residual=residual, implementation=implementation)
        return jnp.sum(jnp.sin(y.astype(jnp.float32)))

    gradient = jax.grad(loss, argnums=(0, 1, 2))
    launches = [str(jax.make_jaxpr(f)(x, bias, residual)).count("mpmd_map[") for f in (loss, gradient)]
    assert launches == [0, 1]
    for got, expected in zip(*(gradient(x, bias, residual, name) for name in (None, "xla")), strict=True):
        got, expected = (np.asarray(each, np.float32) for each in (got, expected))
        np.testing.assert_allclose(got, expected, rtol=0.02, atol=0.02, err_msg=f"seed={seed}")


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("rate", [0.25, 0.0])
def test_dropout_is_the_same_forward_and_backward_on_every_implementation(seed, rate):
    x = 1 + jnp.abs(normal(seed, (3, 260)))
    key = jax.random.key(seed + 1)
    results = {}
    for implementation in ("mosaic", "xla"):

        def run(x, bias, implementation=implementation):
            return bias_activation(
                x, bias, activation="relu", dropout_rate=rate, dropout_key=key, implementation=implementation
            )

        y, pullback = jax.vjp(run, x, jnp.zeros(260))
        dx, dbias = pullback(jnp.ones_like(y))
        np.testing.assert_array_equal(dx != 0, y != 0)
        np.testing.assert_allclose(dx[dx != 0], 1 / (1 - rate), rtol=1e-6)
        np.testing.assert_allclose(dbias, dx.sum(0), rtol=1e-6)
        results[implementation] = y
    np.testing.assert_allclose(results["mosaic"], results["xla"], rtol=1e-6, err_msg=f"seed={seed}")
    assert float(jnp.mean(results["mosaic"] == 0)) == pytest.approx(rate, abs=0.1)


@pytest.mark.parametrize("features", [1, 100, 127, 128, 1000, 1001, 1024, 1152, 4097])
@pytest.mark.parametrize("rows", [1, 6, 2048, 2**18])
@pytest.mark.parametrize("itemsize", [2, 4])
def test_folded_rows_fit_and_need_fewer_accesses(rows, features, itemsize):
    times = folded_rows(rows, features, itemsize)
    assert rows % times == 0 and times * features <= 2**17
    if features >= 128:
        before, after = (accesses_a_value(n * features, itemsize) for n in (1, times))
        assert times == 1 or FOLD_FROM * after < before
        if itemsize == 2 and features % 2 and rows == 2**18:
            assert after < 0.25
    elif times == 1:
        assert rows & -rows < 128 / features  # no power of two makes it fit


def test_dropout_needs_a_key_and_a_rate():
    with pytest.raises(ValueError, match=r"pass dropout_key=jax.random.key"):
        bias_activation(jnp.ones((2, 4)), None, dropout_rate=0.5)
    with pytest.raises(ValueError, match=r"0 <= rate < 1, got 1\.5"):
        bias_activation(jnp.ones((2, 4)), None, dropout_rate=1.5, dropout_key=jax.random.key(0))
    with pytest.raises(ValueError, match=r"shape \(4,\), got \(3,\)"):
        bias_activation(jnp.ones((2, 4)), jnp.ones(3))


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("config", [ColumnSumConfig(warpgroups=2), ColumnSumConfig(warpgroups=1, blocks_per_core=2)])
def test_all_backward_configurations_agree(seed, config):
    x, dy = normal(seed, (2, 10, 512))
    bias = normal(seed + 1, (512,))
    gelu = ACTIVATIONS["gelu_tanh"]
    got = bias_activation_backward(x, bias, None, dy, activation=gelu, config=config)
    with jax.enable_x64(True):  # float32 tanh of the CPU makes the reference the less exact one
        wide = [np.asarray(each, np.float64) for each in (x, bias, dy)]
        expected = jax.device_get(jax.vjp(lambda x, bias: gelu.reference(x + bias), *wide[:2])[1](wide[2]))
    for a, b in zip(jax.tree.leaves(got), expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5, err_msg=f"{config} seed={seed}")
