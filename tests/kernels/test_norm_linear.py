"""What the shared base cannot say of the linear layers around a norm."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from draws import normal

from pallas_kernels import Norm, fold_scale, linear_residual_norm, norm_linear, rms_norm
from pallas_kernels.ops.linear import config as linear
from pallas_kernels.ops.linear.mosaic_gpu import linear_residual_norm_forward
from pallas_kernels.primitives.few_rows.config import FewRowsConfig


def arrays(rows=8, features=128, outputs=128, dtype=jnp.bfloat16):
    shapes = ((rows, features), (features, outputs), (rows, outputs))
    return [normal(i, s, dtype) for i, s in enumerate(shapes)]


def test_without_a_gpu_none_is_xla():
    x, w, residual = arrays()
    norm = Norm(jnp.ones(128))
    np.testing.assert_array_equal(norm_linear(x, w, norm=norm), norm_linear(x, w, norm=norm, implementation="xla"))
    for call in (
        lambda: norm_linear(x, w, norm=norm, implementation="mosaic"),
        lambda: linear_residual_norm(x, w, residual=residual, implementation="mosaic"),
    ):
        with pytest.raises(NotImplementedError, match="Hopper"):
            call()


@pytest.mark.parametrize(
    ("rows", "outputs", "features", "is_best"),
    [(16, 4096, 8192, True), (17, 4096, 8192, False), (1, 4088, 8192, False), (1, 4096, 8184, False)],
)
def test_few_rows_of_a_residual_norm_take_the_kernel_where_it_was_measured(rows, outputs, features, is_best):
    assert linear.is_preferred_with_squares(rows, outputs, features) == is_best


def test_errors_say_what_is_wrong():
    x, w, residual = arrays()
    with pytest.raises(TypeError, match="call linear"):
        norm_linear(x, w, norm=None)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=r"norm_linear: w must be .* got \(64, 128\)"):
        norm_linear(x, w[:64], norm=Norm(None))
    with pytest.raises(ValueError, match="'rms' or 'layer', got 'rmsnorm'"):
        norm_linear(x, w, norm=Norm(None, kind="rmsnorm"))  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="linear_residual_norm: residual must be like the result"):
        linear_residual_norm(x, w, residual=residual[:4])


def test_two_layers_with_nothing_between_them():
    """The mean squares of one layer are what the norm in the next one divides by."""
    x, w, residual = arrays(dtype=jnp.float32)
    scale = 1 + 0.1 * normal(9, (128,))
    norm = Norm(scale, epsilon=1e-5)
    total, mean_square = linear_residual_norm(x, w, residual=residual)
    folded, (behind,) = fold_scale(norm, w)
    got = norm_linear(total, behind, norm=Norm(None, epsilon=folded.epsilon, mean_square=mean_square))
    normed = rms_norm(x @ w + residual, scale, epsilon=1e-5)
    assert isinstance(normed, jax.Array)
    np.testing.assert_allclose(got, normed @ w, rtol=1e-4, atol=1e-3)


@pytest.mark.usefixtures("interpreter")
def test_far_means_do_not_cancel_in_a_layer_norm():
    """A mean taken off behind the product, as a correction of rank one, would lose what is left of x here."""
    x, w, _ = arrays(rows=2)
    x = (x.astype(jnp.float32) + 200).astype(jnp.bfloat16)
    got = norm_linear(x, w, norm=Norm(None, kind="layer"), implementation="mosaic")
    wide = np.asarray(x, np.float64)
    centered = wide - wide.mean(-1, keepdims=True)
    exact = centered / np.sqrt((centered**2).mean(-1, keepdims=True) + 1e-6) @ np.asarray(w, np.float64)
    np.testing.assert_allclose(np.asarray(got, np.float64), exact, atol=0.02 * np.abs(exact).max())


@pytest.mark.usefixtures("interpreter")
def test_norm_of_few_rows_in_the_products_launch(monkeypatch):
    x, w, residual = arrays()
    norm = Norm(1 + 0.1 * jnp.arange(128.0) / 128, epsilon=0.1)
    config = FewRowsConfig(columns=64, warpgroups=2, fuses_norm=True)
    monkeypatch.setattr(linear, "tuned_config", lambda *_, **__: config)
    got, expected = (
        norm_linear(x, w, norm=norm, residual=residual, activation="relu", implementation=i) for i in ("mosaic", "xla")
    )
    expected = np.asarray(expected, np.float64)
    np.testing.assert_allclose(np.asarray(got, np.float64), expected, rtol=0.02, atol=0.02 * np.abs(expected).max())


@pytest.mark.usefixtures("interpreter")
def test_mean_squares_of_few_rows():
    x, w, residual = arrays()
    got = linear_residual_norm_forward(x, w, None, residual, config=FewRowsConfig(columns=64))
    for one, other in zip(got, linear_residual_norm(x, w, residual=residual, implementation="xla"), strict=True):
        np.testing.assert_allclose(np.asarray(one, np.float64), np.asarray(other, np.float64), rtol=2**-7, atol=0.05)


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("given", [False, True], ids=["computed", "given mean squares"])
def test_a_scale_after_the_rounding_in_front_of_a_product(given):
    x, identity = arrays(rows=72)[0], jnp.eye(128, dtype=jnp.bfloat16)  # whose product is the norm as it is
    scale = (1 + 0.3 * normal(7, (128,))).astype(x.dtype)
    mean_square = jnp.mean(x.astype(jnp.float32) ** 2, axis=-1) if given else None

    def normed(rounds, implementation):
        norm = Norm(scale, mean_square=mean_square, rounds_before_scale=rounds)
        return np.asarray(norm_linear(x, identity, norm=norm, implementation=implementation), np.float32)

    wide = x.astype(jnp.float32)
    written = (wide * jax.lax.rsqrt(jnp.mean(wide**2, -1, keepdims=True) + 1e-6)).astype(x.dtype) * scale
    for implementation in ("mosaic", "xla"):
        assert np.mean(normed(True, implementation) == np.asarray(written, np.float32)) > 0.99
        assert np.mean(normed(False, implementation) == np.asarray(written, np.float32)) < 0.9
