"""Sharded operations: dropout masks, expert groups, caches; explicit axes, `jax.export`, partly manual axes."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import flax.nnx as nnx
import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import pallas_kernels
import xlafuse
from pallas_kernels import (
    KernelWarning,
    attention,
    batch_norm,
    bias_activation,
    cross_entropy,
    decode_attention,
    dropout_residual_norm,
    embedding,
    grouped_gated_linear,
    grouped_linear,
    linear,
    rms_norm,
)
from pallas_kernels.primitives.random import array_keep_mask, part_words
from pallas_kernels.registry import REGISTRY

H200 = AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="gpu")
ONE = AbstractMesh((1,), ("one",), axis_types=(AxisType.Auto,), abstract_device=H200)
SIZES = jnp.asarray([3, 0, 20, 1, 10, 8, 9, 5], jnp.int32)


@pytest.fixture(scope="module")
def cpus() -> Mesh:
    devices = jax.devices("cpu")
    if len(devices) < 8:
        pytest.skip("needs eight simulated CPU devices; run this folder by itself")
    return Mesh(np.array(devices[:8]).reshape(2, 2, 2), ("a", "b", "c"))


def normal(seed: int, *shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def with_gradients(function: Callable[..., Any]) -> Callable[..., Any]:
    def run(*arrays):
        def of_floats(*floats):
            own = iter(floats)
            return function(*(next(own) if is_float(array) else array for array in arrays))

        y, pullback = jax.vjp(of_floats, *filter(is_float, arrays))
        return y, pullback(y)

    return run


def is_float(array: jax.Array) -> bool:
    return jnp.issubdtype(array.dtype, jnp.floating)


def in_parts(function: Callable[..., Any], arrays: Sequence[Any], mesh: Mesh, *specs: P) -> Any:
    """Results and gradients of calls whose kernels are chosen as on an H200, and whose parts take XLA on CPUs."""
    shardings = tuple(NamedSharding(mesh, spec) for spec in specs)
    structs = [jax.ShapeDtypeStruct(array.shape, array.dtype) for array in arrays]
    with jax.sharding.use_abstract_mesh(ONE):
        lowered = jax.jit(with_gradients(function), in_shardings=shardings).trace(*structs).lower()
    assert "CustomSPMDPartitioning" in lowered.as_text()
    return lowered.compile()(*jax.device_put(tuple(arrays), shardings))


def assert_close(found: Any, expected: Any) -> None:
    for own, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        own, other = np.asarray(own, np.float64), np.asarray(other, np.float64)
        np.testing.assert_allclose(own, other, rtol=1e-5, atol=1e-5 * max(1.0, float(np.abs(other).max())))


@pytest.mark.parametrize(
    "spec",
    [
        P("a"),
        P("a", "b", "c"),
        P(None, "b", "c"),
        P(None, None, "c", "a"),
        P(("a", "b"), None, None, "c"),
    ],
    ids=str,
)
def test_a_part_draws_the_bits_of_its_rows_and_columns(spec, cpus):
    x, key = normal(0, 4, 6, 2, 256), jax.random.key(3)

    def dropped(x, key):
        return bias_activation(x, jnp.zeros(256), activation="relu", dropout_rate=0.5, dropout_key=key)

    found, _ = in_parts(dropped, (jnp.ones_like(x), key), cpus, spec, P())
    np.testing.assert_array_equal(found > 0, array_keep_mask(key, x.shape, rate=0.5))


@pytest.mark.parametrize(("features", "start"), [(128, 256), (129, 129)])
def test_a_kernel_has_the_mask_of_its_part(features, start):
    """Rows 2 and 3 of each of three blocks of four, and some of the columns, by the kernel itself."""
    key, rate = jax.random.PRNGKey(8), 0.5
    words = part_words(key, whole=(3, 4, 3 * features), part=(3, 2, features), start=(0, 2, start))
    x = jnp.ones((6, features), jnp.float32)
    with plgpu.force_gpu_interpret_mode():
        y = bias_activation(x, jnp.zeros(features), activation="relu", dropout_rate=rate, dropout_key=words)
        total = dropout_residual_norm(x, residual=jnp.zeros_like(x), rate=rate, key=words)[1]
    expected = array_keep_mask(key, (3, 4, 3 * features), rate=rate)[:, 2:, start : start + features]
    np.testing.assert_array_equal(y.reshape(expected.shape) > 0, expected)
    np.testing.assert_array_equal(total.reshape(expected.shape) > 0, expected)


def test_weights_of_parts_are_dropped_as_on_one_device(cpus):
    query, keys, key = normal(0, 4, 64, 8, 64), normal(1, 4, 64, 4, 64), jax.random.key(5)
    arrays = query.astype(jnp.bfloat16), keys.astype(jnp.bfloat16), key

    def dropped(query, keys, key):
        return attention(query, keys, keys, dropout_rate=0.5, dropout_key=key)

    found, _ = in_parts(dropped, arrays, cpus, P("a", None, "b"), P("a", None, "b"), P())
    np.testing.assert_array_equal(found, dropped(*arrays))


GROUPED = {
    "rows": (P("a"), P(), P()),
    "outputs": (P(), P(None, None, "a"), P(None, "a")),
    "features": (P(None, "a"), P(None, "a"), P()),
    "groups": (P(), P(("a", "b")), P()),
    "all": (P("a", "c"), P("b", "c"), P("b")),
}


@pytest.mark.drawn(1 / 3)
@pytest.mark.filterwarnings("ignore::pallas_kernels.KernelWarning")  # gated products need all features
@pytest.mark.parametrize("name", GROUPED)
def test_experts_are_cut(name, cpus):
    x, w, bias = (
        normal(i, *shape).astype(jnp.bfloat16) for i, shape in enumerate(((64, 128), (8, 128, 256), (8, 256)))
    )

    def experts(x, w, bias):
        y = grouped_linear(x, w, SIZES, bias=bias, activation="silu")
        return y.astype(jnp.float32), grouped_gated_linear(x, w, w * 0.5, SIZES).astype(jnp.float32)

    found = in_parts(experts, (x, w, bias), cpus, *GROUPED[name])
    for own, other in zip(jax.tree.leaves(found), jax.tree.leaves(with_gradients(experts)(x, w, bias)), strict=True):
        own, other = np.asarray(own, np.float64), np.asarray(other, np.float64)
        assert np.linalg.norm(own - other) < 0.01 * np.linalg.norm(other)


@pytest.mark.parametrize("specs", [(P("a", "b"), P("b")), (P("a"), P()), (P(None, ("a", "b")), P(("a", "b")))], ids=str)
def test_statistics_of_batch_norm_are_over_all_devices_rows(specs, cpus):
    arrays = normal(0, 256, 512) + 3, normal(1, 512)
    found = in_parts(lambda x, scale: batch_norm(x, scale, scale), arrays, cpus, *specs)
    assert_close(found, with_gradients(lambda x, scale: batch_norm(x, scale, scale))(*arrays))


@pytest.mark.filterwarnings("ignore::pallas_kernels.KernelWarning")  # sequences that write pages are not cut
@pytest.mark.parametrize("is_paged", [False, True])
@pytest.mark.parametrize("writes", [False, True])
def test_caches_are_cut_by_sequences_and_heads(is_paged, writes, cpus):
    shape, spec = ((16, 16, 4, 128), P(None, None, "b")) if is_paged else ((4, 64, 4, 128), P("a", None, "b"))
    arrays = normal(0, 4, 1, 8, 128), normal(1, *shape), normal(2, 4, 1, 4, 128)
    query, cache, new = (array.astype(jnp.bfloat16) for array in arrays)
    pages = jnp.asarray(np.random.default_rng(0).permutation(16).reshape(4, 4))
    lengths = jnp.asarray([5, 64, 30, 17])

    def decode(query, cache, new, lengths, pages):
        given: dict[str, Any] = {"page_table": pages} if is_paged else {}
        given |= {"new_key": new, "new_value": new} if writes else {}
        return decode_attention(query, cache, cache, lengths, **given)

    own = P("a", None, "b")
    shardings = tuple(NamedSharding(cpus, each) for each in (own, spec, own, P("a"), P("a")))
    operands = query, cache, new, lengths, pages
    with jax.sharding.use_abstract_mesh(ONE):
        structs = [jax.ShapeDtypeStruct(each.shape, each.dtype) for each in operands]
        lowered = jax.jit(decode, in_shardings=shardings).trace(*structs).lower()
    assert "CustomSPMDPartitioning" in lowered.as_text()
    found = lowered.compile()(*jax.device_put(operands, shardings))
    for own, other in zip(jax.tree.leaves(found), jax.tree.leaves(decode(*operands)), strict=True):
        np.testing.assert_allclose(np.asarray(own, np.float32), np.asarray(other, np.float32), atol=0.02)


EXPLICIT = {
    "fully sharded": (linear, (P("a"), P("a")), ((8, 64, 256), (256, 512)), P("a", None, None)),
    "outputs": (linear, (P("a"), P(None, "b")), ((8, 64, 256), (256, 512)), P("a", None, "b")),
    "features": (linear, (P("a", None, "b"), P("b")), ((8, 64, 256), (256, 512)), P("a", None, None)),
    "norm": (rms_norm, (P("a", "c"), P("a")), ((8, 64, 256), (256,)), P("a", "c", None)),
    "scanned": (
        lambda x, scales: jax.lax.scan(lambda x, own: (jax.checkpoint(rms_norm)(x, own) + x, None), x, scales)[0],
        (P("a"), P()),
        ((8, 64, 256), (3, 256)),
        P("a", None, None),
    ),
    "mapped": (jax.vmap(rms_norm, (1, None), 1), (P("a"), P()), ((8, 64, 256), (256,)), P("a", None, None)),
}


@pytest.mark.drawn(1 / 3)
@pytest.mark.parametrize("name", EXPLICIT)
def test_explicit_axes_cut_calls_and_their_gradients_are_cut_as_arguments(name, cpus):
    function, specs, shapes, spec = EXPLICIT[name]
    arrays = [normal(i, *shape) for i, shape in enumerate(shapes)]
    mesh = jax.make_mesh((2, 2, 2), ("a", "b", "c"), axis_types=(AxisType.Explicit,) * 3, devices=cpus.devices.ravel())
    with jax.set_mesh(mesh):
        placed = [jax.device_put(array, NamedSharding(mesh, own)) for array, own in zip(arrays, specs, strict=True)]
        assert "shard_map" in str(jax.make_jaxpr(function)(*placed))
        found = jax.jit(with_gradients(function))(*placed)
    assert found[0].sharding.spec == spec
    for gradient, array in zip(found[1], placed, strict=True):
        assert jax.typeof(gradient).sharding.spec == jax.typeof(array).sharding.spec
    assert_close(found, with_gradients(function)(*arrays))


def test_an_explicit_vocabulary_is_looked_up_and_lost_in_parts(cpus):
    table, ids = normal(0, 512, 256), jnp.asarray(np.random.default_rng(1).integers(0, 512, (8, 16)))
    mesh = jax.make_mesh((2, 2, 2), ("a", "b", "c"), axis_types=(AxisType.Explicit,) * 3, devices=cpus.devices.ravel())

    def loss(table, ids):
        return cross_entropy(linear(embedding(table, ids), table.T), ids, reduction="mean")

    with jax.set_mesh(mesh):
        placed = jax.device_put((table, ids), (NamedSharding(mesh, P("b")), NamedSharding(mesh, P("a"))))
        found = jax.jit(jax.value_and_grad(loss))(*placed)
    assert_close(found, jax.value_and_grad(loss)(table, ids))


def test_a_gather_over_an_explicit_axis_is_warned_of_at_the_line_of_the_call(cpus):
    mesh = jax.make_mesh((8,), ("a",), axis_types=(AxisType.Explicit,), devices=cpus.devices.ravel())

    def causal(query):
        return attention(query, query, query, is_causal=True)

    query = jax.ShapeDtypeStruct((1, 64, 4, 64), jnp.bfloat16, sharding=NamedSharding(mesh, P(None, "a")))
    with jax.set_mesh(mesh), pytest.warns(KernelWarning, match="query, key, value over the mesh axis 'a'") as warned:
        jax.eval_shape(jax.jit(causal), query)
    assert {each.lineno for each in warned} == {causal.__code__.co_firstlineno + 1}


def test_per_example_gradients_are_cut_over_examples(cpus):
    x, w = normal(0, 8, 16, 256), normal(1, 256, 512) / 16

    def per_example(x, w):
        def loss(w, own):
            normed: Any = rms_norm(own, own[0])
            return jnp.sum(jnp.sin(linear(normed, w, implementation=("mosaic", "xla"))))

        return jax.vmap(jax.grad(loss), (None, 0))(w, x)

    structs = [jax.ShapeDtypeStruct(each.shape, each.dtype) for each in (x, w)]
    shardings = NamedSharding(cpus, P("a")), NamedSharding(cpus, P(None, "b"))
    with jax.sharding.use_abstract_mesh(ONE):
        lowered = jax.jit(per_example, in_shardings=shardings).trace(*structs).lower()
    assert "CustomSPMDPartitioning" in lowered.as_text()
    assert_close(lowered.compile()(*jax.device_put((x, w), shardings)), per_example(x, w))


def test_rows_that_do_not_divide_are_computed_by_each_device(cpus):
    """Six rows on four devices: XLA pads them, which a kernel's call cannot have."""
    x, scale = normal(0, 6, 256), normal(1, 256)
    rows = NamedSharding(cpus, P(("a", "b")))

    def norm(x, scale):
        return rms_norm(jax.lax.with_sharding_constraint(jnp.sin(x), rows), scale)

    with jax.sharding.use_abstract_mesh(ONE):
        lowered = jax.jit(norm, in_shardings=(NamedSharding(cpus, P()),) * 2).trace(x, scale).lower()
    assert "CustomSPMDPartitioning" in lowered.as_text()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", KernelWarning)
        found = lowered.compile()(x, scale)
    np.testing.assert_allclose(found, norm_of(jnp.sin(x), scale), rtol=1e-5, atol=1e-5)


