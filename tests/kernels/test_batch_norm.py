"""What is particular to batch normalisation: statistics far from zero, and their cotangents."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import batch_norm
from pallas_kernels.ops.batch_norm.config import BatchNormConfig
from pallas_kernels.ops.batch_norm.mosaic_gpu import batch_norm_forward


def test_known_values():
    y, mean, variance = batch_norm(jnp.array([[1.0], [3.0]]), jnp.array([2.0]), jnp.array([5.0]), epsilon=3.0)
    np.testing.assert_allclose(y, [[4.0], [6.0]])
    np.testing.assert_allclose((mean[0], variance[0]), (2.0, 1.0))


@pytest.mark.usefixtures("interpreter")
def test_nothing_cancels_far_from_zero(seed):
    """Sums of squares of values around 4000 would leave no digit of a variance of 1e-4."""
    x = 4000.0 + 0.01 * jax.random.normal(jax.random.key(seed), (12, 128))
    config = BatchNormConfig(rows=2, warpgroups=2, apply_rows=2)
    _, mean, variance = batch_norm_forward(x, jnp.ones(128), jnp.zeros(128), epsilon=1e-5, config=config)
    exact = np.asarray(x, np.float64)
    np.testing.assert_allclose(mean, exact.mean(0), rtol=2e-7, err_msg=f"seed={seed}")
    np.testing.assert_allclose(variance, exact.var(0), rtol=1e-5, err_msg=f"seed={seed}")


@pytest.mark.usefixtures("interpreter")
def test_mean_and_variance_have_gradients(seed):
    x = jax.random.normal(jax.random.key(seed), (5, 128))
    scale = bias = jnp.ones(128)

    def loss(x, implementation):
        y, mean, variance = batch_norm(x, scale, bias, implementation=implementation)
        return jnp.sum(jnp.sin(y)) + jnp.sum(mean**2) + jnp.sum(jnp.cos(variance))

    got, expected = (jax.grad(loss)(x, implementation) for implementation in ("mosaic", "xla"))
    np.testing.assert_allclose(got, expected, rtol=1e-3, atol=1e-5, err_msg=f"seed={seed}")


@pytest.mark.parametrize(
    ("x", "scale", "message"),
    [(jnp.ones(4), jnp.ones(4), "leading axis"), (jnp.ones((2, 4)), jnp.ones(3), r"scale must be \(4,\)")],
)
def test_arguments_that_do_not_belong_together(x, scale, message):
    with pytest.raises(ValueError, match=message):
        batch_norm(x, scale, jnp.ones(4))
