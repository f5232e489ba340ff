"""The product of many rows with integer weights."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.primitives.activations import get_activation
from pallas_kernels.primitives.gemm.config import SHARED_BYTES
from pallas_kernels.primitives.gemm.epilogue import Epilogue
from pallas_kernels.primitives.integer_gemm.config import IntegerGemmConfig
from pallas_kernels.primitives.integer_gemm.kernel import integer_gemm

pytestmark = pytest.mark.usefixtures("interpreter")

SMALL = IntegerGemmConfig(rows=64, stages=2, store_rows=64)


def operands(seed, m, k, n, dtype):
    keys = jax.random.split(jax.random.key(seed), 4)
    info = jnp.iinfo(dtype)
    x = jax.random.normal(keys[0], (m, k), jnp.float32).astype(jnp.bfloat16)
    values = jax.random.randint(keys[1], (n, k), info.min, info.max + 1, jnp.int8).astype(dtype)
    scales = 0.1 + jnp.abs(jax.random.normal(keys[2], (n,), jnp.float32))
    residual = jax.random.normal(keys[3], (m, n), jnp.float32)
    exact = np.asarray(x, np.float64) @ (np.asarray(values, np.float64) * np.asarray(scales, np.float64)[:, None]).T
    return x, values, scales, residual, exact


@pytest.mark.parametrize(
    ("config", "sizes", "dtype"),
    [
        (SMALL, (136, 128, 192), jnp.int8),
        (IntegerGemmConfig(rows=128, depth=128), (67, 256, 64), jnp.int8),
        (IntegerGemmConfig(rows=64, depth=256, store_slots=1), (64, 512, 128), jnp.int4),
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


def test_epilogue_order(seed):
    x, values, scales, residual, exact = operands(seed, 72, 128, 192, jnp.int8)
    bias = jnp.linspace(-2, 2, 192, dtype=jnp.float32)
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


def test_stages_are_those_that_fit():
    fitted = IntegerGemmConfig(stages=20).fitted(weight_bits=8, itemsize=2, out_itemsize=2)
    stage = 64 * (128 + 2 * 256)
    assert fitted.stages * stage < SHARED_BYTES < (fitted.stages + 2) * stage
