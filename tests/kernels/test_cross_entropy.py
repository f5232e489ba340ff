"""What is particular to cross-entropy."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from draws import integers, normal
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from pallas_kernels import cross_entropy
from pallas_kernels.ops.cross_entropy.config import ForwardConfig, RowPlan, default_forward, ring_config
from pallas_kernels.ops.cross_entropy.formula import Terms, logarithm
from pallas_kernels.ops.cross_entropy.mosaic_gpu import cross_entropy_backward, cross_entropy_forward, scale_in_place
from pallas_kernels.ops.cross_entropy.reference import cross_entropy_reference
from pallas_kernels.specs import seeds_of

OPTIONS: dict[str, Any] = {"label_smoothing": 0.1, "z_loss": 1e-3}


def case(seed, rows, vocabulary, dtype="float32"):
    own = seeds_of(seed, 3)
    logits = (3 * normal(own[0], (rows, vocabulary))).astype(dtype)
    return logits, integers(own[1], (rows,), 0, vocabulary), normal(own[2], (rows,))


def test_known_values():
    logits = jnp.log(jnp.array([[1.0, 3.0, 4.0]]))
    loss = lambda **options: cross_entropy(logits, jnp.array([1]), **options)  # noqa: E731
    np.testing.assert_allclose(loss(), [np.log(8 / 3)], rtol=1e-6)
    np.testing.assert_allclose(loss(z_loss=0.5), [np.log(8 / 3) + 0.5 * np.log(8) ** 2], rtol=1e-6)
    smooth = np.log(8) - 0.7 * np.log(3) - 0.3 * np.log([1, 3, 4]).mean()
    np.testing.assert_allclose(loss(label_smoothing=0.3), [smooth], rtol=1e-6)
    gradient = jax.grad(lambda z: cross_entropy(z, jnp.array([1]), reduction="sum"))(logits)
    np.testing.assert_allclose(gradient, [[1 / 8, 3 / 8 - 1, 4 / 8]], rtol=1e-6)


def test_reductions():
    logits = jnp.zeros((2, 2, 4))
    labels = jnp.array([[0, -1], [3, 1]])
    np.testing.assert_allclose(cross_entropy(logits, labels), np.log(4) * np.array([[1, 0], [1, 1]]), rtol=1e-6)
    np.testing.assert_allclose(cross_entropy(logits, labels, reduction="sum"), 3 * np.log(4), rtol=1e-6)
    np.testing.assert_allclose(cross_entropy(logits, labels, reduction="mean"), np.log(4), rtol=1e-6)
    assert cross_entropy(logits, jnp.full((2, 2), -1), reduction="mean") == 0


@pytest.mark.drawn(1 / 3)
@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("implementation", ["mosaic", "xla"])
@pytest.mark.parametrize("dtype", ["int32", "uint8"])
@pytest.mark.parametrize("options", [{}, OPTIONS], ids=["plain", "smoothed"])
def test_labels_outside_the_vocabulary_are_rows_of_zeros_without_an_ignore_index(implementation, dtype, options):
    logits, _, weights = case(4, 5, 200)
    labels = jnp.asarray([7, 255, 200, 199, 0]).astype(dtype)
    labels = labels if dtype == "uint8" else labels.at[1].set(-1)

    def by_one_hot(logits):
        smoothing, z_loss = options.get("label_smoothing", 0.0), options.get("z_loss", 0.0)
        target = (1 - smoothing) * jax.nn.one_hot(labels, 200) + smoothing / 200
        losses = -jnp.sum(target * jax.nn.log_softmax(logits), -1) + z_loss * jax.nn.logsumexp(logits, -1) ** 2
        return losses @ weights + losses.mean()

    def by_operation(logits):
        own = partial(cross_entropy, logits, labels, ignore_index=None, implementation=implementation, **options)
        return own() @ weights + own(reduction="mean")

    for got, expected in zip(*(jax.value_and_grad(f)(logits) for f in (by_operation, by_one_hot)), strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("implementation", ["mosaic", "xla"])
@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_ignored_and_impossible_labels(implementation, reduction):
    logits, _, _ = case(3, 4, 256)
    labels = jnp.array([7, -100, 256, 255])

    def losses(logits):
        return cross_entropy(logits, labels, ignore_index=-100, reduction=reduction, implementation=implementation)

    value, pullback = jax.vjp(losses, logits)
    (gradient,) = pullback(jnp.ones_like(value))
    expected = -jax.nn.log_softmax(logits)[jnp.array([0, 3]), jnp.array([7, 255])]
    if reduction == "none":
        assert np.isnan(value[2])
        assert value[1] == 0
        np.testing.assert_allclose(value[jnp.array([0, 3])], expected, rtol=1e-5)
    else:
        assert np.isnan(value)
    assert np.isfinite(gradient).all()
    np.testing.assert_array_equal(np.any(gradient != 0, axis=1), [True, False, False, True])


RING = ForwardConfig(loads="ring", warpgroups=2, chunk_lines=4, slots=3)


@pytest.mark.drawn(1 / 3)
@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize(
    ("vocabulary", "dtype", "config", "options"),
    [
        (9 * 256, "bfloat16", replace(RING, slots=2), {}),  # some of a row comes twice
        (10 * 256 + 200, "bfloat16", RING, OPTIONS),  # parts of two lengths, neither of them whole chunks
        (9 * 256, "bfloat16", replace(RING, slots=9), {}),  # all of a row stays, and two more begin to come
        (11 * 1024 + 652, "float32", replace(RING, warpgroups=3, chunk_lines=8), OPTIONS),
        (5 * 1024, "bfloat16", replace(RING, slots=2, held=1), {}),  # one in registers
        (10 * 1024 + 256, "bfloat16", replace(RING, slots=2, held=2), OPTIONS),  # some in registers, some comes twice
        (4101, "float32", ForwardConfig(loads="split", chunk=1024), OPTIONS),
        (4096, "bfloat16", ForwardConfig(loads="split", chunk=1024), {}),
        (1000, "float32", ForwardConfig(loads="registers"), OPTIONS),
    ],
)
def test_loss_and_gradient_together(seed, vocabulary, dtype, config, options):
    logits, labels, weights = case(seed, 3, vocabulary, dtype)
    labels = labels.at[0].set(vocabulary - 1).at[1].set(0)
    terms = Terms(vocabulary=vocabulary, **options)
    loss, (maximum, total), gradient = cross_entropy_forward(
        logits, labels, weights, terms=terms, with_gradient=True, config=config
    )
    expected, pullback = jax.vjp(lambda z: cross_entropy_reference(z, labels, **options), logits)
    np.testing.assert_allclose(loss, expected * weights, rtol=1e-5, atol=1e-5, err_msg=f"seed={seed}")
    np.testing.assert_allclose(maximum + jnp.log(total), jax.nn.logsumexp(logits.astype("float32"), -1), rtol=1e-5)
    rtol, atol = (1e-2, 1e-5) if dtype == "bfloat16" else (1e-4, 1e-7)
    expected = pullback(weights)[0].astype("float32")
    gradient = np.asarray(gradient, np.float32)
    np.testing.assert_allclose(gradient, expected, rtol=rtol, atol=atol, err_msg=f"seed={seed}")


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("vocabulary", [1024, 1027, 1424])
def test_two_launches(seed, vocabulary):
    """Loss and gradient apart: whole chunks, a rest shorter than a warpgroup's access, a longer one."""
    logits, labels, weights = case(seed, 2, vocabulary)
    terms = Terms(vocabulary=vocabulary, **OPTIONS)
    loss, statistics, _ = cross_entropy_forward(
        logits, labels, None, terms=terms, with_gradient=False, config=ForwardConfig(loads="split", chunk=512)
    )
    gradient = cross_entropy_backward(logits, labels, weights, statistics, terms=terms, chunk=512)
    expected, pullback = jax.vjp(lambda z: cross_entropy_reference(z, labels, **OPTIONS), logits)
    np.testing.assert_allclose(loss, expected, rtol=1e-5, err_msg=f"seed={seed}")
    np.testing.assert_allclose(gradient, pullback(weights)[0], rtol=1e-4, atol=1e-7, err_msg=f"seed={seed}")


