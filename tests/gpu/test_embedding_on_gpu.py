"""Gradients of tables on a real GPU: long runs of equal indices, in both forms, against float64."""

from __future__ import annotations

import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import embedding
from pallas_kernels.primitives.platform import target_device

INDICES = {
    "equal": lambda rng, entries, rows: np.full(entries, rows - 1),
    "few of many": lambda rng, entries, rows: rng.integers(0, 2, entries),
    "frequent and rare": lambda rng, entries, rows: np.minimum(rng.zipf(1.2, entries) - 1, rows),
    "uniform": lambda rng, entries, rows: rng.integers(0, rows, entries),
}


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 256, 257, 20000], ids=lambda rows: f"into {rows}")
@pytest.mark.parametrize("kind", INDICES)
def test_long_runs(kind, rows):
    if not target_device().is_hopper:
        pytest.skip("needs an attached Hopper GPU")
    seed, entries, features = random.SystemRandom().randrange(2**30), 5000, 1024
    rng = np.random.default_rng(seed)
    ids = jnp.asarray(INDICES[kind](rng, entries, rows), jnp.int32)
    table, dy = jnp.zeros((rows, features)), jnp.asarray(rng.standard_normal((entries, features)), jnp.bfloat16)

    @jax.jit
    def gradient(table, dy):
        lookup = lambda table: embedding(table, ids, dtype="bfloat16", implementation="mosaic")  # noqa: E731
        return jax.vjp(lookup, table)[1](dy)[0]

    exact, inside = np.zeros((rows, features)), np.asarray(ids) < rows
    np.add.at(exact, np.asarray(ids)[inside], np.asarray(dy, np.float64)[inside])
    found = gradient(table, dy)
    np.testing.assert_allclose(found, exact, rtol=1e-4, atol=1e-3, err_msg=f"seed={seed}")
    np.testing.assert_array_equal(found, gradient(table, dy))
