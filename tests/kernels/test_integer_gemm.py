"""The product of many rows with integer weights."""

from __future__ import annotations

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest
from draws import integers, normal

from pallas_kernels.primitives.activations import get_activation
from pallas_kernels.primitives.gemm.config import GemmConfig
from pallas_kernels.primitives.gemm.epilogue import Epilogue
from pallas_kernels.primitives.hopper import SHARED_BYTES
from pallas_kernels.primitives.integer_gemm.kernel import integer_gemm
from pallas_kernels.primitives.integer_gemm.store import PIECE
from pallas_kernels.primitives.integers import pack, unpack
from pallas_kernels.specs import seeds_of

pytestmark = pytest.mark.usefixtures("interpreter")

SMALL = GemmConfig(tile_m=64, tile_n=128, tile_k=64, stages=2, store_slots=1)


def operands(seed, m, k, n, dtype):
    own = seeds_of(seed, 4)
    least, most = (-127, 127) if dtype == jnp.uint8 else (jnp.iinfo(dtype).min, jnp.iinfo(dtype).max)
    x = normal(own[0], (m, k), jnp.bfloat16)
    values = integers(own[1], (n, k), least, most + 1, jnp.int8)
    scales = 0.1 + jnp.abs(normal(own[2], (n,)))
    residual = normal(own[3], (m, n))
    exact = np.asarray(x, np.float64) @ (np.asarray(values, np.float64) * np.asarray(scales, np.float64)[:, None]).T
    return x, pack(values) if dtype == jnp.uint8 else values.astype(dtype), scales, residual, exact


@pytest.mark.drawn(1 / 3)
@pytest.mark.parametrize(
    ("config", "sizes", "dtype"),
    [
        (SMALL, (136, 128, 192), jnp.int8),
        (replace(SMALL, tile_m=128, tile_k=128, store_slots=2), (67, 256, 64), jnp.int8),
        (replace(SMALL, tile_k=256), (64, 512, 128), jnp.int4),
        (SMALL, (131, 128, 192), jnp.uint8),
        (replace(SMALL, tile_m=104, tile_n=192, tile_k=128, warpgroups=3, store_slots=2), (67, 256, 64), jnp.uint8),
    ],
)
def test_product(config, sizes, dtype, seed):
    m, k, n = sizes
    x, values, scales, _, exact = operands(seed, m, k, n, dtype)
    y = integer_gemm(x, values, scales, epilogue=Epilogue(), config=config)
    assert y.dtype == x.dtype
    np.testing.assert_allclose(
        np.asarray(y, np.float64), exact, rtol=float(jnp.finfo(y.dtype).eps), atol=1e-5 * np.abs(exact).max()
    )


@pytest.mark.parametrize("dtype", [jnp.int8, jnp.uint8])
def test_epilogue_order(dtype, seed):
    m, k, n = 72, 128, 192
    x, values, scales, residual, exact = operands(seed, m, k, n, dtype)
    bias = jnp.linspace(-2, 2, n, dtype=jnp.float32)
    y = integer_gemm(
        x,
        values,
        scales,
        epilogue=Epilogue(activation=get_activation("integer_gemm", "relu")),
        bias=bias,
        residual=residual,
        out_dtype=jnp.dtype(jnp.float32),
        config=SMALL,
    )
    expected = np.maximum(exact + np.asarray(bias), 0) + np.asarray(residual)
    np.testing.assert_allclose(np.asarray(y), expected, rtol=1e-5, atol=1e-4 * np.abs(exact).max())


def test_lanes_hold_what_their_products_take():
    values = jnp.arange(32, dtype=jnp.int8).reshape(2, 16) * jnp.int8(4) - jnp.int8(63)
    held = pack(values)
    np.testing.assert_array_equal(unpack(held), values)
    halves = np.asarray(held).view(np.uint16)[0].reshape(4, 2)
    for lane, half in enumerate(halves):
        pairs = np.concatenate([half, half << 8 | half >> 8])
        signed = np.where(pairs >> 15, -(pairs & 127).astype(int), pairs & 127)
        np.testing.assert_array_equal(signed, values[0, jnp.array([0, 1, 8, 9]) + 2 * lane])


def test_stages_are_those_that_fit():
    config = GemmConfig(tile_n=128, tile_k=128, stages=20)
    fitted = config.fitted(weight_bits=8, itemsize=2, stored_bytes=0, other_bytes=2 * 128 * PIECE * 2)
    stage = 128 * (128 + 2 * 128)
    assert fitted.stages * stage < SHARED_BYTES < (fitted.stages + 2) * stage