@pytest.mark.drawn(1 / 3)
@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("vocabulary", [256, 200, 8192 + 3])
@pytest.mark.parametrize("factor", [1.0, -2.5])
def test_gradients_are_scaled_in_place(seed, vocabulary, factor):
    gradient = case(seed, 3, vocabulary)[0]
    got = jax.jit(scale_in_place)(gradient, jnp.float32(factor))
    np.testing.assert_array_equal(got, gradient * factor)


@pytest.mark.usefixtures("interpreter")
def test_a_loss_scale_reaches_the_gradient(seed):
    logits, labels, _ = case(seed, 3, 256)

    def gradient(implementation):
        return jax.jit(
            jax.grad(lambda z: 512 * cross_entropy(z, labels, reduction="mean", implementation=implementation))
        )(logits)

    np.testing.assert_allclose(gradient("mosaic"), gradient("xla"), rtol=1e-4, atol=1e-4, err_msg=f"seed={seed}")


@pytest.mark.usefixtures("interpreter")
def test_reduced_losses_under_vmap(seed):
    logits, labels, _ = case(seed, 4, 256)
    logits, labels = logits.reshape(2, 2, 256), labels.reshape(2, 2)

    def gradients(implementation):
        loss = lambda z, t: cross_entropy(z, t, reduction="mean", implementation=implementation)  # noqa: E731
        return jax.vmap(jax.grad(loss))(logits, labels)

    np.testing.assert_allclose(gradients("mosaic"), gradients("xla"), rtol=1e-4, atol=1e-6, err_msg=f"seed={seed}")


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("check_vma", [False, True], ids=["unchecked", "checked"])
def test_reduced_losses_under_shard_map(seed, check_vma):
    if len(jax.devices("cpu")) < 2:
        pytest.skip("needs two simulated CPU devices; run this folder by itself")
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices("cpu")[:2])
    logits, labels, _ = case(seed, 4, 256)

    def value_and_gradient(implementation):
        def local(logits, labels):
            loss = cross_entropy(logits, labels, reduction="mean", implementation=implementation)
            return 3 * jax.lax.pmean(loss, "data")

        specs = {"in_specs": (P("data"), P("data")), "out_specs": P()}
        loss = jax.shard_map(local, mesh=mesh, **specs, check_vma=check_vma)
        return jax.jit(jax.value_and_grad(loss))(logits, labels)

    for got, expected in zip(value_and_gradient("mosaic"), value_and_gradient("xla"), strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-6, err_msg=f"seed={seed}")


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("labels", [np.array([7, 300, 255, 1], "uint16"), np.array([7, -100, -3, 127], "int8")])
def test_labels_of_other_types(labels):
    logits, _, _ = case(5, 4, 256)
    ignore_index = -100 if labels.dtype == np.int8 else 1

    def losses(implementation):
        return cross_entropy(logits, labels, ignore_index=ignore_index, implementation=implementation)

    expected = losses("xla")
    np.testing.assert_allclose(losses("mosaic"), expected, rtol=1e-5)
    is_label = (labels >= 0) & (labels < 256)
    np.testing.assert_array_equal(np.isfinite(expected), is_label | (labels == ignore_index))


