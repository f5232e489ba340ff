"""Which configurations products of few rows have."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax._src.mesh import AbstractDevice
from jax.sharding import AbstractMesh, AxisType

from pallas_kernels.ops._products.layer import Layer, LayerArrays
from pallas_kernels.ops.linear.config import tuned_config, tuned_key
from pallas_kernels.ops.qkv_projection.config import default_config
from pallas_kernels.primitives.few_rows.config import FewRowsConfig

H200 = AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="gpu")


def described(*shape: int, dtype: Any = jnp.bfloat16) -> Any:
    return jax.ShapeDtypeStruct(shape, dtype)


@pytest.fixture(autouse=True)
def on_h200():
    mesh = AbstractMesh((1,), ("_device",), axis_types=(AxisType.Auto,), abstract_device=H200)
    with jax.sharding.use_abstract_mesh(mesh):
        yield


@pytest.mark.parametrize(
    ("rows", "features", "outputs", "is_inside"),
    [
        (1, 4096, 4096, True),
        (16, 4096, 4096, True),
        (17, 4096, 4096, False),
        (16, 14336, 4096, False),
        (16, 4096, 6144, True),
        (16, 4096, 8192, True),
        (16, 4096, 14336, True),
        (16, 4096, 28672, False),  # more tiles than run at once
    ],
)
def test_normed_products_of_few_rows(rows, features, outputs, is_inside):
    x, w = described(rows, features), described(features, outputs)
    known = tuned_key(Layer(out_dtype=jnp.dtype(jnp.bfloat16)), LayerArrays(x, w))
    config = tuned_config(known, rows, is_normed=True)
    assert isinstance(config, FewRowsConfig)
    assert config.fuses_norm == is_inside


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
    assert config.splits == splits
