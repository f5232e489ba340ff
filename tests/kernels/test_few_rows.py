"""The product of few rows: every cut of the work, and each part of the epilogue."""

from __future__ import annotations

import draws
import jax.numpy as jnp
import numpy as np
import pytest
from products import assert_close, normal, wide

from pallas_kernels import Rope, qkv_projection, quantize
from pallas_kernels.ops.qkv_projection.config import HeadForm, default_config
from pallas_kernels.ops.qkv_projection.mosaic_gpu import qkv_projection_forward
from pallas_kernels.ops.qkv_projection.mosaic_gpu_vjp import Operands
from pallas_kernels.ops.rope.tables import angle_tables
from pallas_kernels.primitives.activations import get_activation
from pallas_kernels.primitives.few_rows.config import FewRowsConfig
from pallas_kernels.primitives.few_rows.kernel import few_rows_product
from pallas_kernels.primitives.few_rows.norm import PrologueNorm
from pallas_kernels.primitives.gemm.epilogue import Epilogue, Rotation
from pallas_kernels.primitives.hopper import SHARED_BYTES

CUTS = {
    "default": (FewRowsConfig(), (1, 128, 192)),
    "tiles of 64": (FewRowsConfig(columns=64, stages=3), (12, 192, 320)),
    "depth shared by two": (FewRowsConfig(columns=128, splits=2), (16, 384, 128)),
    "depth shared by two, one group": (FewRowsConfig(columns=64, splits=2), (3, 192, 64)),
    "depth shared by four, ragged": (FewRowsConfig(columns=128, depth=128, splits=4), (8, 320, 192)),
    "one row": (FewRowsConfig(columns=128, in_flight=1), (1, 320, 192)),
    "two warpgroups": (FewRowsConfig(columns=64, stages=2, warpgroups=2), (8, 320, 320)),
    "two warpgroups, depth shared": (FewRowsConfig(columns=128, splits=2, warpgroups=2), (9, 256, 128)),
}


pytestmark = pytest.mark.usefixtures("interpreter")


@pytest.mark.drawn(1 / 3)
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
    values = draws.integers(seed + 1, (n, k), info.min, info.max + 1, jnp.int8).astype(dtype)
    scales = jnp.abs(normal(seed + 2, groups, n, dtype=jnp.float32)) + 0.1
    (got,) = few_rows_product(x, [values], scales=[scales], config=config)
    w = wide(values).reshape(n, groups, -1) * wide(scales).T[:, :, None]
    assert_close(got, wide(x) @ w.reshape(n, k).T)


def test_integers_in_the_order_of_lanes(seed):
    x, w = normal(seed, 16, 768), quantize(normal(seed + 1, 768, 128))
    config = FewRowsConfig(columns=64, depth=128, splits=2, stages=2)
    (got,) = few_rows_product(x, [w.values], scales=[w.scales], config=config)
    assert_close(got, wide(x) @ wide(w.dequantized(jnp.float32)))


def normalised(x, scale):
    """Rounded where the kernel rounds: x times the scale."""
    factor = 1 / np.sqrt(np.mean(np.square(wide(x)), axis=1, keepdims=True) + 0.1)
    return factor * wide((wide(x) * wide(scale)).astype(jnp.bfloat16))


HEADS = {
    "a head a tile, depth shared by two": (
        FewRowsConfig(columns=128, splits=2, warpgroups=2),
        128,
        9,
        True,
    ),
    "a head a tile, two tiles a block": (
        FewRowsConfig(columns=128, warpgroups=2, in_flight=1),
        128,
        1,
        True,
    ),
    "two heads a tile, depth shared by three": (FewRowsConfig(columns=256, splits=3), 128, 5, True),
    "wide heads": (FewRowsConfig(columns=256, splits=2), 256, 33, False),
}


