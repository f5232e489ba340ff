"""What the shared base cannot say of linear_cross_entropy."""

from __future__ import annotations

import importlib.util
import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from draws import integers, normal

import hlo_analysis
from pallas_kernels import cross_entropy, linear_cross_entropy
from pallas_kernels.ops.linear_cross_entropy.config import (
    CHUNK_UNIT,
    chunk_bounds,
    default_chunk,
    is_preferred_forward,
)


def arrays(rows=8, features=64, vocabulary=128, dtype=jnp.bfloat16):
    hidden = normal(0, (rows, features), dtype)
    w = (normal(1, (features, vocabulary)) / 8).astype(dtype)
    return hidden, w, integers(2, (rows,), 0, vocabulary)


@pytest.mark.usefixtures("interpreter")
def test_many_logits_are_the_kernel_s_unless_differentiated(monkeypatch):
    """A gradient is that of the product and `cross_entropy`, whose kernel writes it with the loss."""
    monkeypatch.setattr("pallas_kernels.ops.linear_cross_entropy.api.is_preferred_forward", lambda *_: True)
    hidden, w, labels = arrays()

    def loss(hidden, w):
        return linear_cross_entropy(hidden, w, labels, reduction="mean")

    def loss_of_logits(hidden, w):
        return cross_entropy(hidden @ w, labels, reduction="mean")

    def kernels(function):
        return set(re.findall(r"name=(\w*cross_entropy\w*)", str(jax.make_jaxpr(function)(hidden, w))))

    gradient, expected = (jax.grad(function, (0, 1)) for function in (loss, loss_of_logits))
    assert kernels(loss)
    assert not kernels(loss) & kernels(gradient)
    assert kernels(gradient) == kernels(expected) != set()
    for a, b in zip(gradient(hidden, w), expected(hidden, w), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(
    ("rows", "vocabulary", "is_best"),
    [(8192, 1408, True), (511, 32768, False), (8192, 1023, False), (512, 16384, True)],
)
def test_sizes_at_which_the_kernel_computes_losses_alone(rows, vocabulary, is_best):
    assert is_preferred_forward(rows, vocabulary) == is_best


def test_without_a_gpu_none_is_xla():
    arguments = arrays()
    np.testing.assert_array_equal(
        linear_cross_entropy(*arguments), linear_cross_entropy(*arguments, implementation="xla")
    )
    with pytest.raises(NotImplementedError, match="Hopper"):
        linear_cross_entropy(*arguments, implementation="mosaic")


@pytest.mark.parametrize(
    ("changed", "error", "words"),
    [
        ({"w": jnp.ones((65, 128), jnp.bfloat16)}, ValueError, r"features of hidden \(8, 64\), got \(65, 128\)"),
        ({"w": jnp.ones((64, 128), jnp.float32)}, TypeError, "hidden's dtype bfloat16, got float32"),
        ({"w": jnp.ones((64, 0), jnp.bfloat16)}, ValueError, r"at least one feature and one token, got \(64, 0\)"),
        ({"labels": jnp.zeros(8)}, TypeError, "labels must be integers, got float32"),
        ({"labels": jnp.zeros(7, jnp.int32)}, ValueError, r"labels must be \(8,\), .* got \(7,\)"),
        ({"label_smoothing": 1.5}, ValueError, "from 0 to 1, got 1.5"),
        ({"reduction": "average"}, ValueError, "'none', 'sum' or 'mean', got 'average'"),
        ({"implementation": "mosiac"}, ValueError, "Did you mean 'mosaic'"),
    ],
)
def test_errors_say_what_is_wrong(changed, error, words):
    hidden, w, labels = arrays()
    with pytest.raises(error, match=words):
        linear_cross_entropy(**{"hidden": hidden, "w": w, "labels": labels, **changed})


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("changed", [{"features": 96}, {"vocabulary": 100}, {"dtype": jnp.float32}])
def test_what_the_kernel_refuses(changed):
    arguments = arrays(**changed)
    with pytest.raises(NotImplementedError, match="the kernels take"):
        linear_cross_entropy(*arguments, implementation="mosaic")
    assert "mosaic_gpu" not in str(jax.make_jaxpr(linear_cross_entropy)(*arguments))


@pytest.mark.drawn(1 / 3)
@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize(
    ("rows", "vocabulary", "options"),
    [
        (8, 391, {"reduction": "mean"}),
        (8, 391, {"label_smoothing": 0.1, "z_loss": 1e-3}),
        (72, 133, {"reduction": "sum", "label_smoothing": 0.1}),
    ],
)
def test_columns_of_zeros_behind_an_odd_vocabulary_count_nowhere(rows, vocabulary, options):
    """All logits are far below those of the padding, whose exponentials would overflow."""
    hidden, w, _ = arrays(rows, vocabulary=vocabulary)
    hidden, w = hidden.at[:, 0].set(1), w.at[0].add(-300)
    labels = jnp.arange(rows).at[1].set(vocabulary - 1).at[2].set(-1)

    def results(implementation, dtype=jnp.bfloat16):
        def total(hidden, w):
            return linear_cross_entropy(hidden, w, labels, **options, implementation=implementation).sum()

        return jax.tree.leaves(jax.value_and_grad(total, argnums=(0, 1))(hidden.astype(dtype), w.astype(dtype)))

    exact = results("xla", jnp.float32)
    for own, other, right in zip(results("mosaic"), results("xla"), exact, strict=True):
        assert own.shape == right.shape
        error = np.abs(np.asarray(own, np.float32) - right).max()
        assert error <= 2 * np.abs(np.asarray(other, np.float32) - right).max() + 1e-2 * np.abs(right).max()


@pytest.mark.usefixtures("interpreter")
def test_labels_that_do_not_count():
    """Ignored ones lose nothing and those out of range NaN; neither has a gradient, nor counts towards the mean."""
    hidden, w, _ = arrays()
    labels = jnp.asarray([0, 127, -1, 5, 128, -7, 3, -1])
    loss, pullback = jax.vjp(lambda h: linear_cross_entropy(h, w, labels, implementation="mosaic"), hidden)
    expected = linear_cross_entropy(hidden, w, labels, implementation="xla")
    np.testing.assert_allclose(loss, expected, atol=0.02)
    assert np.isnan(np.asarray(loss)).tolist() == [False] * 4 + [True] * 2 + [False] * 2
    (dhidden,) = pullback(jnp.ones(8))
    is_zero = np.all(np.asarray(dhidden, np.float32) == 0, axis=1)
    assert is_zero.tolist() == [False, False, True, False, True, True, False, True]


@pytest.mark.usefixtures("interpreter")
def test_a_frozen_matrix_has_no_gradient_and_keeps_no_logits():
    hidden, w, labels = arrays()

    def gradient(implementation):
        loss = partial(linear_cross_entropy, reduction="mean", implementation=implementation)
        return jax.jit(jax.grad(loss))(hidden, w, labels).astype(jnp.float32)

    expected = np.asarray(gradient("xla"))
    np.testing.assert_allclose(gradient("mosaic"), expected, atol=2e-2 * np.abs(expected).max())


def test_chunks_cover_the_vocabulary():
    for vocabulary in (128, 256, 320, 4992, 32000, 50304, 128256, 262144):
        chunk = default_chunk(vocabulary, 4096)
        bounds = chunk_bounds(vocabulary, chunk)
        ends = [start + width for start, width in bounds]
        assert [start for start, _ in bounds] == [0, *ends[:-1]] and ends[-1] == vocabulary
        assert all(start % CHUNK_UNIT == 0 for start, _ in bounds)
        if vocabulary > 12 * CHUNK_UNIT:
            assert max(width for _, width in bounds) < vocabulary / 4


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("jax_plugins.xla_cuda13") is None, reason="needs the extra 'deviceless'")
@pytest.mark.parametrize(("implementation", "holds_logits"), [("mosaic", False), ("xla", True)])
def test_a_kernel_never_holds_an_array_of_logits(implementation, holds_logits):
    """Counts the temporary buffers of the loss with its gradients, compiled for an H200."""
    tokens, features, vocabulary = 2048, 1024, 32768  # eight equal chunks: each kernel is compiled once
    hidden = jax.ShapeDtypeStruct((tokens, features), jnp.bfloat16)
    w = jax.ShapeDtypeStruct((features, vocabulary), jnp.bfloat16)
    loss = partial(linear_cross_entropy, reduction="mean", implementation=implementation)
    labels = jax.ShapeDtypeStruct((tokens,), jnp.int32)
    memory = hlo_analysis.capture(jax.value_and_grad(loss, (0, 1)), hidden, w, labels, target="h200").memory
    assert (memory.temp_bytes > 2 * tokens * vocabulary) == holds_logits
