"""The product of few rows: every cut of the work, and each part of the epilogue."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.primitives.activations import get_activation
from pallas_kernels.primitives.few_rows.config import FewRowsConfig
from pallas_kernels.primitives.few_rows.kernel import few_rows_product
from pallas_kernels.primitives.gemm.config import SHARED_BYTES
from pallas_kernels.primitives.gemm.epilogue import Epilogue

CUTS = {
    "default": (FewRowsConfig(), (1, 128, 192)),
    "tiles of 64": (FewRowsConfig(columns=64, stages=3), (12, 192, 320)),
    "depth shared by two": (FewRowsConfig(columns=128, splits=2), (16, 384, 128)),
    "depth shared by two, one group": (FewRowsConfig(columns=64, splits=2), (3, 192, 64)),
    "depth shared by four, ragged": (FewRowsConfig(columns=128, depth=128, splits=4), (8, 320, 192)),
    "two warpgroups": (FewRowsConfig(columns=64, stages=2, warpgroups=2), (8, 320, 320)),
    "two warpgroups, depth shared": (FewRowsConfig(columns=128, splits=2, warpgroups=2), (9, 256, 128)),
    "a block a tile": (FewRowsConfig(columns=64, persistent=False, blocks_per_core=2), (20, 64, 192)),
}


pytestmark = pytest.mark.usefixtures("interpreter")


def normal(seed, *shape, dtype=jnp.bfloat16):
    return jax.random.normal(jax.random.key(seed), shape, jnp.float32).astype(dtype)


def wide(array):
    return np.asarray(array, np.float64)


def assert_close(got, exact, dtype=jnp.bfloat16):
    """To the rounding of the result, and of float32 sums."""
    eps = float(jnp.finfo(dtype).eps)
    np.testing.assert_allclose(wide(got), exact, rtol=eps, atol=1e-5 * np.abs(exact).max())


@pytest.mark.parametrize("name", CUTS)
def test_every_cut_gives_the_product(name, seed):
    config, (m, k, n) = CUTS[name]
    x, w = normal(seed, m, k), normal(seed + 1, k, n)
    (got,) = few_rows_product(x, [w], config=config)
    assert got.shape == (m, n)
    assert_close(got, wide(x) @ wide(w))


@pytest.mark.parametrize("splits", [1, 2])
def test_epilogue_order(splits, seed):
    m, k, n = 5, 128, 192
    x, w, residual = normal(seed, m, k), normal(seed + 1, k, n), normal(seed + 2, m, n, dtype=jnp.float32)
    bias, scale = normal(seed + 3, n), normal(seed + 4, m, dtype=jnp.float32)
    got, kept = few_rows_product(
        x,
        [w],
        epilogue=Epilogue(activation=get_activation("few_rows", "relu"), keeps_products=True),
        bias=bias,
        row_scale=scale,
        residual=residual,
        out_dtype=jnp.dtype(jnp.float32),
        config=FewRowsConfig(splits=splits),
    )
    product = wide(x) @ wide(w) * wide(scale)[:, None]
    np.testing.assert_allclose(
        wide(got), np.maximum(product + wide(bias), 0) + wide(residual), rtol=1e-5, atol=1e-4 * np.abs(product).max()
    )
    assert_close(kept, product)


@pytest.mark.parametrize("splits", [1, 2])
def test_gated(splits, seed):
    x, gate, up = (normal(seed + i, *s, dtype=jnp.float16) for i, s in enumerate([(8, 128), (128, 128), (128, 128)]))
    (got,) = few_rows_product(
        x,
        [gate, up],
        epilogue=Epilogue(activation=get_activation("few_rows", "relu"), gated=True),
        config=FewRowsConfig(columns=128, splits=splits),
    )
    assert_close(got, np.maximum(wide(x) @ wide(gate), 0) * (wide(x) @ wide(up)), jnp.float16)


def test_stages_are_those_that_fit():
    fitted = FewRowsConfig(stages=100).fitted(stage_bytes=16384, other_bytes=4096)
    assert fitted is not None
    assert fitted.stages * 16384 + 4096 < SHARED_BYTES < (fitted.stages + 1) * 16384 + 4096
    halved = FewRowsConfig(stages=100, blocks_per_core=2).fitted(stage_bytes=16384, other_bytes=4096)
    assert halved is not None
    assert 2 * (halved.stages * 16384 + 4096) < SHARED_BYTES
    assert FewRowsConfig(warpgroups=4).fitted(stage_bytes=32768, other_bytes=4096) is None


QUANTIZED = {
    "int8, a scale an output": (FewRowsConfig(columns=64, depth=128, stages=2), (5, 384, 192), jnp.int8, 1),
    "int8, depth shared": (FewRowsConfig(columns=128, depth=128, splits=2), (16, 320, 128), jnp.int8, 1),
    "int8, groups of 64": (FewRowsConfig(columns=64, depth=128, stages=2), (8, 640, 64), jnp.int8, 10),
    "int4, groups of 128": (FewRowsConfig(columns=64, depth=256, splits=2), (1, 512, 192), jnp.int4, 4),
}


@pytest.mark.parametrize("name", QUANTIZED)
def test_integer_weights(name, seed):
    config, (m, k, n), dtype, groups = QUANTIZED[name]
    x = normal(seed, m, k)
    info = jnp.iinfo(dtype)
    values = jax.random.randint(jax.random.key(seed + 1), (n, k), info.min, info.max + 1, jnp.int8).astype(dtype)
    scales = jnp.abs(normal(seed + 2, groups, n, dtype=jnp.float32)) + 0.1
    (got,) = few_rows_product(x, [values], scales=[scales], config=config)
    w = wide(values).reshape(n, groups, -1) * wide(scales).T[:, :, None]
    assert_close(got, wide(x) @ w.reshape(n, k).T)
