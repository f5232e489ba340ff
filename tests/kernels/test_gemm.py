"""The matrix product itself: every cut of the work, operands that lie the other way, and each part of the epilogue."""

from __future__ import annotations

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest
from products import assert_close, normal, wide

from pallas_kernels.primitives.activations import get_activation
from pallas_kernels.primitives.gemm.config import GemmConfig
from pallas_kernels.primitives.gemm.epilogue import Epilogue, Rotation
from pallas_kernels.primitives.gemm.kernel import gemm
from pallas_kernels.primitives.hopper import SHARED_BYTES

SMALL = GemmConfig(tile_m=64, tile_n=64, warpgroups=1, stages=3)

CUTS = {
    "default": (GemmConfig(), (136, 320, 192)),
    "rows of few": (SMALL, (1, 128, 256)),
    "narrow, deep": (GemmConfig(tile_m=64, tile_n=32, tile_k=128, warpgroups=1, store_columns=32), (24, 96, 192)),
    "nothing in flight": (GemmConfig(in_flight=0, tile_n=128), (72, 128, 192)),
    "cluster along m": (replace(SMALL, cluster=2), (200, 192, 192)),
    "two widths": (GemmConfig(tile_n=256, passes=(256, 128)), (72, 448, 128)),
    "even waves, every other tile from behind": (replace(SMALL, even_waves=True, reverses=True), (328, 192, 192)),
    "the same in clusters, brought by a warp": (
        replace(SMALL, tile_m=128, cluster=2, even_waves=True, reverses=True),
        (800, 128, 192),
    ),
}

pytestmark = pytest.mark.usefixtures("interpreter")


@pytest.mark.drawn(1 / 3)
@pytest.mark.parametrize("name", CUTS)
@pytest.mark.parametrize("fewer", [0, 3], ids=["groups of eight rows", "any rows"])
def test_every_cut_gives_the_product(name, fewer, seed):
    config, (m, n, k) = CUTS[name]
    m = max(1, m - fewer)
    a, b = normal(seed, m, k), normal(seed + 1, k, n)
    (got,) = gemm([a], [b], config=config)
    assert_close(got, wide(a) @ wide(b))


def test_transposed_operand(seed):
    m, n, k = 128, 192, 128
    a, b = normal(seed, m, k, dtype=jnp.float16), normal(seed + 1, k, n, dtype=jnp.float16)
    (got,) = gemm([a], [b.T], transpose_b=True)
    assert_close(got, wide(a) @ wide(b), jnp.float16)


def test_epilogue_order(seed):
    m, n, k = 76, 320, 128
    a, b, residual = normal(seed, m, k), normal(seed + 1, k, n), normal(seed + 2, m, n, dtype=jnp.float32)
    bias, scale = normal(seed + 3, n), normal(seed + 4, m, dtype=jnp.float32)
    got, kept = gemm(
        [a],
        [b],
        epilogue=Epilogue(activation=get_activation("gemm", "relu"), keeps_products=True),
        bias=bias,
        row_scale=scale,
        residual=residual,
        out_dtype=jnp.dtype(jnp.float32),
        config=GemmConfig(tile_m=64, warpgroups=1),
    )
    product = wide(a) @ wide(b) * wide(scale)[:, None]
    np.testing.assert_allclose(
        wide(got), np.maximum(product + wide(bias), 0) + wide(residual), rtol=1e-5, atol=1e-4 * np.abs(product).max()
    )
    assert_close(kept, product)


def test_operands_after_one_another_along_the_depth(seed):
    a, b, c, d = (normal(seed + i, *shape) for i, shape in enumerate([(75, 96), (96, 128), (75, 64), (64, 128)]))
    (got,) = gemm([a, c], [b, d], is_along_depth=True, config=GemmConfig(tile_n=128))
    assert_close(got, wide(a) @ wide(b) + wide(c) @ wide(d))


def test_products_side_by_side(seed):
    a, b, c = normal(seed, 72, 64), normal(seed + 1, 64, 192), normal(seed + 2, 64, 192)
    first, second = gemm([a], [b, c])
    assert_close(first, wide(a) @ wide(b))
    assert_close(second, wide(a) @ wide(c))


def test_tiles_of_two_widths_with_all_that_follows_a_product(seed):
    a, b, c, residual = (normal(seed + i, *s) for i, s in enumerate([(77, 128), (128, 256), (128, 256), (77, 256)]))
    bias = normal(seed + 4, 256)
    config = GemmConfig(tile_n=192, passes=(192, 64))
    got, squares = gemm([a], [b], bias=bias, residual=residual, row_squares=True, config=config)
    assert_close(got, wide(a) @ wide(b) + wide(bias) + wide(residual))
    np.testing.assert_allclose(squares, (wide(got) ** 2).sum(1), rtol=1e-5)
    config = GemmConfig(tile_n=256, passes=(256, 256, 128))
    first, second = gemm([a], [b, c], config=config)
    assert_close(first, wide(a) @ wide(b))
    assert_close(second, wide(a) @ wide(c))


def rotated(y, angles, size):
    cosine, sine = (wide(table)[:, None] for table in angles)
    first, second = np.moveaxis(y.reshape(y.shape[0], -1, 2, size // 2), 2, 0)
    return np.stack([first * cosine - second * sine, second * cosine + first * sine], 2).reshape(y.shape)


@pytest.mark.drawn(1 / 2)
@pytest.mark.parametrize(
    ("config", "size"),
    [
        (replace(SMALL, tile_n=128), 64),
        (replace(SMALL, tile_n=128, cluster=2), 128),
    ],
    ids=["tiles of two heads", "clusters"],
)
@pytest.mark.parametrize("m", [72, 75])
def test_right_operands_beside_each_other(m, config, size, seed):
    k = 128
    x, weights = normal(seed, m, k), [normal(seed + i, k, n) for i, n in enumerate((256, 128, 192), 1)]
    angles = (normal(seed + 4, m, size // 2, dtype=jnp.float32), normal(seed + 5, m, size // 2, dtype=jnp.float32))
    bias, scale = normal(seed + 6, 128), normal(seed + 7, m, dtype=jnp.float32)
    got = gemm(
        [x],
        weights,
        is_concatenated=True,
        rotation=Rotation(size=size, cos=angles[0], sin=angles[1]),
        bias=[None, bias, None],
        row_scale=scale,
        config=config,
    )
    first, second, third = (wide(x) @ wide(w) * wide(scale)[:, None] for w in weights)
    assert_close(got[0], rotated(first, angles, size))
    assert_close(got[1], rotated(second + wide(bias), angles, size))
    assert_close(got[2], third)


@pytest.mark.parametrize("config", [SMALL, replace(SMALL, tile_n=128, cluster=2)], ids=["tiles", "cluster"])
def test_sums_of_rows_squares(config, seed):
    """Of the result as it is rounded, with tiles that end outside it."""
    a, b, residual = normal(seed, 72, 64), normal(seed + 1, 64, 320), normal(seed + 2, 72, 320)
    got, squares = gemm([a], [b], residual=residual, row_squares=True, config=config)
    assert_close(got, wide(a) @ wide(b) + wide(residual))
    np.testing.assert_allclose(squares, (wide(got) ** 2).sum(1), rtol=1e-5)


def test_stages_are_those_that_fit():
    sizes = {"itemsize": 2, "products": 1, "stored_bytes": 2}
    fitted = GemmConfig(stages=20).fitted(**sizes)
    stage = (128 + 256) * 64 * 2
    assert fitted.stages * stage < SHARED_BYTES < (fitted.stages + 1) * stage
    assert GemmConfig(stages=3).fitted(**sizes).stages == 3
