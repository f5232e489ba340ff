"""Products compute while their rows or sums travel in a ring: equal results, and no collective that stands alone."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import topologies
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from products import assert_close, normal, wide

from hlo_analysis.targets import load_target
from pallas_kernels import (
    BY_COPY_ENGINES,
    gated_linear,
    linear,
    overlapped_collectives,
    qkv_projection,
    recorded_choices,
)
from pallas_kernels.ops._products import product, rings
from pallas_kernels.primitives import shared_call
from pallas_kernels.primitives.gemm.config import GemmConfig
from pallas_kernels.primitives.gemm.epilogue import Epilogue
from pallas_kernels.primitives.gemm.kernel import gemm
from pallas_kernels.primitives.gemm.row_blocks import RowBlock

H200 = AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="gpu")
ONE = AbstractMesh((1,), ("one",), axis_types=(AxisType.Auto,), abstract_device=H200)
ROWS, FEATURES, OUTPUTS = 2048, 128, 1024
"""Rows of each of two batch elements."""


def reference(a, b, *, bias=None, residual=None, epilogue=None, out_dtype=None, read=None, written=None, **options):
    """What `gemm` computes, by XLA: JAX's interpreter serves one device at a time."""
    x = a[0] if read is None else lax.dynamic_index_in_dim(a[0], read.index, 1, keepdims=False)
    dtype, x = a[0].dtype, x.reshape(-1, x.shape[-1])
    products = [jnp.dot(x, w, preferred_element_type=jnp.float32) for w in b]
    biases = [] if bias is None else bias if isinstance(bias, (list, tuple)) else [bias]
    if options.get("is_concatenated"):
        results = [y if each is None else y + each for y, each in zip(products, biases, strict=True)]
    else:
        given = {"scale": None, "biases": biases, "residual": residual, "dtype": dtype}
        results = (epilogue or Epilogue()).apply(products, **given)
    results = [each.astype(out_dtype or dtype) for each in results]
    if written is None:
        return tuple(results)
    batch, blocks = written.shape
    cut = [each.reshape(batch, 1, -1, each.shape[1]) for each in results]
    into = written.into or [jnp.full((batch, blocks, *y.shape[2:]), jnp.nan, y.dtype) for y in cut]
    return tuple(lax.dynamic_update_slice_in_dim(x, y, written.index, 1) for x, y in zip(into, cut, strict=True))


@pytest.fixture(params=[2, 8])
def mesh(request, monkeypatch) -> Mesh:
    devices = jax.devices("cpu")
    if len(devices) < request.param:
        pytest.skip("needs simulated CPU devices; run this folder by itself")
    for module in (rings, product):
        monkeypatch.setattr(module, "gemm", reference)
    monkeypatch.setattr(shared_call, "_device", lambda platforms: H200)
    return Mesh(np.array(devices[: request.param]), ("t",))


def run(function: Any, arguments: Any, shardings: Any, out: Any) -> tuple[Any, Counter[str]]:
    """Traces for an H200 and runs on CPUs; returns the result and the collectives."""
    with jax.sharding.use_abstract_mesh(ONE):
        traced = jax.jit(function, in_shardings=shardings, out_shardings=out).trace(*arguments)
        compiled = traced.lower().compile()
    kinds = r"= \S.*? (all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute)(?:-start)?\("
    return compiled(*jax.device_put(arguments, shardings)), Counter(re.findall(kinds, compiled.as_text() or ""))


def gathered(x, weights, name):
    wide, narrow = weights
    if name == "linear":
        return linear(x, wide, activation="gelu_tanh", bias=wide[0])
    if name == "gated_linear":
        return gated_linear(x, wide, wide[::-1])
    return qkv_projection(x, wide, narrow, narrow[::-1], bias=(wide[0], narrow[0], narrow[1]), head_size=64)


@pytest.mark.drawn(1 / 3)
@pytest.mark.parametrize("name", ["linear", "gated_linear", "qkv_projection"])
def test_rows_travel_while_others_are_multiplied(name, mesh, seed):
    x, weights = (
        normal(seed, 2, ROWS, FEATURES),
        (normal(seed + 1, FEATURES, OUTPUTS), normal(seed + 2, FEATURES, 1024)),
    )
    columns = NamedSharding(mesh, P(None, "t"))
    shardings = columns, (columns, columns)
    out = NamedSharding(mesh, P(None, None, "t"))

    def function(x, weights):
        return gathered(x, weights, name)

    expected, before = run(function, (x, weights), shardings, out)
    with recorded_choices() as choices:
        found, after = run(overlapped_collectives()(function), (x, weights), shardings, out)
    for own, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(own, other)
    assert before["all-gather"] == 1
    assert after["all-gather"] == 0
    assert after["collective-permute"] == mesh.size - 1
    assert sum("rows travel over t" in each.parts for each in choices) == 1


