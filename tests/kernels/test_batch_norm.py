"""What is particular to batch normalisation: statistics far from zero, and their cotangents."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from draws import normal

from pallas_kernels import batch_norm
from pallas_kernels.ops.batch_norm.columns import BatchNormConfig, RowSplit
from pallas_kernels.ops.batch_norm.mosaic_gpu import batch_norm_backward, batch_norm_forward
from pallas_kernels.ops.batch_norm.reference import batch_norm_reference

CONFIG = BatchNormConfig(rows=2, warpgroups=2, apply_rows=2)


def test_known_values():
    y, mean, variance = batch_norm(jnp.array([[1.0], [3.0]]), jnp.array([2.0]), jnp.array([5.0]), epsilon=3.0)
    np.testing.assert_allclose(y, [[4.0], [6.0]])
    np.testing.assert_allclose((mean[0], variance[0]), (2.0, 1.0))


@pytest.mark.usefixtures("interpreter")
def test_nothing_cancels_far_from_zero(seed):
    """Sums of squares of values around 4000 would leave no digit of a variance of 1e-4."""
    x = 4000.0 + 0.01 * normal(seed, (24, 128))
    _, mean, variance = batch_norm_forward(x, jnp.ones(128), jnp.zeros(128), epsilon=1e-5, config=CONFIG)
    exact = np.asarray(x, np.float64)
    np.testing.assert_allclose(mean, exact.mean(0), rtol=2e-7, err_msg=f"seed={seed}")
    np.testing.assert_allclose(variance, exact.var(0), rtol=1e-5, err_msg=f"seed={seed}")


@pytest.mark.usefixtures("interpreter")
def test_mean_is_rounded_at_its_own_size(seed):
    """And not at that of the first rows, from which sums are counted."""
    x = normal(seed, (24, 128), jnp.bfloat16).at[:8].add(16)
    x = x.at[8:].add(-8)
    _, mean, _ = batch_norm_forward(x, jnp.ones(128), jnp.zeros(128), epsilon=1e-5, config=CONFIG)
    np.testing.assert_allclose(mean, np.asarray(x, np.float64).mean(0), rtol=2**-23, atol=2e-8, err_msg=f"seed={seed}")


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_columns_with_infinities(seed, dtype):
    """As jnp.mean has them, wherever they are; every other column is what it would be without them."""
    x = normal(seed, (23, 128), dtype)
    inf = jnp.inf
    # In the first row, in the rows whose mean sums are counted from, in the last one; of both signs; with a NaN.
    places = ((0, 0, inf), (3, 1, -inf), (22, 2, inf), (0, 3, inf), (1, 3, -inf), (15, 4, inf), (5, 5, jnp.nan))
    with_them = x.at[[p[0] for p in places], [p[1] for p in places]].set(jnp.asarray([p[2] for p in places], dtype))
    one, zero = jnp.ones(128), jnp.zeros(128)
    y, mean, variance = batch_norm_forward(with_them, one, zero, epsilon=1e-5, config=CONFIG)
    np.testing.assert_array_equal(mean[:6], [inf, -inf, inf, jnp.nan, inf, jnp.nan], err_msg=f"seed={seed}")
    assert np.isnan(variance[:6]).all() and np.isnan(np.asarray(y[:, :6], np.float32)).all()
    for got, want in zip(
        (y[:, 6:], mean[6:], variance[6:]),
        batch_norm_forward(x, one, zero, epsilon=1e-5, config=CONFIG),
        strict=True,
    ):
        np.testing.assert_array_equal(got, want[..., 6:], err_msg=f"seed={seed}")


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("row", [0, 22])
def test_squares_of_huge_values_are_infinite(seed, row):
    """And the variance with them: nothing is NaN, as in the definition."""
    x = normal(seed, (40, 128)).at[row].set(3e38)
    one, zero = jnp.ones(128), jnp.zeros(128)
    got = batch_norm_forward(x, one, zero, epsilon=1e-5)
    for value, want in zip(got, batch_norm_reference(x, one, zero), strict=True):
        np.testing.assert_allclose(value, want, rtol=1e-6, err_msg=f"seed={seed}")


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("rows", [40, 33])
def test_groups_of_unlike_size(seed, rows):
    """Values and gradients; some warpgroups have no rows."""
    x, dy = (normal(seed + i, (rows, 130)) for i in range(2))
    scale, bias = jnp.linspace(0.5, 2, 130), jnp.linspace(-1, 1, 130)
    config = BatchNormConfig(rows=1, warpgroups=4, blocks_per_core=6, apply_rows=1)
    y, mean, variance = batch_norm_forward(x, scale, bias, epsilon=1e-5, config=config)
    gradients = batch_norm_backward(x, scale, mean, variance, dy, None, None, epsilon=1e-5, config=config)
    expected, pullback = jax.vjp(lambda *arguments: batch_norm_reference(*arguments)[0], x, scale, bias)
    np.testing.assert_allclose(y, expected, atol=2e-6, err_msg=f"seed={seed}")
    for value, want in zip(gradients, pullback(dy), strict=True):
        np.testing.assert_allclose(value, want, atol=2e-5, err_msg=f"seed={seed}")


@pytest.mark.parametrize(("rows", "at_once", "groups", "lanes"), [(36, 2, 3, 2), (5, 1, 4, 1), (7, 1, 2, 4)])
def test_every_row_is_taken_once(rows, at_once, groups, lanes):
    split = RowSplit(units=rows // at_once, at_once=at_once, groups=groups, lanes=lanes)
    taken, counts = [], []
    for group in range(groups):
        units = [split.unit(group, lane, i) for lane in range(lanes) for i in range(int(split.trips(group, lane)))]
        taken += units
        counts.append(len(units) * at_once)
        assert split.count(jnp.int32(group)) == counts[-1]
    assert sorted(taken) == list(range(split.units))
    assert sum(counts) == rows


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize(("rows", "has_kernel"), [(64, False), (65, True)])
def test_few_rows_are_xla_s(rows, has_kernel):
    arguments = jnp.ones((rows, 128)), jnp.ones(128), jnp.ones(128)
    assert ("gmem" in str(jax.make_jaxpr(batch_norm)(*arguments))) == has_kernel


@pytest.mark.usefixtures("interpreter")
def test_mean_and_variance_have_gradients(seed):
    x = normal(seed, (5, 128))
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
