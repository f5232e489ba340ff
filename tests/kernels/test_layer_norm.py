"""What is particular to LayerNorm."""

from __future__ import annotations

import itertools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from draws import normal

from pallas_kernels import layer_norm
from pallas_kernels.ops.norms.backward import norm_backward
from pallas_kernels.ops.norms.config import BackwardConfig, BackwardShape, reads_ahead
from pallas_kernels.ops.norms.forward import norm_forward
from pallas_kernels.ops.norms.norm import StaticNorm
from pallas_kernels.ops.norms.reference import layer_norm_reference

NORM = StaticNorm(name="layer_norm", epsilon=1e-6)


def rows(seed, count, features, dtype="float32"):
    return normal(seed, (count, features)).astype(dtype)


def statistics_of(x):
    statistics = norm_forward(NORM, x, with_statistics=True)[2]
    assert statistics is not None
    return statistics


def as_float32(*arrays):
    return tuple(np.asarray(array, np.float32) for array in arrays)


def test_known_values():
    x, residual = jnp.array([[1.0, 2.0]]), jnp.array([[1.0, 4.0]])
    y, total = layer_norm(x, jnp.array([1.0, 10.0]), jnp.array([0.5, 0.0]), residual=residual, epsilon=0.75)
    np.testing.assert_allclose(total, [[2.0, 6.0]])
    np.testing.assert_allclose(y, [[0.5 - 2 / 4.75**0.5, 20 / 4.75**0.5]], rtol=1e-6)


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("features", [512, 516])
def test_a_large_mean_costs_no_digits(seed, features):
    """Both kernels, on rows whose mean is 1e5 deviations: plain float32 statistics have two or three digits there."""
    noise = rows(seed, 3, features)
    x = 1e5 + noise
    noise = x - 1e5  # exact
    dy = rows(seed + 1, 3, features)
    run = lambda x: layer_norm(x, implementation="mosaic")  # noqa: E731
    y, pullback = jax.vjp(run, x)
    expected, expected_pullback = jax.vjp(layer_norm_reference, noise)
    np.testing.assert_allclose(y, expected, atol=1e-5, err_msg=f"seed={seed}")
    np.testing.assert_allclose(pullback(dy)[0], expected_pullback(dy)[0], atol=1e-5, err_msg=f"seed={seed}")


@pytest.mark.usefixtures("interpreter")
def test_all_backward_configurations_agree(seed):
    x, dy = rows(seed, 3, 512), rows(seed + 1, 3, 512)
    scale, bias = 1 + 0.1 * rows(seed + 3, 2, 512)
    expected = jax.vjp(layer_norm_reference, x, scale, bias)[1](dy)
    configs = [BackwardConfig(warpgroups=w, blocks_per_core=1, steps=2) for w in (2, 4)]
    configs += [BackwardConfig(blocks_per_core=1, steps=2)]
    for config in configs:
        got = norm_backward(NORM, x, statistics_of(x), dy, scale=scale, bias=bias, config=config)
        assert got.dscale is not None and got.dbias is not None
        for a, b in zip((got.dtotal, got.dscale, got.dbias), expected, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4, err_msg=f"{config} seed={seed}")


@pytest.mark.usefixtures("interpreter")
def test_x_is_returned_for_the_residual_stream(seed):
    x, scale, bias = rows(seed, 3, 256), rows(seed + 1, 1, 256)[0], rows(seed + 2, 1, 256)[0]

    def layer(x, scale, bias, implementation):
        y, stream = layer_norm(x, scale, bias, returns_total=True, implementation=implementation)
        return jnp.sum(jnp.sin(y) * jnp.cos(stream))

    got, expected = (jax.grad(layer, (0, 1, 2))(x, scale, bias, each) for each in ("mosaic", "xla"))
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5, err_msg=f"seed={seed}")