def test_sums_travel_while_others_are_multiplied(mesh, seed):
    x, w, residual = normal(seed, 2, ROWS, OUTPUTS), normal(seed + 1, OUTPUTS, 256), normal(seed + 2, 2, ROWS, 256)
    rows = NamedSharding(mesh, P(None, "t"))
    shardings = NamedSharding(mesh, P(None, None, "t")), NamedSharding(mesh, P("t")), rows

    def function(x, w, residual):
        return linear(x, w, residual=residual)

    expected, _ = run(function, (x, w, residual), shardings, rows)
    found, kinds = run(overlapped_collectives()(function), (x, w, residual), shardings, rows)
    assert kinds == {"collective-permute": mesh.size - 1}
    exact = wide(x) @ wide(w) + wide(residual)
    errors = [np.linalg.norm(wide(each) - exact) for each in (found, expected)]
    assert errors[0] <= 2 * errors[1]


def test_gradients_of_a_gather_and_a_sum(mesh, seed):
    x, up, down = normal(seed, 2, ROWS, FEATURES), normal(seed + 1, FEATURES, OUTPUTS), normal(seed + 2, OUTPUTS, 128)
    place = lambda *spec: NamedSharding(mesh, P(*spec))  # noqa: E731
    rows = place(None, "t")

    def function(x, up, down):
        hidden = lax.with_sharding_constraint(linear(x, up, implementation=("mosaic", "xla")), place(None, None, "t"))
        return lax.with_sharding_constraint(linear(hidden, down, residual=x), rows)

    def gradient(function):
        def run(*arrays):
            y, pullback = jax.vjp(function, *arrays)
            return y, pullback(y)

        return run

    shardings = rows, place(None, "t"), place("t")
    out = rows, shardings
    expected, _ = run(gradient(function), (x, up, down), shardings, out)
    found, kinds = run(gradient(overlapped_collectives()(function)), (x, up, down), shardings, out)
    assert kinds["collective-permute"] == 2 * (mesh.size - 1)
    for own, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert np.linalg.norm(wide(own) - wide(other)) < 0.01 * np.linalg.norm(wide(other))


@pytest.mark.slow
def test_transfers_have_a_kernel_to_hide_behind():
    topology = topologies.get_topology_desc(
        platform="cuda", topology="1x1x4", target_config=load_target("h200").config_text
    )
    mesh = Mesh(np.array(topology.devices), ("t",))

    def struct(shape, *spec):
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, P(*spec)))

    @overlapped_collectives()
    def mlp(x, w_gate, w_up, w_down):
        hidden = lax.with_sharding_constraint(gated_linear(x, w_gate, w_up), NamedSharding(mesh, P(None, None, "t")))
        return linear(hidden, w_down, residual=x)

    x, wide = struct((2, 4096, 1024), None, "t"), struct((1024, 4096), None, "t")
    arguments = x, wide, wide, struct((4096, 1024), "t")
    plain = jax.tree.map(lambda each: jax.ShapeDtypeStruct(each.shape, each.dtype), arguments)
    shardings = jax.tree.map(lambda each: each.sharding, arguments)
    with jax.sharding.use_abstract_mesh(ONE):
        traced = jax.jit(mlp, in_shardings=shardings, out_shardings=x.sharding).trace(*plain)
        compiled = traced.lower(lowering_platforms=("cuda",)).compile(compiler_options=dict(BY_COPY_ENGINES))
    text = compiled.as_text() or ""
    order = re.findall(r" (collective-permute-start|collective-permute-done|custom-call|all-\w+|reduce-\w+)\(", text)
    transfer = ["collective-permute-start", "custom-call", "collective-permute-done"]
    assert order == [*(transfer * 3), "custom-call", "custom-call", *(transfer * 3)]


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("batch", [1, 2])
def test_blocks_are_read_and_written_in_place(batch, seed):
    config = GemmConfig(tile_m=64, tile_n=64, warpgroups=1, stages=3)
    x, w = normal(seed, batch, 3, 64, 128), normal(seed + 1, 128, 128)
    expected = wide(x) @ wide(w)
    into: tuple[jax.Array, ...] = ()
    for i in (2, 0, 1):
        written = RowBlock(index=jnp.int32(i), shape=(batch, 3), into=into)
        into = gemm([x[:, i].reshape(-1, 128)], [w], config=config, written=written)
    assert_close(into[0], expected)
    (own,) = gemm([x], [w], config=config, read=RowBlock(index=jnp.int32(1), shape=(batch, 3)))
    assert_close(own, expected[:, 1].reshape(-1, 128))