@pytest.mark.drawn(1 / 2)
@pytest.mark.parametrize("name", HEADS)
def test_heads_of_weights_beside_each_other(name, seed):
    config, size, m, is_normed = HEADS[name]
    k, counts = 192, (2, 1, 1)
    x = normal(seed, m, k)
    weights = [normal(seed + 1 + i, k, count * size) for i, count in enumerate(counts)]
    bias = [normal(seed + 5 + i, count * size) for i, count in enumerate(counts)]
    cos, sin = (normal(seed + 9 + i, m, size // 2, dtype=jnp.float32) for i in range(2))
    rotation = Rotation(size=size, cos=cos, sin=sin)
    scale = normal(seed + 8, k)
    got = few_rows_product(
        x,
        weights,
        bias=bias,
        norm=PrologueNorm(epsilon=0.1, scale=scale) if is_normed else None,
        rotation=rotation,
        is_concatenated=True,
        config=config,
    )
    rows = normalised(x, scale) if is_normed else wide(x)
    for i, (y, w, b) in enumerate(zip(got, weights, bias, strict=True)):
        assert y.shape == (m, w.shape[1])
        exact = rows @ wide(w) + wide(b)
        if i < 2:
            first, second = np.split(exact.reshape(m, -1, size), 2, axis=-1)
            cosine, sine = wide(cos)[:, None], wide(sin)[:, None]
            pairs = [first * cosine - second * sine, second * cosine + first * sine]
            exact = np.concatenate(pairs, axis=-1).reshape(m, -1)
        assert_close(y, exact)


def test_weights_beside_each_other_without_heads(seed):
    x = normal(seed, 3, 128)
    weights = [normal(seed + 1 + i, 128, width) for i, width in enumerate((192, 64))]
    for y, w in zip(few_rows_product(x, weights, is_concatenated=True, config=FewRowsConfig()), weights, strict=True):
        assert_close(y, wide(x) @ wide(w))


def test_heads_lie_whole_in_tiles(seed):
    x, w = normal(seed, 8, 128), normal(seed + 1, 128, 128)
    rotation = Rotation(size=128, cos=jnp.ones((8, 64)), sin=jnp.zeros((8, 64)))
    with pytest.raises(ValueError, match="tiles of 64 columns do not hold whole heads of 128"):
        few_rows_product(x, [w, w], rotation=rotation, is_concatenated=True, config=FewRowsConfig(columns=64))
    with pytest.raises(ValueError, match="only weights beside each other are rotated"):
        few_rows_product(x, [w], rotation=rotation, config=FewRowsConfig())


@pytest.mark.parametrize("splits", [1, 2])
def test_norm_of_rows(splits, seed):
    m, k, n = 9, 192, 128
    x, w, scale = normal(seed, m, k), normal(seed + 1, k, n), normal(seed + 2, k)
    config = FewRowsConfig(columns=64, splits=splits, warpgroups=3 - splits, in_flight=1)
    (got,) = few_rows_product(
        x, [w], norm=PrologueNorm(epsilon=0.1, scale=scale if splits == 2 else None), config=config
    )
    assert_close(got, normalised(x, scale if splits == 2 else jnp.ones(k)) @ wide(w))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_epilogue_after_a_norm_of_rows(dtype, seed):
    m, k, n = 12, 256, 192
    x, w, residual, scale = normal(seed, m, k), normal(seed + 1, k, n), normal(seed + 2, m, n), normal(seed + 3, k)
    bias = normal(seed + 4, n, dtype=jnp.float32)
    got, kept = few_rows_product(
        x,
        [w],
        epilogue=Epilogue(activation=get_activation("few_rows", "relu"), keeps_products=True),
        norm=PrologueNorm(epsilon=0.1, scale=scale.astype(dtype)),
        bias=bias,
        residual=residual,
        config=FewRowsConfig(columns=64, depth=128, stages=2, warpgroups=2),
    )
    product = normalised(x, scale) @ wide(w)
    assert_close(kept, product)
    assert_close(got, np.maximum(product + wide(bias), 0) + wide(residual))


def test_projections_as_a_transposed_product(seed):
    x, *weights = (normal(seed + i, *shape) for i, shape in enumerate([(3, 128), (128, 256), (128, 128), (128, 128)]))
    scale, bias = jnp.array([0.5, 1.0, 2.0]), (jnp.arange(256.0), None, jnp.ones(128))
    positions = jnp.array([0, 77, 1000], jnp.int32)
    config = default_config(3, [256, 128, 128], features=128, head_size=128)
    form, given = HeadForm(size=128, is_rotated=True), Operands(x=x, weights=weights, biases=bias)
    tables = angle_tables(positions, 128, 500_000.0)
    got, _ = qkv_projection_forward(form, given, tables, row_scale=scale, config=config)
    exact = [array.astype(jnp.float32) for array in (x * scale[:, None].astype(x.dtype), *weights)]
    filled = [jnp.zeros(w.shape[1]) if b is None else b for b, w in zip(bias, weights, strict=True)]
    rope = Rope(positions, 500_000.0)
    expected = qkv_projection(*exact, bias=filled, head_size=128, rope=rope, implementation="xla")
    for y, exact in zip(got, expected, strict=True):
        # The reference's angles are float32: at position 1000, beside a bias of 255, it is itself off by 0.014.
        np.testing.assert_allclose(y.astype(jnp.float32), exact.reshape(3, -1), rtol=2**-8, atol=0.02)


@pytest.mark.parametrize(
    ("rows", "head_size", "columns"), [(16, None, 128), (16, 128, 128), (16, 256, 256), (16, 64, None), (65, 128, None)]
)
def test_tiles_of_projections_hold_whole_heads(rows, head_size, columns):
    config = default_config(rows, [512, 256, 256], features=256, head_size=head_size)
    assert (config.columns if isinstance(config, FewRowsConfig) else None) == columns
