"""The product of many rows with integer weights."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from draws import integers, normal

from pallas_kernels.primitives import platform
from pallas_kernels.primitives.activations import get_activation
from pallas_kernels.primitives.gemm.config import SHARED_BYTES
from pallas_kernels.primitives.gemm.epilogue import Epilogue
from pallas_kernels.primitives.integer_gemm.config import IntegerGemmConfig
from pallas_kernels.primitives.integer_gemm.kernel import integer_gemm
from pallas_kernels.primitives.integer_gemm.mma_kernel import IntegerMmaConfig, integer_mma_product
from pallas_kernels.primitives.integer_gemm.packing import pack, unpack
from pallas_kernels.primitives.integer_gemm.problem import WorkSplit
from pallas_kernels.specs import seeds_of

pytestmark = pytest.mark.usefixtures("interpreter")

SMALL = IntegerGemmConfig(rows=64, stages=2, store_rows=64)


def operands(seed, m, k, n, dtype):
    own = seeds_of(seed, 4)
    least, most = (-127, 127) if dtype == jnp.uint8 else (jnp.iinfo(dtype).min, jnp.iinfo(dtype).max)
    x = normal(own[0], (m, k), jnp.bfloat16)
    values = integers(own[1], (n, k), least, most + 1, jnp.int8)
    scales = 0.1 + jnp.abs(normal(own[2], (n,)))
    residual = normal(own[3], (m, n))
    exact = np.asarray(x, np.float64) @ (np.asarray(values, np.float64) * np.asarray(scales, np.float64)[:, None]).T
    return x, pack(values) if dtype == jnp.uint8 else values.astype(dtype), scales, residual, exact


@pytest.mark.parametrize(
    ("config", "sizes", "dtype"),
    [
        (SMALL, (136, 128, 192), jnp.int8),
        (IntegerGemmConfig(rows=128, depth=128), (67, 256, 64), jnp.int8),
        (IntegerGemmConfig(rows=64, depth=256, store_slots=1), (64, 512, 128), jnp.int4),
        (IntegerGemmConfig(rows=64, stages=2, in_parts=True, last_rows=32), (136, 128, 128), jnp.uint8),
        (IntegerGemmConfig(rows=64, stages=2, cluster=2, last_rows=32), (131, 128, 192), jnp.uint8),
        (IntegerGemmConfig(rows=104, store_rows=104, warpgroups=3, depth=128, in_parts=True), (67, 256, 64), jnp.uint8),
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


@pytest.mark.parametrize(("cluster", "rows"), [(1, 120), (2, 120), (2, 115)])
def test_tiles_of_several_heights(cluster, rows, seed, monkeypatch):
    monkeypatch.setattr(platform, "_INTERPRETED_CORES", 7 * cluster)
    config = IntegerGemmConfig(rows=64, stages=2, in_parts=True, cluster=cluster, has_work_split=True)
    columns = 6 * cluster * config.columns
    assert WorkSplit(columns=6, blocks=7).is_even
    x, values, scales, _, exact = operands(seed, rows, 128, columns, jnp.uint8)
    y = integer_gemm(x, values, scales, epilogue=Epilogue(), config=config)
    np.testing.assert_allclose(np.asarray(y, np.float64), exact, rtol=2**-8, atol=1e-5 * np.abs(exact).max())


@pytest.mark.parametrize(
    ("product", "config", "sizes", "dtype"),
    [
        (integer_gemm, SMALL, (72, 128, 192), jnp.int8),
        (integer_mma_product, IntegerMmaConfig(), (16, 1024, 64), jnp.uint8),
        (integer_mma_product, IntegerMmaConfig(warpgroups=1), (3, 1024, 64), jnp.uint8),
    ],
)
def test_epilogue_order(product, config, sizes, dtype, seed):
    m, k, n = sizes
    x, values, scales, residual, exact = operands(seed, m, k, n, dtype)
    bias = jnp.linspace(-2, 2, n, dtype=jnp.float32)
    y = product(
        x,
        values,
        scales,
        epilogue=Epilogue(activation=get_activation("integer_gemm", "relu")),
        bias=bias,
        residual=residual,
        out_dtype=jnp.dtype(jnp.float32),
        config=config,
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
    fitted = IntegerGemmConfig(stages=20).fitted(weight_bits=8, itemsize=2, out_itemsize=2)
    stage = 64 * (128 + 2 * 256)
    assert fitted.stages * stage < SHARED_BYTES < (fitted.stages + 2) * stage
