"""Products of groups: which rows belong to which group is data."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import grouped_gated_linear, grouped_linear
from pallas_kernels.primitives.gemm.groups import Groups, group_types, padded_sizes

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


@functools.cache
def passes(implementation):
    """Compiles one program for the result and the gradients at all group sizes."""

    @jax.jit
    def run(x, w, sizes, dy):
        y, pull_back = jax.vjp(lambda *own: grouped_linear(*own, sizes, implementation=implementation), x, w)
        return y, *pull_back(dy)

    return run


@pytest.mark.drawn(1 / 3)
@pytest.mark.parametrize("implementation", ["xla", "mosaic"])
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_sizes(sizes, implementation):
    with plgpu.force_gpu_interpret_mode():
        found = jax.block_until_ready(passes(implementation)(X, W, jnp.asarray(sizes), DY))
    for got, want in zip(found, expected(sizes), strict=True):
        np.testing.assert_allclose(np.asarray(got, np.float64), want, atol=0.01 * np.abs(want).max() + 1e-9)


@pytest.mark.parametrize("implementation", ["xla", "mosaic"])
def test_rows_of_no_group_may_hold_anything(implementation):
    x, dy = (each.at[103:].set(jnp.nan) for each in (X, DY))
    with plgpu.force_gpu_interpret_mode():
        found = jax.block_until_ready(passes(implementation)(x, W, jnp.asarray([70, 0, 33]), dy))
    assert all(np.isfinite(np.asarray(each, np.float32)).all() for each in found)


def test_other_sizes_run_the_same_program():
    traced = []

    @jax.jit
    def run(sizes):
        traced.append(sizes)
        return grouped_linear(X, W, sizes)

    first, second = run(jnp.asarray([100, 60, 40])), run(jnp.asarray([0, 200, 0]))
    assert len(traced) == 1
    assert not jnp.array_equal(first, second)


def listed(sizes, rows, tile):
    """The bounds of each group; the group, first row and number of rows of each tile: as a kernel finds them."""
    padded, count = padded_sizes(sizes), sizes.size
    most = -(-rows // tile) + count

    def body(sizes_ref, bounds, tiles, table, is_listed):
        options = {"sizes": sizes_ref, "table": table, "is_listed": is_listed}
        groups = Groups(count=count, rows=rows, tile=tile, **options)
        groups.list()
        plgpu.barrier_wait(is_listed)
        for group in range(count + 1):
            bounds[group, 0], bounds[group, 1] = groups.bounds(group)

        def write(i, _):
            found = groups.tile_at(i)
            for place, value in enumerate((found.group, found.first, found.count)):
                tiles[i, place] = value

        tiles[most, 0] = groups.tiles()
        jax.lax.fori_loop(0, groups.tiles(), write, None)

    out_type = [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((count + 1, 2), (most + 1, 3))]
    return [
        np.asarray(each) for each in plgpu.kernel(body, out_type=out_type, scratch_types=group_types(padded))(padded)
    ]


@pytest.mark.drawn(1 / 2)
@pytest.mark.parametrize("tile", [64, 128])
def test_tiles_have_each_row_once(tile, seed):
    for own in range(seed, seed + 4):
        rng = np.random.default_rng(own)
        rows, groups = int(rng.integers(1, 600)), int(rng.choice([1, 3, 8, 20, 64, 130]))
        sizes = rng.integers(-20, 2 * rows // groups + 2, groups)
        with plgpu.force_gpu_interpret_mode():
            bounds, tiles = listed(jnp.asarray(sizes), rows, tile)
        want = np.repeat(np.arange(groups), np.maximum(sizes, 0))[:rows]
        want = np.append(want, np.full(rows - want.size, groups))
        found = np.full(rows, -1)
        for group, first, count in tiles[: tiles[-1, 0]]:
            assert count <= tile
            assert (found[first : first + count] == -1).all()
            found[first : first + count] = group
        np.testing.assert_array_equal(found, want, err_msg=f"seed={own}")
        np.testing.assert_array_equal(np.diff(bounds)[:, 0], np.bincount(want, minlength=groups + 1))


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


@pytest.mark.drawn(1 / 3)
@pytest.mark.parametrize("implementation", ["xla", "mosaic"])
@pytest.mark.parametrize("which", ["bias_gate", "bias_up", "both"])
def test_gated_biases(which, implementation):
    """In float64, group by group; rows of no group are zero, and add nothing to the biases' gradients."""
    sizes, bias = jnp.asarray([70, 0, 33]), normal(3, OUTPUTS, seed=3)
    names = ("bias_gate", "bias_up") if which == "both" else (which,)
    group = np.repeat(np.arange(4), [70, 0, 33, 97])

    def run(x, *biases):
        given = dict(zip(names, biases, strict=True))
        return grouped_gated_linear(x, W, W, sizes, implementation=implementation, **given)

    @jax.jit
    def both_passes(x, *biases):
        y, pull_back = jax.vjp(run, x, *biases)
        return y, *pull_back(DY)[1:]

    with plgpu.force_gpu_interpret_mode():
        y, *found = jax.block_until_ready(both_passes(X, *[bias] * len(names)))
    x, w, b, dy = (np.asarray(each, np.float64) for each in (X, W, np.pad(np.asarray(bias), ((0, 1), (0, 0))), DY))
    products = np.stack([row @ w[g] if g < 3 else np.zeros(OUTPUTS) for row, g in zip(x, group, strict=True)])
    gate, up = (products + b[group] * (name in names) for name in ("bias_gate", "bias_up"))
    sigmoid = 1 / (1 + np.exp(-gate))
    np.testing.assert_allclose(np.asarray(y, np.float64), gate * sigmoid * up, atol=0.05, rtol=0.02)
    slopes = {"bias_gate": dy * up * sigmoid * (1 + gate * (1 - sigmoid)), "bias_up": dy * gate * sigmoid}
    for name, got in zip(names, found, strict=True):
        want = np.stack([slopes[name][group == g].sum(0) for g in range(3)])
        np.testing.assert_allclose(np.asarray(got, np.float64), want, atol=0.02 * np.abs(want).max())


def test_a_gated_bias_has_the_weights_groups():
    with pytest.raises(ValueError, match="bias_up must be floating"):
        grouped_gated_linear(X, W, W, jnp.asarray([1, 2, 3]), bias_up=jnp.ones(OUTPUTS))