@pytest.mark.parametrize(("dtype", "vocabulary"), [("uint8", 256), ("int8", 300), ("uint16", 65536 + 8)])
def test_labels_of_fewer_bits_than_the_vocabulary_needs(dtype, vocabulary):
    """Neither the vocabulary's size nor -1 fit into the labels' dtype."""
    largest = np.iinfo(dtype).max
    logits = jnp.zeros((2, vocabulary)).at[0, largest].set(5.0)
    labels = jnp.array([largest, 0], dtype)
    expected = -jax.nn.log_softmax(logits)[jnp.arange(2), labels.astype(int)]
    np.testing.assert_allclose(cross_entropy(logits, labels), expected, rtol=1e-6)


def test_logarithms_are_exact(seed):
    draws = np.random.default_rng(seed).random(20000)
    numbers = np.concatenate([1 + 3 * draws, np.exp(13 * draws), 1 + 1e-3 * draws]).astype("float32")
    exact = np.log(numbers.astype("float64"))
    error = np.abs(jax.jit(logarithm)(numbers) - exact) / np.spacing(np.maximum(exact, 1e-10).astype("float32"))
    assert error.max() < 1.5, f"seed={seed}"
    assert np.isnan(logarithm(jnp.array([0, np.nan, np.inf]))).all()


