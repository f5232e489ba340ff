"""`fuse` on several devices: its report names the mesh axes, and a model computes what one device does."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from programs import gemma

import xlafuse
from xlafuse.fusion import Report
from xlafuse.fusion.worth import COPIES

H200 = AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="gpu")
ONE = AbstractMesh((1,), ("one",), axis_types=(AxisType.Auto,), abstract_device=H200)


def fused_over(devices: int, function: Any, *arguments: tuple[Any, Any, Any]) -> Report:
    """Traces a function of arguments (shape, dtype, spec) over an explicit mesh, and returns the report."""
    mesh = AbstractMesh((devices,), ("data",), axis_types=(AxisType.Explicit,), abstract_device=H200)
    told: list[Report] = []
    with jax.sharding.use_abstract_mesh(mesh):
        structs = [jax.ShapeDtypeStruct(*each, sharding=NamedSharding(mesh, spec)) for *each, spec in arguments]
        jax.eval_shape(xlafuse.fuse(function, report=told.append), *structs)
    return told[0]


@pytest.mark.parametrize("devices", [1, 2])
def test_a_site_names_the_explicit_axes_that_cut_its_arrays(devices):
    rows, scale = ((8192, 4096), jnp.bfloat16, P("data")), ((4096,), jnp.bfloat16, P())
    (site,) = fused_over(devices, gemma.rms_norm, rows, scale).taken
    assert (site.operation, site.implementation) == ("rms_norm", "mosaic")
    assert site.parts == f"x ({8192 // devices}, 4096) by data, scale (4096,) whole"
    assert str(site).endswith(f"mosaic on {site.parts}")


def test_what_a_kernel_copies_is_compared_with_one_devices_parts():
    def function(x, w, bias):
        return jax.nn.gelu(x @ w.astype(x.dtype) + bias)

    x, w, bias = ((4096, 1024), jnp.bfloat16, P("data")), ((1024, 8192), jnp.float32, P()), ((8192,), jnp.bfloat16, P())
    (site,) = fused_over(2, function, x, w, bias).taken  # keeps 2048 x 8192, and copies the weights
    assert site.operation == "linear"
    (refused,) = fused_over(8, function, x, w, bias).refused  # would keep 512 x 8192
    assert refused.reason == COPIES


AXES = {"query": P(None, "t"), "key": P(None, "t"), "value": P(None, "t"), "out": P("t"), "down": P("t")}
AXES |= {"gate": P("d", "t"), "up": P("d", "t"), "embedding": P("t")}
"""The axes of each weight; norms' scales are whole."""


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::pallas_kernels.KernelWarning")
def test_a_models_gradient_on_eight_devices_is_that_of_one(monkeypatch):
    devices = jax.devices("cpu")
    if len(devices) < 8:
        pytest.skip("needs eight simulated CPU devices; run this folder by itself")
    for name, size in {"WIDTH": 256, "HIDDEN": 1024, "VOCABULARY": 512, "BATCH": 4, "LENGTH": 128}.items():
        monkeypatch.setattr(gemma, name, size)
    structs, tokens = gemma.arguments()
    rng = np.random.default_rng(0)
    weights = jax.tree.map(
        lambda each: jnp.asarray(rng.standard_normal(each.shape) * each.shape[0] ** -0.5, each.dtype), structs
    )
    tokens = jnp.asarray(rng.integers(0, 512, tokens.shape), jnp.int32)
    told: list[Report] = []

    def gradient(model: Any) -> Any:
        return jax.value_and_grad(lambda weights, tokens: jnp.sum(jnp.sin(model(weights, tokens)).astype(jnp.float32)))

    mesh = jax.make_mesh((4, 2), ("d", "t"), axis_types=(AxisType.Auto,) * 2, devices=devices[:8])
    named = jax.tree_util.tree_map_with_path(lambda path, _: NamedSharding(mesh, AXES.get(path[-1].key, P())), weights)
    places = (named, NamedSharding(mesh, P("d")))
    with jax.sharding.use_abstract_mesh(ONE):  # kernels are chosen, and the parts take XLA
        fused = jax.jit(gradient(xlafuse.fuse(gemma.step, report=told.append)), in_shardings=places)
        lowered = fused.trace(weights, tokens).lower()
    assert len(told[0].taken) >= 8
    assert lowered.as_text().count("CustomSPMDPartitioning") >= 16
    found = lowered.compile()(*jax.device_put((weights, tokens), places))
    expected = jax.jit(gradient(gemma.step))(weights, tokens)
    for own, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        own, other = np.asarray(own, np.float64), np.asarray(other, np.float64)
        assert np.linalg.norm(own - other) < 0.03 * np.linalg.norm(other)
