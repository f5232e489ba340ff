"""What is particular to softmax."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from draws import normal

from pallas_kernels import softmax
from pallas_kernels.ops.softmax.api import masking_of
from pallas_kernels.ops.softmax.masking import Masking, mask_rows
from pallas_kernels.ops.softmax.mosaic_gpu import (
    shared_row_gradient,
    softmax_backward,
    softmax_forward,
    whole_row_gradient,
    xla_gradient,
)
from pallas_kernels.ops.softmax.reference import softmax_reference
from xlafuse.studies.softmax_forms import FORMS


def rows(seed, *shape, dtype="float32", deviation=2.0):
    return (deviation * normal(seed, shape)).astype(dtype)


def test_reference_is_jax_softmax(seed):
    x = rows(seed, 5, 33)
    np.testing.assert_allclose(softmax(x), jax.nn.softmax(x), rtol=1e-6, err_msg=f"seed={seed}")
    np.testing.assert_allclose(softmax(x, axis=0), jax.nn.softmax(x, axis=0), rtol=1e-6, err_msg=f"seed={seed}")
    mask = x > 0
    np.testing.assert_allclose(softmax(x, mask=mask), jax.nn.softmax(x, where=mask), rtol=1e-6)


def test_known_values():
    x = jnp.log(jnp.array([[1.0, 3.0, 4.0]]))
    np.testing.assert_allclose(softmax(x), [[0.125, 0.375, 0.5]], rtol=1e-6)
    np.testing.assert_allclose(softmax(x, mask=jnp.array([True, True, False])), [[0.25, 0.75, 0]], rtol=1e-6)
    np.testing.assert_allclose(softmax(x, scale=2.0), [[1 / 26, 9 / 26, 16 / 26]], rtol=1e-6)
    np.testing.assert_allclose(softmax(jnp.zeros((2, 3)), is_causal=True), [[1, 0, 0], [0.5, 0.5, 0]])


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("implementation", ["mosaic", "xla"])
@pytest.mark.parametrize("kind", ["boolean", "additive"])
def test_rows_masked_throughout_are_zeros(implementation, kind):
    x = rows(3, 3, 256, dtype="bfloat16")
    keep = jnp.array([[False], [True], [False]]) & (jnp.arange(256) < 200)
    mask = keep if kind == "boolean" else jnp.where(keep, 0, -jnp.inf)
    run = lambda x: softmax(x, mask=mask, implementation=implementation)  # noqa: E731
    y, pullback = jax.vjp(run, x)
    (dx,) = pullback(jnp.ones_like(y) * x)
    for value in (y, dx):
        value = np.asarray(value, np.float32)
        assert np.isfinite(value).all()
        assert (value[[0, 2]] == 0).all()
        assert (value[1, 200:] == 0).all()
        assert value[1, :200].any()


@pytest.mark.usefixtures("interpreter")
def test_large_finite_masks_are_no_infinity():
    lowest = float(jnp.finfo(jnp.float32).min)
    y = softmax(jnp.zeros((2, 128)), mask=jnp.full((128,), lowest), implementation="mosaic")
    np.testing.assert_allclose(y, 1 / 128)


@pytest.mark.usefixtures("interpreter")
def test_shift_invariance_and_one_hot():
    x = rows(5, 2, 256)
    shifted = softmax(x + 1024.0, implementation="mosaic")
    np.testing.assert_allclose(shifted, softmax(x, implementation="mosaic"), rtol=1e-3)
    hot = jnp.zeros((2, 256)).at[:, 7].set(1e4)
    np.testing.assert_array_equal(softmax(hot, implementation="mosaic"), hot / 1e4)


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("mask_shape", [(2, 1, 128), (128,)])
def test_a_floating_mask_has_a_gradient(seed, mask_shape):
    x, mask, dy = rows(seed, 2, 3, 128), rows(seed + 1, *mask_shape), rows(seed + 2, 2, 3, 128)

    def gradients(implementation):
        run = lambda x, m: softmax(x, mask=m, scale=0.5, implementation=implementation)  # noqa: E731
        return jax.vjp(run, x, mask)[1](dy)

    for got, expected in zip(gradients("mosaic"), gradients("xla"), strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-6, err_msg=f"seed={seed}")


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("features", [1024, 1027, 1096])
def test_long_rows_in_chunks(seed, features):
    """The path of rows beyond the registers, at sizes the interpreter can do: whole chunks, odd rest, even rest."""
    x, mask = rows(seed, 4, features), rows(seed + 2, 4, features) > -2
    arguments = {"mask": mask, "scale": 0.7}
    masking, mask = masking_of(x, **arguments)
    weights = softmax_forward(x, mask, masking=masking, register_columns=0, chunk=512)
    expected = softmax_reference(x, **arguments)
    np.testing.assert_allclose(weights, expected, rtol=1e-5, atol=1e-7, err_msg=f"seed={seed}")


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize(("features", "dtype"), [(1024, "float32"), (3072, "bfloat16"), (16384, "bfloat16")])
def test_long_rows_in_shared_memory(seed, features, dtype):
    """Gradients of rows that several warpgroups share, in one piece a warp and in several."""
    x = softmax(rows(seed, 3, features, dtype=dtype)).at[1].set(0)  # a row that was masked throughout
    dy = rows(seed + 1, 3, features, dtype=dtype)
    got = shared_row_gradient(x, dy, scale=0.7, warpgroups=2).astype("float32")
    expected = np.asarray(whole_row_gradient(x, dy, scale=0.7).astype("float32"))
    # A gradient is a difference, which a few roundings of its larger terms may change.
    rtol, atol = 1e-6 if dtype == "float32" else 1e-2, 1e-6 * np.abs(expected).max()
    np.testing.assert_allclose(got, expected, rtol=rtol, atol=atol, err_msg=f"seed={seed}")


@pytest.mark.drawn(1 / 3)
@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("mask", [None, (2, 1, 1, 256), (256,)])
@pytest.mark.parametrize("kind", ["boolean", "additive"])
def test_a_causal_limit_joins_the_mask(seed, kind, mask):
    x, dy = rows(seed, 2, 3, 4, 256), rows(seed + 1, 2, 3, 4, 256)
    if mask is not None:
        mask = rows(seed + 2, *mask)
        mask = mask > -1 if kind == "boolean" else mask
    results = {}
    for implementation in ("mosaic", "xla"):
        run = lambda x, mask: softmax(x, mask=mask, is_causal=True, implementation=implementation)  # noqa: B023, E731
        y, pullback = jax.vjp(run, x, mask)
        results[implementation] = y, *jax.tree.leaves(pullback(dy)[: 1 + (kind == "additive")])
    for got, expected in zip(*results.values(), strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-6, err_msg=f"seed={seed}")


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("features", [8193, 8704, 57344])
def test_gradients_of_long_rows(seed, features):
    """By XLA where rows do not divide over warpgroups, or do not fit in shared memory."""
    weights, dy = softmax(rows(seed, 1, features)), rows(seed + 1, 1, features)
    is_kernel = "mpmd_map[" in str(jax.make_jaxpr(lambda *both: softmax_backward(*both, scale=None))(weights, dy))
    assert is_kernel == (features == 8704)
    expected = xla_gradient(weights, dy)
    np.testing.assert_allclose(softmax_backward(weights, dy, scale=None), expected, rtol=1e-4, atol=1e-8)


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("form", FORMS)
def test_forms_agree(form, seed):
    x = rows(seed, 2, 4100, dtype="bfloat16")
    got, expected = FORMS[form](x), softmax_reference(x)
    np.testing.assert_allclose(got.astype("float32"), expected.astype("float32"), rtol=1e-2, err_msg=f"seed={seed}")


@pytest.mark.parametrize(
    "mask_shape", [(2, 3, 5, 128), (1, 3, 5, 128), (2, 1, 5, 128), (2, 3, 1, 128), (3, 1, 1), (5, 128), (128,), ()]
)
def test_mask_rows_follow_broadcasting(mask_shape):
    shape = (2, 3, 5, 128)
    mask = jnp.arange(int(np.prod(mask_shape)), dtype=jnp.float32).reshape(mask_shape)
    own, index = mask_rows(mask, shape)
    assert own.shape[0] == int(np.prod(mask_shape[:-1])), "a shared mask must not be written out"
    got = own[Masking(mask_index=index).mask_row(jnp.arange(30))] if index else jnp.broadcast_to(own, (30, 128))
    np.testing.assert_array_equal(got, jnp.broadcast_to(mask, shape).reshape(30, 128))


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"x": jnp.ones((2, 8), "int32")}, TypeError, "x must be floating, got int32"),
        ({"x": jnp.ones((2, 8)), "axis": 2}, ValueError, "one of the 2 axes"),
        ({"x": jnp.ones((2, 8)), "scale": jnp.ones(())}, TypeError, "Python number"),
        ({"x": jnp.ones((8,)), "is_causal": True}, ValueError, "is_causal needs"),
        ({"x": jnp.ones((2, 8)), "axis": 0, "is_causal": True}, ValueError, "the last axis"),
        ({"x": jnp.ones((2, 8)), "mask": jnp.ones((3, 8))}, ValueError, "broadcast to x"),
        ({"x": jnp.ones((2, 8)), "mask": jnp.ones((2, 8), "int32")}, TypeError, "boolean .* or floating"),
    ],
)
def test_arguments_that_do_not_belong_together(arguments, error, message):
    with pytest.raises(error, match=message):
        softmax(**arguments)


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize(
    ("x", "axis", "reason"), [((2, 127), -1, "at least 128"), ((256, 4), 0, "axis 0 is not the last")]
)
def test_what_the_kernel_cannot_take_is_refused(x, axis, reason):
    with pytest.raises(NotImplementedError, match=reason):
        softmax(jnp.ones(x), axis=axis, implementation="mosaic")
    np.testing.assert_allclose(softmax(jnp.ones(x), axis=axis), 1 / x[axis], rtol=1e-6)
