"""The cart-pole simulation in one kernel, interpreted."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.primitives.random import key_words, mixed_words
from xlafuse.studies import cartpole
from xlafuse.studies.cartpole import START, apart, drawn

STEPS = 40
"""In which most poles fall."""


@pytest.mark.usefixtures("interpreter")
def test_one_kernel_has_the_trajectories_of_jax():
    keys = jax.random.split(jax.random.key(0), 4)
    states = tuple(jax.random.uniform(key, (128,), minval=-START, maxval=START) for key in keys)
    key = key_words(jax.random.key(5))
    words, numbers = mixed_words(key), jnp.arange(128, dtype=jnp.int32)
    actions, resets = jax.vmap(lambda step: drawn(words, numbers, step))(jnp.arange(STEPS, dtype=jnp.int32))
    expected = jax.block_until_ready(apart()(states, actions, resets))
    ours = cartpole.simulate_drawn(states, key, steps=STEPS)
    for got, wanted in zip(ours, expected, strict=True):
        np.testing.assert_allclose(got, wanted, atol=2e-5)