def norm_of(x, scale):
    return rms_norm(x, scale, implementation="xla")


def left_to_xla(function: Callable[..., Any]) -> str:
    with pytest.warns(KernelWarning, match="is left to XLA"), jax.sharding.use_abstract_mesh(ONE):
        return function()


def test_an_exported_program_is_left_to_xla(cpus):
    shardings = NamedSharding(cpus, P("a")), NamedSharding(cpus, P())
    structs = jax.ShapeDtypeStruct((8, 256), jnp.float32), jax.ShapeDtypeStruct((256,), jnp.float32)
    exported: Any = left_to_xla(
        lambda: jax.export.export(jax.jit(rms_norm, in_shardings=shardings), platforms=("cpu",))(*structs)
    )
    arrays = normal(0, 8, 256), normal(1, 256)
    found = jax.jit(exported.call)(*jax.device_put(arrays, shardings))
    np.testing.assert_allclose(found, norm_of(*arrays), rtol=1e-6, atol=1e-6)


def test_a_shard_map_that_is_manual_over_some_axes_is_left_to_xla(cpus):
    mesh = AbstractMesh((2, 2), ("a", "b"), axis_types=(AxisType.Auto,) * 2, abstract_device=H200)
    mapped = jax.shard_map(
        rms_norm, mesh=mesh, in_specs=(P("a"), P()), out_specs=P("a"), axis_names={"a"}, check_vma=False
    )
    structs = jax.ShapeDtypeStruct((8, 256), jnp.float32), jax.ShapeDtypeStruct((256,), jnp.float32)
    shardings = NamedSharding(mesh, P("a")), NamedSharding(mesh, P())
    with pytest.warns(KernelWarning, match="is left to XLA"):
        traced = jax.jit(mapped, in_shardings=shardings).trace(*structs)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert "CustomSPMDPartitioning" not in text
    assert "mosaic" not in text


