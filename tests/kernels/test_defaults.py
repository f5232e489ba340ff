"""Which calls without an implementation run kernels, forward and where a gradient is taken, on an H200."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax._src.mesh import AbstractDevice
from jax.interpreters.partial_eval import dce_jaxpr
from jax.sharding import AbstractMesh, AxisType

import pallas_kernels as pk
from pallas_kernels.ops.qkv_projection.config import gemm_config
from pallas_kernels.primitives.gemm.config import EVEN, NARROW, GemmConfig

H200 = AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="gpu")


@pytest.fixture(autouse=True)
def on_h200():
    mesh = AbstractMesh((1,), ("_device",), axis_types=(AxisType.Auto,), abstract_device=H200)
    with jax.sharding.use_abstract_mesh(mesh):
        yield


def array(*shape: int, dtype: Any = jnp.bfloat16) -> Any:
    return jax.ShapeDtypeStruct(shape, dtype)


def quantized(features: int, outputs: int) -> Any:
    return jax.eval_shape(lambda w: pk.quantize(w, bits=8), array(features, outputs))


def normed(x, w, residual=None):
    return pk.norm_linear(x, w, norm=pk.Norm(jnp.ones(x.shape[1], x.dtype), kind="layer"), residual=residual)


def gelu(x, bias):
    return pk.bias_activation(x, bias, activation="gelu")


def dce(function, arguments) -> Any:
    """The traced function without what its results do not need."""
    traced = jax.jit(function).trace(*arguments).jaxpr.jaxpr
    return dce_jaxpr(traced, [True] * len(traced.outvars))[0]


@pytest.mark.parametrize(
    ("function", "arguments", "forward", "gradient"),
    [
        (lambda x, w: pk.quantized_linear(x, w), (array(128, 4096), quantized(4096, 4096)), True, True),
        (lambda x, w: pk.quantized_linear(x, w), (array(2048, 4096), quantized(4096, 4096)), True, False),
        (lambda x, w: pk.quantized_linear(x, w), (array(32, 512), quantized(512, 8192)), True, True),
        (
            lambda x, w: pk.quantized_linear(x, w, activation="gelu"),
            (array(16, 4096), quantized(4096, 4096)),
            True,
            False,
        ),
        (normed, (array(640, 896), array(896, 896)), False, True),
        (normed, (array(640, 896), array(896, 896), array(640, 896)), False, False),
        (lambda x: pk.gated_activation(x, activation="silu"), (array(4096, 254),), False, False),
        (lambda x: pk.gated_activation(x, activation="silu"), (array(4096, 256),), True, True),
        (gelu, (array(4096, 128), array(128)), True, True),
        (gelu, (array(4096, 128, dtype=jnp.float32), array(128)), False, False),
    ],
)
def test_where_kernels_run(function, arguments, forward, gradient):
    def with_gradient(x, *others):
        return jax.value_and_grad(lambda x: function(x, *others).astype(jnp.float32).sum())(x)

    for run, has_kernel in ((function, forward), (with_gradient, gradient)):
        assert ("mpmd_map[" in str(dce(run, arguments))) == has_kernel


@pytest.mark.parametrize(
    ("rows", "widths", "head_size", "config"),
    [
        (128, (1024, 1024, 1024), 64, NARROW),
        (4353, (256, 128, 128), 128, EVEN),
        (3264, (2048, 512, 512), 128, EVEN),
        (8192, (4096, 1024, 1024), 128, EVEN),
        (128, (1024, 1024, 1024), 256, GemmConfig()),  # a tile holds whole heads
    ],
)
def test_tiles_of_projections(rows, widths, head_size, config):
    assert gemm_config(rows, widths, head_size=head_size) == config
