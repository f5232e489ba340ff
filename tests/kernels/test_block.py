"""The block's own use of kernels, interpreted."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from draws import normal

from xlafuse.fusion import fuse
from xlafuse.models import FusionPlan, block_function, get_preset
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
    found, other = (jax.jit(block_function(config, (1, 3), plan=plan)[0])(params, x) for plan in (together, apart))
    np.testing.assert_allclose(found.astype(np.float32), other.astype(np.float32), atol=0.05, rtol=0.02)


def gated_layer(x, scale, gate, up, down):
    value = x.astype(jnp.float32)
    normed = (value * jax.lax.rsqrt(jnp.mean(value**2, -1, keepdims=True) + 1e-6) * scale).astype(x.dtype)
    return x + (jax.nn.silu(normed @ gate) * (normed @ up)) @ down


@pytest.mark.usefixtures("interpreter")
def test_a_fused_residual_stream_has_the_gradient_of_the_program(seed):
    """The norm is computed in the product's launch, and in a launch of its own where the program is differentiated."""
    weights = [normal(seed + i, shape, jnp.bfloat16) / 16 for i, shape in enumerate([(256, 4096)] * 2 + [(4096, 256)])]
    arguments = [normal(seed + 3, (3, 256), jnp.bfloat16), 1 + 0.1 * normal(seed + 4, (256,)), *weights]
    told = []

    def gradients(function):
        return jax.grad(lambda *own: jnp.sum(jnp.sin(function(*own).astype(jnp.float32))), range(5))(*arguments)

    found, expected = gradients(fuse(gated_layer, report=told.append)), gradients(gated_layer)
    assert ("gated_linear", "mosaic") in [(site.operation, site.implementation) for site in told[0].taken]
    for one, other in zip(found, expected, strict=True):
        one, other = (np.asarray(each, np.float32) for each in (one, other))
        assert np.linalg.norm(one - other) < 0.02 * np.linalg.norm(other), f"seed={seed}"