class Mlp(nnx.Module):
    """Annotated as a user's: columns over devices, then rows."""

    def __init__(self, rngs: nnx.Rngs):
        init = nnx.initializers.lecun_normal()
        self.up = nnx.Param(nnx.with_partitioning(init, (None, "b"))(rngs.params(), (256, 512)))
        self.down = nnx.Param(nnx.with_partitioning(init, ("b", None))(rngs.params(), (512, 256)))
        self.scale = nnx.Param(jnp.ones(256))

    def __call__(self, x: jax.Array) -> jax.Array:
        wide = x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6) * self.scale[...]
        return x + jax.nn.gelu(wide @ self.up[...]) @ self.down[...]


def test_an_annotated_module_is_cut_as_its_annotations_say(cpus):
    with jax.set_mesh(cpus):
        module = Mlp(nnx.Rngs(0))
    graph, state = nnx.split(module)
    specs = nnx.get_partition_spec(state)
    shardings = jax.tree.map(lambda spec: NamedSharding(cpus, spec), specs, is_leaf=lambda each: isinstance(each, P))
    x = normal(1, 64, 256)

    def model(state, x):
        return nnx.merge(graph, state)(x)

    def gradients(function):
        return jax.grad(lambda state, x: jnp.sum(jnp.sin(function(state, x))))

    reports = []
    fused = gradients(xlafuse.fuse(model, ops=["rms_norm", "norm_linear"], report=reports.append))
    rows = NamedSharding(cpus, P("a"))
    with jax.sharding.use_abstract_mesh(ONE):
        lowered = jax.jit(fused, in_shardings=(shardings, rows)).trace(state, x).lower()
    assert reports[0].taken
    assert "CustomSPMDPartitioning" in lowered.as_text()
    found = lowered.compile()(jax.device_put(state, shardings), jax.device_put(x, rows))
    assert_close(found, gradients(model)(state, x))


