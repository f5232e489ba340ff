"""What is particular to the bias and activation: the bias's gradient, and dropout."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from draws import normal

from pallas_kernels import bias_activation, recorded_choices
from pallas_kernels.ops.bias_activation.mosaic_gpu import bias_activation_backward
from pallas_kernels.primitives.activations import ACTIVATIONS


def test_known_values():
    y = bias_activation(jnp.array([[-3.0, 1.0]]), jnp.array([1.0, 1.0]), activation="relu", residual=jnp.ones((1, 2)))
    np.testing.assert_allclose(y, [[1.0, 3.0]])


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize(
    ("features", "dtype", "taken"),
    [(127, "bfloat16", "xla"), (128, "bfloat16", "mosaic"), (192, "float32", "xla"), (193, "float32", "mosaic")],
)
def test_few_columns_take_xla(features, dtype, taken):
    with recorded_choices() as choices:
        jax.eval_shape(bias_activation, jnp.ones((512, features), dtype), jnp.ones(features, dtype))
    assert choices[0].taken == taken


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


def test_dropout_needs_a_key_and_a_rate():
    with pytest.raises(ValueError, match=r"pass dropout_key=jax.random.key"):
        bias_activation(jnp.ones((2, 4)), None, dropout_rate=0.5)
    with pytest.raises(ValueError, match=r"0 <= rate < 1, got 1\.5"):
        bias_activation(jnp.ones((2, 4)), None, dropout_rate=1.5, dropout_key=jax.random.key(0))
    with pytest.raises(ValueError, match=r"must be \(4,\), .* got \(3,\)"):
        bias_activation(jnp.ones((2, 4)), jnp.ones(3))


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("warpgroups", [2, 1])
def test_all_backward_configurations_agree(seed, warpgroups):
    x, dy = normal(seed, (2, 10, 512))
    bias = normal(seed + 1, (512,))
    gelu = ACTIVATIONS["gelu_tanh"]
    got = bias_activation_backward(x, bias, None, dy, activation=gelu, warpgroups=warpgroups)
    with jax.enable_x64(True):  # float32 tanh of the CPU makes the reference the less exact one
        wide = [np.asarray(each, np.float64) for each in (x, bias, dy)]
        expected = jax.device_get(jax.vjp(lambda x, bias: gelu.reference(x + bias), *wide[:2])[1](wide[2]))
    for a, b in zip(jax.tree.leaves(got), expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5, err_msg=f"{warpgroups} seed={seed}")
