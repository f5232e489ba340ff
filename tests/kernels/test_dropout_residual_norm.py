"""What is particular to dropout, residual sum and norm."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from draws import normal

from pallas_kernels import dropout_residual_norm, layer_norm, rms_norm
from pallas_kernels.ops.norms.backward import norm_backward
from pallas_kernels.ops.norms.config import BackwardConfig
from pallas_kernels.ops.norms.forward import norm_forward
from pallas_kernels.ops.norms.norm import StaticNorm
from pallas_kernels.primitives.random import array_keep_mask, key_words

KEY = jax.random.key(11)


def rows(seed, count, features, dtype="float32"):
    return normal(seed, (count, features)).astype(dtype)


@pytest.mark.parametrize("implementation", ["mosaic", "xla"])
@pytest.mark.usefixtures("interpreter")
def test_the_sum_is_of_the_kept_and_the_gradient_of_the_dropped_is_zero(implementation, seed):
    x, residual, scale = 4 + rows(seed, 4, 256), rows(seed + 1, 4, 256), 1 + 0.1 * rows(seed, 1, 256)[0]
    keep = np.asarray(array_keep_mask(KEY, x.shape, rate=0.25))

    def run(x, residual):
        return dropout_residual_norm(x, scale, residual=residual, rate=0.25, key=KEY, implementation=implementation)

    (y, total), pullback = jax.vjp(run, x, residual)
    np.testing.assert_allclose(total, np.where(keep, x / 0.75, 0) + residual, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(y, rms_norm(total, scale, implementation="xla"), rtol=1e-5, atol=1e-6)
    dx, dresidual = pullback((rows(seed + 2, 4, 256), rows(seed + 3, 4, 256)))
    np.testing.assert_allclose(dx, np.where(keep, dresidual / 0.75, 0), rtol=1e-5, atol=1e-6)
    assert (dx[~keep] == 0).all() and (dresidual != 0).all()


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_both_implementations_draw_the_same_mask(dtype, seed):
    x, residual = rows(seed, 3, 384, dtype), jnp.zeros((3, 384), dtype)
    run = lambda implementation: dropout_residual_norm(  # noqa: E731
        x, residual=residual, rate=0.5, key=jax.random.key(seed), norm="layer_norm", implementation=implementation
    )[1]
    np.testing.assert_array_equal(np.asarray(run("mosaic"), np.float32), np.asarray(run("xla"), np.float32))


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("norm", ["rms_norm", "layer_norm"])
def test_without_dropout_it_is_the_norm_alone(norm, seed):
    x, residual, scale = rows(seed, 3, 256), rows(seed + 1, 3, 256), 1 + 0.1 * rows(seed, 1, 256)[0]
    got = dropout_residual_norm(x, scale, residual=residual, rate=0.0, key=None, norm=norm, implementation="mosaic")
    expected = (rms_norm if norm == "rms_norm" else layer_norm)(x, scale, residual=residual, implementation="mosaic")
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("norm", ["rms_norm", "layer_norm"])
def test_every_form_of_the_kernels_draws_the_same_mask(norm, seed):
    """Masks do not depend on how rows are cut: whole rows, an odd rest by XLA, several warpgroups."""
    settings = StaticNorm(name=norm, epsilon=1e-6, rate=0.3)
    words = key_words(KEY)
    for features in (1024, 1027):
        x, residual, dy, dtotal = (rows(seed + i, 3, features) for i in range(4))
        _, total, statistics = norm_forward(settings, x, residual=residual, words=words, with_statistics=True)
        assert total is not None and statistics is not None
        configs: list[BackwardConfig | None] = [None]
        if features == 1024:
            configs += [BackwardConfig()]
            configs += [BackwardConfig(warpgroups=w, blocks_per_core=1, steps=2) for w in (1, 2)]
        keep = np.asarray(array_keep_mask(KEY, x.shape, rate=0.3))
        for config in configs:
            got = norm_backward(settings, total, statistics, dy, dtotal=dtotal, words=words, config=config)
            assert got.dx is not None
            expected = np.where(keep, np.asarray(got.dtotal) / 0.7, 0)
            np.testing.assert_allclose(got.dx, expected, rtol=1e-5, atol=1e-6, err_msg=f"{config} seed={seed}")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"norm": "batch_norm"}, r"unknown norm 'batch_norm'; it has 'rms_norm' and 'layer_norm'"),
        ({"bias": jnp.ones(256)}, "'rms_norm' has no bias"),
        ({"rate": 1.0}, r"dropout_residual_norm: .*0 <= rate < 1, got 1.0"),
        ({"key": None}, r"rate is 0.1; pass key=jax.random.key"),
        ({"residual": jnp.ones((2, 255))}, r"like x, float32\[2, 256\]"),
    ],
)
def test_arguments_that_do_not_belong_together(arguments, message):
    x = jnp.ones((2, 256))
    with pytest.raises(ValueError, match=message):
        dropout_residual_norm(x, **{"residual": x, "rate": 0.1, "key": KEY, **arguments})


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("name", ["rms_norm", "layer_norm"])
def test_all_forward_configurations_agree(seed, name):
    """However warps share a row, its mask, its sum and its norm are the same."""
    x, residual, scale = rows(seed, 3, 1024), rows(seed + 1, 3, 1024), 1 + 0.1 * rows(seed, 1, 1024)[0]
    norm = StaticNorm(name=name, epsilon=1e-6, rate=0.25)
    run = lambda is_ahead: norm_forward(  # noqa: E731
        norm, x, scale=scale, residual=residual, words=key_words(KEY), is_ahead=is_ahead
    )
    y, total, _ = run(False)
    np.testing.assert_array_equal(
        total, np.where(np.asarray(array_keep_mask(KEY, x.shape, rate=0.25)), x * (1 / 0.75), 0) + residual
    )
    got_y, got_total, _ = run(True)
    np.testing.assert_array_equal(got_total, total, err_msg=f"seed={seed}")
    np.testing.assert_allclose(got_y, y, rtol=1e-5, atol=1e-5, err_msg=f"seed={seed}")