@pytest.mark.parametrize(
    ("rows", "features", "itemsize", "expected"),
    [(66, 4096, 2, True), (67, 4096, 2, False), (21, 13056, 2, False), (21, 4095, 2, False)],
)
def test_scale_and_bias_are_read_ahead(rows, features, itemsize, expected):
    """With rows for at most half the multiprocessors, and wide accesses, if they fit."""
    assert reads_ahead(rows, features, itemsize, gain_bytes=2 * itemsize, cores=132) == expected


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("has_residual", [False, True])
def test_all_forward_configurations_agree(seed, has_residual):
    x, residual = rows(seed, 4, 1024, "bfloat16"), rows(seed + 1, 4, 1024, "bfloat16")
    scale, bias = 1 + 0.1 * rows(seed + 3, 2, 1024)
    residual = residual if has_residual else None
    total = x if residual is None else x + residual
    expected = layer_norm_reference(total, scale, bias)
    for is_ahead in (False, True):
        y, got_total, _ = norm_forward(NORM, x, scale=scale, bias=bias, residual=residual, is_ahead=is_ahead)
        # One step of bfloat16: sums in another order may round a value the other way.
        np.testing.assert_allclose(*as_float32(y, expected), rtol=2**-7, atol=1e-3, err_msg=f"{is_ahead} {seed}")
        assert (got_total is None) == (residual is None)
        if got_total is not None:
            np.testing.assert_array_equal(*as_float32(got_total, total), err_msg=f"{is_ahead} {seed}")


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize(("count", "features"), [(5, 1027), (300, 200)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_statistics_are_the_reciprocal_deviation_and_the_mean(seed, count, features, dtype):
    x = (100 + rows(seed, count, features)).astype(dtype)
    exact = np.asarray(x, np.float64)
    inverse, *means = statistics_of(x)
    assert len(means) == (2 if dtype == "float32" else 1)
    np.testing.assert_allclose(inverse, 1 / np.sqrt(exact.var(1) + 1e-6), rtol=1e-5, err_msg=f"seed={seed}")
    np.testing.assert_allclose(sum(np.float64(m) for m in means), exact.mean(1), rtol=1e-6, err_msg=f"seed={seed}")


@pytest.mark.usefixtures("interpreter")
def test_rows_of_16_bits_far_from_their_mean(seed):
    """One value may be far from all others, or all values may be the same."""
    x = rows(seed, 7, 512)
    x = x.at[0, 0].set(1e4)  # the first value is far from everything else
    x = x.at[1, 100].set(1e4)
    x = x.at[2].add(300.0)
    x = x.at[3].set(-7.0)
    x = x.at[4].multiply(1e-3).at[4, 0].set(100.0)
    x, dy = x.astype("bfloat16"), rows(seed + 1, 7, 512, "bfloat16")
    scale, bias = (1 + 0.1 * rows(seed + 3, 2, 512)).astype("bfloat16")
    exact = [np.asarray(a, np.float64) for a in (x, dy, scale)]
    centered = exact[0] - exact[0].mean(-1, keepdims=True)
    inverse = 1 / np.sqrt((centered**2).mean(-1, keepdims=True) + 1e-6)
    normed, weighted = centered * inverse, exact[1] * exact[2]
    products = (normed * weighted).mean(-1, keepdims=True)
    dx = (weighted - weighted.mean(-1, keepdims=True) - normed * products) * inverse
    config = BackwardConfig(warpgroups=2, blocks_per_core=1, steps=2)
    got = norm_backward(NORM, x, statistics_of(x), dy, scale=scale, bias=bias, config=config)
    assert got.dscale is not None and got.dbias is not None
    # Within half a step of bfloat16 and what float32 sums lose.
    norm_of_rows = np.abs(dx).max(-1, keepdims=True)
    assert np.all(np.abs(np.float64(got.dtotal) - dx) <= 2**-8 * np.abs(dx) + 2e-4 * norm_of_rows), f"seed={seed}"
    dscale, dbias = (exact[1] * normed).sum(0), exact[1].sum(0)
    np.testing.assert_allclose(np.float64(got.dscale), dscale, rtol=2**-8, atol=1e-3, err_msg=f"seed={seed}")
    np.testing.assert_allclose(np.float64(got.dbias), dbias, rtol=2**-8, atol=1e-5, err_msg=f"seed={seed}")


@pytest.mark.parametrize("sums", [0, 1, 2])
@pytest.mark.parametrize("features", [128, 1000, 1024, 1152, 4096, 8192, 16384, 65536])
def test_defaults_fit_in_shared_memory(features, sums):
    for itemsize in (2, 4):
        for streams in (2, 3):
            for centered, has_dropout in itertools.product((False, True), repeat=2):
                config = BackwardShape(
                    rows=3,
                    features=features,
                    itemsize=itemsize,
                    streams=streams,
                    gain_bytes=4,
                    sums=sums,
                    has_dropout=has_dropout,
                    centered=centered,
                ).default()
                if config is not None:
                    block_bytes = config.steps * streams * features * itemsize + features * 4 + 1024
                    assert config.blocks_per_core * block_bytes <= 228 * 1024


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize(("features", "dtype"), [(8200, "float32"), (1027, "bfloat16")])
def test_a_gradient_is_xla_s_where_its_kernel_is_missing(seed, features, dtype):
    x, residual = rows(seed, 4, features).astype(dtype), rows(seed + 1, 4, features).astype(dtype)
    scale = jnp.ones(features, dtype)

    def loss(x, implementation=None):
        pair = layer_norm(x, scale, residual=residual, implementation=implementation)
        return sum(jnp.sum(jnp.sin(a.astype(jnp.float32))) for a in pair)

    assert str(jax.make_jaxpr(jax.grad(loss))(x)).count("mpmd_map[") == 1, "only the forward pass has a kernel"
    got, expected = as_float32(jax.grad(loss)(x), jax.grad(loss)(x, "xla"))
    tolerance = 4 * float(jnp.finfo(dtype).eps)
    np.testing.assert_allclose(got, expected, rtol=1e-5 + tolerance, atol=1e-5 + tolerance, err_msg=f"seed={seed}")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"bias": jnp.ones(255)}, r"layer_norm: bias must be \(256,\).*got \(255,\)"),
        ({"scale": jnp.ones((1, 256))}, r"scale must be \(256,\)"),
        ({"residual": jnp.ones((256,))}, r"like x, float32\[2, 256\]"),
    ],
)
def test_arguments_that_do_not_belong_together(arguments, message):
    with pytest.raises(ValueError, match=message):
        layer_norm(jnp.ones((2, 256)), **arguments)


@pytest.mark.parametrize(
    ("features", "centered", "taken"),
    [(1024, False, (1, 3, 4)), (2048, True, (2, 2, 3)), (4096, False, (4, 2, 2)), (4096, True, (2, 2, 2)),
     (6144, False, (2, 2, 2))],
)  # fmt: skip
def test_few_rows_are_in_flight_without_a_residual(features, centered, taken):
    """(warpgroups, blocks, stages), as measured: TUNING.md."""
    shape = BackwardShape(
        rows=8192, features=features, itemsize=2, streams=2, gain_bytes=2, sums=1 + centered, centered=centered
    )
    config = shape.default()
    assert config is not None
    assert (config.warpgroups, config.blocks_per_core, config.steps) == taken
    with_residual = replace(shape, streams=3).default()
    assert with_residual is not None
    assert with_residual.steps >= config.steps
