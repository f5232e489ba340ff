"""What is particular to the dot interaction: the order of the pairs, and what its kernels refuse."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from draws import normal

from pallas_kernels import dot_interaction
from pallas_kernels.ops.dot_interaction.mosaic_gpu import Triangle


@pytest.mark.parametrize("has_diagonal", [False, True])
def test_triangle_is_that_of_numpy(has_diagonal):
    triangle = Triangle(fields=9, has_diagonal=has_diagonal)
    rows = [(row, column) for row in range(9) for column in range(triangle.length(row))]
    assert rows == list(zip(*np.tril_indices(9, 0 if has_diagonal else -1), strict=True))
    assert triangle.pairs == len(rows)
    assert [triangle.start(row) for row in range(9)] == [sum(map(triangle.length, range(row))) for row in range(9)]


def test_known_values():
    """Pairs (1, 0), (2, 0), (2, 1), as the DLRM of Naumov et al. has them; with the diagonal row after row."""
    x = jnp.array([[1.0, 0], [2, 3], [5, 7]])
    np.testing.assert_array_equal(dot_interaction(x), [2, 5, 31])
    np.testing.assert_array_equal(dot_interaction(x, self_interaction=True), [1, 2, 13, 5, 31, 74])


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("self_interaction", [False, True])
def test_gradient_is_the_symmetric_square_times_x(seed, self_interaction):
    """Of integers, which bfloat16 and the sums hold exactly."""
    x = jnp.round(normal(seed, (2, 20, 16)))
    pairs = Triangle(fields=20, has_diagonal=self_interaction).pairs
    dy = jnp.round(normal(seed + 1, (2, pairs)))
    square = np.zeros((2, 20, 20), np.float32)
    square[:, *np.tril_indices(20, 0 if self_interaction else -1)] = dy

    def function(x):
        return dot_interaction(x, self_interaction=self_interaction, implementation="mosaic")

    (gradient,) = jax.vjp(function, x.astype(jnp.bfloat16))[1](dy.astype(jnp.bfloat16))
    expected = jnp.asarray((square + square.swapaxes(1, 2)) @ np.asarray(x)).astype(jnp.bfloat16)
    np.testing.assert_array_equal(gradient.astype(jnp.float32), expected.astype(jnp.float32), err_msg=f"seed={seed}")


@pytest.mark.usefixtures("interpreter")
def test_large_gradients_of_the_diagonal():
    """Twice 40000 is more than float16 holds; the gradient, 80000 / 1024, is not."""
    x = jnp.full((1, 16, 16), 2.0**-10, "float16")
    triangle = Triangle(fields=16, has_diagonal=True)
    dy = jnp.zeros((1, triangle.pairs), "float16").at[0, triangle.start(3) + 3].set(40000)
    (gradient,) = jax.vjp(lambda x: dot_interaction(x, self_interaction=True, implementation="mosaic"), x)[1](dy)
    np.testing.assert_array_equal(gradient[0, 3], np.full(16, 80000 / 1024))


@pytest.mark.usefixtures("interpreter")
def test_a_sample_is_its_own(seed):
    """NaN stays in the pairs of its vector, though tiles are longer than a sample."""
    x = normal(seed, (3, 27, 32), "bfloat16").at[1, 26].set(jnp.nan).at[2, 0].set(jnp.nan)
    y = dot_interaction(x, implementation="mosaic")
    first, second = np.tril_indices(27, -1)
    assert np.isfinite(y[0].astype(jnp.float32)).all()
    np.testing.assert_array_equal(np.isfinite(y[1].astype(jnp.float32)), first != 26)
    np.testing.assert_array_equal(np.isfinite(y[2].astype(jnp.float32)), second != 0)


@pytest.mark.usefixtures("interpreter")
def test_up_to_40_fields_the_forward_pass_is_xla_s(seed):
    x = normal(seed, (2, 40, 16), "bfloat16")

    def loss(x, implementation=None):
        return jnp.sum(jnp.sin(dot_interaction(x, implementation=implementation).astype("float32")))

    wide = jnp.ones((2, 41, 16), "bfloat16")
    launches = [str(jax.make_jaxpr(f)(a)).count("mpmd_map[") for a in (x, wide) for f in (loss, jax.grad(loss))]
    assert launches == [0, 1, 1, 2]
    got, expected = (jax.grad(loss)(x, name).astype("float32") for name in (None, "xla"))
    np.testing.assert_allclose(got, expected, rtol=0.05, atol=0.1, err_msg=f"seed={seed}")


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize(
    ("shape", "dtype", "reason"),
    [
        ((2, 27, 16), "float32", "features are float32, the kernels take bfloat16, float16"),
        ((2, 65, 16), "bfloat16", "65 fields make 2080 pairs"),
        ((2, 16, 16), "bfloat16", "16 fields make 120 pairs; .* at least 128 pairs"),
        ((2, 27, 24), "bfloat16", "the vectors have 24 values, the kernels take multiples of 16"),
    ],
)
def test_refusals(shape, dtype, reason):
    with pytest.raises(NotImplementedError, match=reason):
        dot_interaction(jnp.ones(shape, dtype), implementation="mosaic")


def test_wrong_arguments():
    with pytest.raises(TypeError, match="features must be floating, got int32"):
        dot_interaction(jnp.ones((2, 3), "int32"))
    with pytest.raises(ValueError, match=r"features must be \(..., fields, size\), got \(3,\)"):
        dot_interaction(jnp.ones(3))
