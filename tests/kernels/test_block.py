"""The block's own use of kernels, interpreted."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from draws import normal

from xlafuse.models import FusionPlan, block_function, get_preset, support
from xlafuse.models.functional import initial_params


@pytest.mark.usefixtures("interpreter")
def test_norms_within_products_and_apart_are_the_same():
    config = dataclasses.replace(get_preset("tiny"), num_heads=4, num_kv_heads=2, head_dim=128)
    sites = dict.fromkeys(("qkv_projection", "up_projection"), "mosaic")
    apart = FusionPlan(**sites)
    together = FusionPlan(**sites, attention_norm="mosaic", mlp_norm="mosaic")
    generator = np.random.default_rng(5)
    params = jax.tree.map(lambda w: w * (1 + 0.3 * generator.standard_normal(w.shape)), initial_params(config))
    x = normal(0, (1, 3, 256), jnp.bfloat16)
    assert all(support.takes_norm(site, config, 3) for site in sites)
    found, other = (jax.jit(block_function(config, (1, 3), plan=plan)[0])(params, x) for plan in (together, apart))
    np.testing.assert_allclose(found.astype(np.float32), other.astype(np.float32), atol=0.05, rtol=0.02)
