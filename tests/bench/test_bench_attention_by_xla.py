"""XLA's backward pass of attention alone, the baseline of the kernels' in the benchmark."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import get_op
from pallas_kernels.specs import plain
from xlafuse.bench import attention_by_xla

ATTENTION, SEED = get_op("attention"), 3


@pytest.mark.parametrize("is_causal", [False, True])
def test_one_head_at_a_time_gives_the_gradients_of_all(monkeypatch, is_causal):
    arguments = {**plain(ATTENTION.arg_specs[0].make(SEED)), "is_causal": is_causal}
    dout = jax.random.normal(jax.random.key(SEED), arguments["query"].shape, jnp.bfloat16)
    want = attention_by_xla.backward(arguments, dout)
    monkeypatch.setattr(attention_by_xla, "SCORES_BYTES", 0)
    for one, other in zip(attention_by_xla.backward(arguments, dout), want, strict=True):
        np.testing.assert_allclose(np.float32(one), np.float32(other), atol=0.03)