ARGUMENTS: dict[str, Any] = {
    "cross_entropy": {"reduction": "none", "logits": normal(0, 2, 3), "labels": jnp.zeros(2, int)},
    "decode_attention": {"page_table": None, "new_key": None},
    "gated_activation": {"gate": 0, "up": 0},
    "grouped_linear": {"transpose": False},
    "linear_cross_entropy": {"reduction": "none", "hidden": normal(0, 2, 3), "labels": jnp.zeros(2, int)},
    "qkv_projection": {"head_size": 64, "rope": None, "x": 0},
    "rope": {"key": 0},
    "softmax": {"x": normal(0, 2, 2, 2, 2), "axis": -1, "is_causal": False},
}


def described(name: str) -> str:
    text: Any = getattr(pallas_kernels, name).dimensions.text
    return str(text(ARGUMENTS[name]) if callable(text) else text)


@pytest.mark.parametrize("name", REGISTRY)
def test_all_arrays_of_an_operation_have_named_dimensions(name):
    function = getattr(pallas_kernels, name)
    arrays = {each for each, kind in inspect.get_annotations(function).items() if "jax.Array" in str(kind)}
    known = {part.partition(":")[0].strip().partition(".")[0] for part in described(name).partition("->")[0].split(",")}
    assert arrays - {"return", "implementation"} <= known


def test_the_documented_dimensions_are_those_of_the_operations():
    rows = [f"| `{name}` | `{described(name)}` |" for name in sorted(REGISTRY)]
    page = (Path(__file__).parents[2] / "docs" / "several-gpus.md").read_text()
    assert "\n".join(rows) in page.replace("\\|", "|")
