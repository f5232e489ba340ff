"""Which products of few rows with a norm inside have their steps shared by warps."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax._src.mesh import AbstractDevice
from jax.sharding import AbstractMesh, AxisType

from pallas_kernels.ops.linear.config import problem
from pallas_kernels.ops.norm_linear.config import normed_config
from pallas_kernels.ops.qkv_projection.config import default_config
from pallas_kernels.primitives.few_rows.config import ONE_WARPGROUP, FewRowsConfig, MmaConfig, choose_few_rows
from pallas_kernels.primitives.few_rows.mma_kernel import fits
from pallas_kernels.primitives.few_rows.norm import RowNorm

H200 = AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="gpu")
HEADS = MmaConfig(columns=128, depth=128, warpgroups=2)


def described(*shape: int, dtype: Any = jnp.bfloat16) -> Any:
    return jax.ShapeDtypeStruct(shape, dtype)


@pytest.fixture(autouse=True)
def on_h200():
    mesh = AbstractMesh((1,), ("_device",), axis_types=(AxisType.Auto,), abstract_device=H200)
    with jax.sharding.use_abstract_mesh(mesh):
        yield


@pytest.mark.parametrize(
    ("rows", "features", "outputs", "is_inside", "cut"),
    [
        (1, 4096, 4096, True, MmaConfig()),
        (16, 4096, 4096, True, MmaConfig()),
        (17, 4096, 4096, False, None),
        (16, 14336, 4096, False, None),
        (16, 4096, 6144, True, None),
        (16, 4096, 8192, True, None),
        (16, 4096, 14336, True, HEADS),
        (16, 4096, 28672, False, None),  # more tiles than run at once
    ],
)
def test_normed_products_of_few_rows(rows, features, outputs, is_inside, cut):
    x, w = described(rows, features), described(features, outputs)
    config = normed_config(problem(x, w, None, None, None, jnp.dtype(jnp.bfloat16)), rows)
    assert isinstance(config, FewRowsConfig)
    assert (config.fuses_norm, config.mma) == (is_inside, cut)


@pytest.mark.parametrize("rows", [1, 2, 8, 9, 16])
def test_a_warpgroup_alone_where_tiles_are_nearly_enough(rows):
    assert choose_few_rows(rows, 4096, 4096) == ONE_WARPGROUP


def test_projections_have_heads_of_one_block():
    cuts = [
        getattr(default_config(16, (1024, 256, 256), features=1024, head_size=size), "mma", None)
        for size in (64, 128, 256)
    ]
    assert cuts == [None, HEADS, None]


@pytest.mark.parametrize(
    ("rows", "features", "widths", "splits"),
    [
        (8, 9152, (384, 128, 128), 8),
        (8, 8192, (2048, 512, 512), 4),
        (8, 4096, (4096, 1024, 1024), 1),  # enough tiles
        (8, 2048, (384, 128, 128), 1),
    ],
)
def test_deep_projections_to_few_heads_split_k(rows, features, widths, splits):
    config = default_config(rows, widths, features=features, head_size=128)
    assert isinstance(config, FewRowsConfig)
    assert (config.splits, config.mma is None) == (splits, splits > 1)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, True),
        ({"rows": 17}, False),
        ({"widths": (4096, 1024, 1000)}, False),
        ({"widths": (128 * 133,)}, False),  # more blocks than run at once
        ({"features": 4096 + 64}, False),
        ({"features": 14336}, False),  # the scale takes the place of a stage
        ({"head_size": 256}, False),
        ({"norm": RowNorm(epsilon=1e-6)}, True),
        ({"norm": RowNorm(epsilon=1e-6, scale=described(4096, dtype=jnp.float32))}, False),
    ],
)
def test_what_fits(changes, expected):
    norm = RowNorm(epsilon=1e-6, scale=described(4096))
    usual: dict[str, Any] = {"rows": 16, "widths": (4096, 1024), "features": 4096, "head_size": 128, "norm": norm}
    assert fits(HEADS, **{**usual, **changes}) is expected
