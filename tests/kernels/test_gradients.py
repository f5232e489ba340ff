"""The gradient of an input that feeds several matrix products, against float64."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from products import assert_close, normal, wide

from pallas_kernels.primitives import gradients

ROWS, FEATURES = 72, 192


def operands(seed: int, *outputs: int):
    cotangents = [normal(seed + i, ROWS, columns) for i, columns in enumerate(outputs)]
    weights = [normal(seed + 10 + i, FEATURES, columns) for i, columns in enumerate(outputs)]
    return cotangents, weights


def exact(cotangents, weights):
    return np.sum([wide(d) @ wide(w).T for d, w in zip(cotangents, weights, strict=True)], axis=0)


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("outputs", [(128, 128), (256, 64, 128)], ids=["alike", "of other sizes"])
@pytest.mark.parametrize("rows", [ROWS, ROWS - 1])
def test_one_launch_sums_the_products(rows, outputs, seed, monkeypatch):
    monkeypatch.setattr(gradients, "is_faster_summed", lambda *_: True)
    cotangents, weights = operands(seed, *outputs)
    given = [d[:rows] for d in cotangents], weights
    assert_close(gradients.input_gradient(*given), exact(*given))


@pytest.mark.usefixtures("interpreter")
def test_the_launch_under_vmap(seed, monkeypatch):
    monkeypatch.setattr(gradients, "is_faster_summed", lambda *_: True)
    batches = [operands(seed + i, 128, 64) for i in (0, 100)]
    cotangents = [jnp.stack(pair) for pair in zip(*(each[0] for each in batches), strict=True)]
    weights = batches[0][1]
    got = jax.jit(jax.vmap(lambda d: gradients.input_gradient(d, weights)))(cotangents)
    for result, (own, _) in zip(got, batches, strict=True):
        assert_close(result, exact(own, weights))


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("most_joined", [0, 1 << 25], ids=["apart", "joined"])
def test_sums_by_xla(most_joined, seed, monkeypatch):
    monkeypatch.setattr(gradients, "_MOST_JOINED_BYTES", most_joined)
    monkeypatch.delattr(gradients, "gemm")
    given = operands(seed, 128, 64)
    got = wide(gradients.input_gradient(*given))
    np.testing.assert_allclose(got, exact(*given), rtol=2**-7, atol=2**-7 * np.abs(exact(*given)).max())


def test_products_apart_are_the_products(seed):
    x, weights = normal(seed, 16, FEATURES), [normal(seed + 1, FEATURES, 64), normal(seed + 2, FEATURES, 128)]
    for got, weight in zip(gradients.products_apart(x, weights), weights, strict=True):
        assert_close(got, wide(x) @ wide(weight))


@pytest.mark.parametrize("most_merged", [0, 1 << 20], ids=["apart", "merged"])
@pytest.mark.parametrize("rows", [ROWS, ROWS - 1])
def test_weight_gradients(rows, most_merged, seed, monkeypatch):
    monkeypatch.setattr(gradients, "_MOST_MERGED_BYTES", most_merged)
    x, cotangents = normal(seed + 20, rows, FEATURES), [d[:rows] for d in operands(seed, 128, 64)[0]]
    text = str(jax.make_jaxpr(lambda *given: gradients.weight_gradients(*given))(x, cotangents))
    assert text.count("optimization_barrier") == (0 if most_merged else 2)
    assert ("= pad[" in text) == (not most_merged and rows % 8 > 0)
    for got, d in zip(gradients.weight_gradients(x, cotangents), cotangents, strict=True):
        assert_close(got, wide(x).T @ wide(d))
