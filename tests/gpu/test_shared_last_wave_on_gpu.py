"""Stream-K on a real GPU: blocks wait for each other's sums in device memory, which interpret mode only imitates."""

from __future__ import annotations

import random
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import linear
from pallas_kernels.ops.linear.config import problem, tuned_config
from pallas_kernels.primitives.gemm.config import GemmConfig
from pallas_kernels.primitives.gemm.kernel import gemm
from pallas_kernels.primitives.platform import target_device

SHARED = GemmConfig(cluster="m", shares_last_wave=True)
SHAPES = {
    "a few tiles too many": (2048, 2304, 256),
    "edges": (2000, 2240, 320),
    "three waves and a half": (4096, 3584, 192),
    "parts of one step": (2048, 2304, 128),
}
"""Rows, outputs and features; of 66 clusters on 132 multiprocessors."""


@pytest.fixture(autouse=True)
def _needs_hopper():
    if not target_device().is_hopper:
        pytest.skip("needs an attached Hopper GPU")


def normal(*shapes):
    keys = jax.random.split(jax.random.key(random.SystemRandom().randrange(2**30)), len(shapes))
    return [jax.random.normal(key, shape, jnp.bfloat16) for key, shape in zip(keys, shapes, strict=True)]


@pytest.mark.gpu
@pytest.mark.parametrize("config", [SHARED, replace(SHARED, in_flight=0, skew=3)], ids=["default", "skew"])
@pytest.mark.parametrize("name", SHAPES)
def test_shared_tiles_have_the_bits_of_whole_ones(name, config):
    m, n, k = SHAPES[name]
    a, b, bias, residual = normal((m, k), (k, n), (n,), (m, n))

    def run(config):
        return jax.jit(lambda a, b: gemm([a], [b], bias=bias, residual=residual, row_squares=True, config=config))

    want = run(config.unshared)(a, b)
    shared = run(config)
    for _ in range(5):  # blocks meet in another order each time
        for got, each in zip(shared(a, b), want, strict=True):
            np.testing.assert_array_equal(np.asarray(got, np.float32), np.asarray(each, np.float32))


@pytest.mark.gpu
def test_a_layer_that_shares_by_default_has_values_and_gradients():
    x, w, bias, cotangent = normal((2048, 4096), (4096, 19200), (19200,), (2048, 19200))
    w /= 64
    known = problem(x, w, bias, "gelu_tanh", None, x.dtype)
    config = tuned_config(known, len(x))
    assert isinstance(config, GemmConfig)
    assert config.shares_last_wave

    def both(implementation):
        def layer(*arguments):
            return linear(*arguments[:2], bias=arguments[2], activation="gelu_tanh", implementation=implementation)

        y, pull = jax.vjp(layer, x, w, bias)
        return layer(x, w, bias), y, *pull(cotangent)

    for got, want in zip(jax.jit(lambda: both(None))(), jax.jit(lambda: both("xla"))(), strict=True):
        got, want = np.asarray(got, np.float32), np.asarray(want, np.float32)
        assert np.linalg.norm(got - want) <= 1e-2 * np.linalg.norm(want)
