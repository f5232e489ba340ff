"""The embedding bag: its definition, and indices out of range."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from draws import normal

from pallas_kernels import embedding_bag

TABLE = jnp.arange(1.0, 5.0)[:, None] * jnp.array([1.0, 10.0])


def test_known_values():
    indices = jnp.array([[0, 1, 1], [3, 3, 2]])
    np.testing.assert_array_equal(embedding_bag(TABLE, indices), [[5, 50], [11, 110]])
    np.testing.assert_allclose(embedding_bag(TABLE, indices, mode="mean"), np.array([[5, 50], [11, 110]]) / 3)
    weights = jnp.array([[1.0, 0.5, 0], [0, 0, 2]])
    np.testing.assert_array_equal(embedding_bag(TABLE, indices, weights=weights), [[2, 20], [6, 60]])


def test_indices_out_of_range(seed):
    """Negative ones count from the end; others make their bag NaN, and only that, and have no gradient."""
    table = normal(seed, (4, 128))
    indices = jnp.array([[0, -1], [1, 4], [-4, 2], [-5, 0], [3, 2**31 - 1], [-(2**31), 3]])

    def total(table):
        y = embedding_bag(table, indices)
        return jnp.sum(jnp.where(jnp.isnan(y), 0, y)), y

    gradient, y = jax.grad(total, has_aux=True)(table)
    np.testing.assert_allclose(y[0], table[0] + table[3], rtol=1e-6, err_msg=f"seed={seed}")
    np.testing.assert_allclose(y[2], table[0] + table[2], rtol=1e-6, err_msg=f"seed={seed}")
    assert np.isnan(y[jnp.array([1, 3, 4, 5])]).all()
    np.testing.assert_array_equal(gradient, np.tile([[2.0], [0], [1], [1]], (1, 128)))


@pytest.mark.parametrize("dtype", ["int8", "uint8", "uint32", "int64", "uint64"])
def test_indices_of_any_integer_dtype(dtype):
    """Of 8 bits for a table of 300 rows; of more than int32 holds, which are out of range as others are."""
    with jax.enable_x64(True):
        most = jnp.iinfo(dtype).max
        indices = jnp.array([[0, 3], [2, 100]], dtype)
        table = jnp.arange(300.0, dtype="float32")[:, None]
        np.testing.assert_array_equal(embedding_bag(table, indices), [[3], [102]])
        if most > 300:
            assert np.isnan(embedding_bag(table, jnp.array([[most, 0], [2**31, 0]], dtype))).all()
        if jnp.iinfo(dtype).min < 0:
            np.testing.assert_array_equal(embedding_bag(table, jnp.array([-1], dtype)), [299])
        if dtype == "int64":
            assert np.isnan(embedding_bag(table, jnp.array([[2**32 + 1], [-(2**32)]], dtype))).all()


def test_sums_are_float32(seed):
    """Sums of 512 and 1024 ones; in bfloat16 they would stop at 256."""
    table, indices = jnp.ones((2, 128), jnp.bfloat16), jnp.zeros((2, 512), jnp.int32)
    y, pullback = jax.vjp(lambda table: embedding_bag(table, indices), table)
    np.testing.assert_array_equal(y.astype(jnp.float32)[:, 0], [512, 512])
    (gradient,) = pullback(jnp.ones_like(y))
    np.testing.assert_array_equal(gradient.astype(jnp.float32)[:, 0], [1024, 0])


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"indices": jnp.ones((2, 3))}, TypeError, "indices must be integers, got float32"),
        ({"indices": jnp.int32(1)}, ValueError, r"indices must be \(..., bag\), got a scalar"),
        ({"table": jnp.ones((0, 2))}, ValueError, r"with a row, got \(0, 2\)"),
        ({"table": jnp.ones((4, 2), "int32")}, TypeError, "table must be floating, got int32"),
        ({"weights": jnp.ones(3)}, ValueError, r"the shape of indices, \(2, 3\), got \(3,\)"),
        ({"weights": jnp.ones((2, 3), "int32")}, TypeError, "weights must be floating, got int32"),
        ({"weights": jnp.ones((2, 3)), "mode": "mean"}, ValueError, "divide them by their sum"),
        ({"mode": "max"}, ValueError, "mode must be one of 'sum', 'mean', got 'max'"),
    ],
)
def test_arguments_that_do_not_belong_together(arguments, error, message):
    with pytest.raises(error, match=message):
        embedding_bag(**{"table": TABLE, "indices": jnp.zeros((2, 3), jnp.int32), **arguments})


def test_there_is_no_kernel():
    with pytest.raises(NotImplementedError, match="none of that name, only 'xla'"):
        embedding_bag(TABLE, jnp.zeros((2, 3), jnp.int32), implementation="mosaic")