@pytest.mark.parametrize("vocabulary", [12289, 12416, 16384, 32000, 50257, 50304, 128256, 151936, 262144])
@pytest.mark.parametrize("itemsize", [2, 4])
def test_rings_fit(vocabulary, itemsize):
    configs = [default_forward(rows, vocabulary, itemsize, with_gradient=True) for rows in (100, 8192)]
    rings = (ring_config(vocabulary, itemsize, warpgroups=n) for n in (4, 3))
    configs += [config for config in rings if config is not None]
    assert (configs[0].loads == "ring") == (vocabulary * itemsize % 16 == 0)
    for config in configs:
        if config.loads == "ring":
            assert config.warpgroups * config.slots * config.chunk_lines * 512 <= 223 * 1024
            assert config.warpgroups * config.slots <= 32
            plan = RowPlan.make(vocabulary, itemsize, config)
            # The parts are the row, and what a warpgroup reads begins and ends in its part.
            begins = [plan.part(sharer) for sharer in range(plan.sharers)]
            ends = [int(begin + plan.own * plan.chunk - repeated) for begin, repeated in begins]
            assert [int(begin) for begin, _ in begins] == [0, *ends[:-1]]
            assert ends[-1] * 16 == vocabulary * itemsize
            assert all(0 <= int(repeated) <= plan.most_repeated for _, repeated in begins)
            assert plan.most_repeated < plan.chunk + 8
            assert plan.own > 1 or not plan.most_repeated
            again = [int(plan.chunk_at(position)) for position in range(plan.loads)]
            stays = [*range(plan.held), *range(plan.own - plan.kept, plan.own)]
            assert again[: plan.own] == list(range(plan.own))
            assert sorted(again[plan.own :] + stays) == list(range(plan.own))


@pytest.mark.parametrize(
    ("logits", "labels", "options", "error", "message"),
    [
        (jnp.ones((2, 8), "int32"), jnp.zeros(2, "int32"), {}, TypeError, "logits must be floating"),
        (jnp.ones((2, 8)), jnp.zeros(2), {}, TypeError, "labels must be integers"),
        (jnp.ones((2, 8)), jnp.zeros(3, "int32"), {}, ValueError, r"labels must be \(2,\).* got \(3,\)"),
        (jnp.ones((2, 0)), jnp.zeros(2, "int32"), {}, ValueError, "vocabulary axis of at least 1"),
        (jnp.ones((2, 8)), jnp.zeros(2, "int32"), {"label_smoothing": 1.5}, ValueError, "from 0 to 1, got 1.5"),
        (jnp.ones((2, 8)), jnp.zeros(2, "int32"), {"reduction": "max"}, ValueError, "'none', 'sum' or 'mean'"),
    ],
)
def test_arguments_that_do_not_belong_together(logits, labels, options, error, message):
    with pytest.raises(error, match=message):
        cross_entropy(logits, labels, **options)


def test_the_greatest_label_without_a_sign_may_be_ignored():
    labels = jnp.array([3, 2**32 - 1], jnp.uint32)
    for ignore_index in (-1, 2**32 - 1):
        losses = cross_entropy(jnp.zeros((2, 8)), labels, ignore_index=ignore_index)
        np.testing.assert_allclose(losses, [np.log(8), 0], rtol=1e-6)
