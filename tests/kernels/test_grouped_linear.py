"""Products of groups: which rows belong to which group is data."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import grouped_gated_linear, grouped_linear
from pallas_kernels.primitives.gemm.grouped import schedule_of

ROWS, FEATURES, OUTPUTS = 200, 128, 192
SIZES = {
    "all in one": [0, 200, 0],
    "none": [0, 0, 0],
    "fewer than rows": [70, 0, 33],
    "more than rows": [150, 30, 100],
    "negative": [90, -50, 60],
    "whose sum int32 cannot hold": [50, 2**31 - 1, 2**31 - 1],
    "one row each": [1, 1, 1],
}


def normal(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.bfloat16)


X, W, DY = normal(ROWS, FEATURES), normal(3, FEATURES, OUTPUTS, seed=1) / 8, normal(ROWS, OUTPUTS, seed=2)


def expected(sizes):
    """The result and the gradients, in float64, group by group."""
    x, w, dy = (np.asarray(each, np.float64) for each in (X, W, DY))
    y, dx, dw, first = np.zeros((ROWS, OUTPUTS)), np.zeros_like(x), np.zeros_like(w), 0
    for group, size in enumerate(sizes):
        own = slice(first, min(first + max(size, 0), ROWS))
        y[own], dx[own], dw[group] = x[own] @ w[group], dy[own] @ w[group].T, x[own].T @ dy[own]
        first = own.stop
    return y, dx, dw


@pytest.mark.parametrize("implementation", ["xla", "mosaic"])
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_sizes(sizes, implementation):
    def run(x, w):
        return grouped_linear(x, w, jnp.asarray(sizes), implementation=implementation)

    with plgpu.force_gpu_interpret_mode():
        y, pull_back = jax.vjp(run, X, W)
        found = y, *pull_back(DY)
    for got, want in zip(found, expected(sizes), strict=True):
        np.testing.assert_allclose(np.asarray(got, np.float64), want, atol=0.01 * np.abs(want).max() + 1e-9)


@pytest.mark.parametrize("implementation", ["xla", "mosaic"])
def test_rows_of_no_group_may_hold_anything(implementation):
    sizes = jnp.asarray([70, 0, 33])
    x, dy = (each.at[103:].set(jnp.nan) for each in (X, DY))

    def run(x, w):
        return grouped_linear(x, w, sizes, implementation=implementation)

    with plgpu.force_gpu_interpret_mode():
        y, pull_back = jax.vjp(run, x, W)
        dx, dw = pull_back(dy)
    assert all(bool(jnp.isfinite(each.astype(jnp.float32)).all()) for each in (y, dx, dw))


def test_other_sizes_run_the_same_program():
    traced = []

    @jax.jit
    def run(sizes):
        traced.append(sizes)
        return grouped_linear(X, W, sizes)

    first, second = run(jnp.asarray([100, 60, 40])), run(jnp.asarray([0, 200, 0]))
    assert len(traced) == 1
    assert not jnp.array_equal(first, second)


@pytest.mark.parametrize("tile", [64, 128])
def test_schedule_has_each_row_once(tile):
    for seed in range(20):
        rng = np.random.default_rng(seed)
        rows, groups = int(rng.integers(1, 600)), int(rng.integers(1, 20))
        sizes = rng.integers(-20, 2 * rows // groups + 2, groups)
        *tiles, last = map(np.asarray, schedule_of(jnp.asarray(sizes), rows, tile))
        group, first, end = (each[: last[-1]] for each in tiles)
        found = np.full(rows, -1)
        for g, start, stop in zip(group, first, np.minimum(end, first + tile), strict=True):
            assert (found[start:stop] == -1).all()
            found[start:stop] = g
        want = np.repeat(np.arange(groups), np.maximum(sizes, 0))[:rows]
        np.testing.assert_array_equal(found, np.append(want, np.full(rows - want.size, groups)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": X[None]}, r"x must be \(rows, features\)"),
        ({"w": W[:, :32]}, r"w must be \(groups, features, outputs\) with the features of x"),
        ({"w": W.astype(jnp.float32)}, "w must have x's dtype"),
        ({"group_sizes": jnp.ones(2, jnp.int32)}, "group_sizes must be one size a group"),
        ({"group_sizes": jnp.ones(3)}, "group_sizes must be integers"),
        ({"bias": jnp.ones(OUTPUTS)}, "bias must be floating"),
        ({"activation": "sofmax"}, "unknown activation"),
    ],
)
def test_errors(change, message):
    arguments = {"x": X, "w": W, "group_sizes": jnp.asarray([1, 2, 3]), **change}
    with pytest.raises((TypeError, ValueError), match=message):
        grouped_linear(**arguments)


def test_gate_and_up_have_one_shape():
    with pytest.raises(ValueError, match="w_up must be like w_gate"):
        grouped_gated_linear(X, W, W[..., :64], jnp.asarray([1, 2, 3]))
