"""Operations in programs that XLA partitions: devices share their work, with XLA's collectives and no more."""

from __future__ import annotations

import re
import warnings
from collections import Counter
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import topologies
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import xlafuse
from hlo_analysis.targets import load_target
from pallas_kernels import KernelWarning, attention, linear, recorded_choices, rms_norm, testing
from pallas_kernels.primitives.partitioned import Reference, by_devices
from pallas_kernels.registry import REGISTRY

H200 = AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="gpu")
ONE = AbstractMesh((1,), ("d",), axis_types=(AxisType.Auto,), abstract_device=H200)


@pytest.fixture(scope="module")
def gpus() -> Mesh:
    text = load_target("h200").config_text
    devices = topologies.get_topology_desc(platform="cuda", topology="1x1x4", target_config=text).devices
    return Mesh(np.array(devices), ("d",))


def struct(mesh: Mesh | AbstractMesh, shape: tuple[int, ...], *axes: str | None) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, P(*axes)))


def lowered(function, *structs):
    """The function under `jax.jit` with these shardings, traced for one H200 as a process on a GPU would."""
    shardings = tuple(each.sharding for each in structs)
    plain = [jax.ShapeDtypeStruct(each.shape, each.dtype) for each in structs]
    with jax.sharding.use_abstract_mesh(ONE):
        traced = jax.jit(lambda *arrays: function(*arrays), in_shardings=shardings).trace(*plain)
        return traced.lower(lowering_platforms=("cuda",))


def collectives(function, *structs, kernels: int | None = None) -> Counter[str]:
    """Collectives of the compiled program. kernels: how many kernels it has, if that is known."""
    text = str(lowered(function, *structs).compile().as_text())
    assert kernels is None or text.count('custom_call_target="mosaic_gpu') == kernels
    return Counter(
        re.findall(r" (all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute)(?:-start)?\(", text)
    )


def gradients(function):
    def run(*arrays):
        y, pullback = jax.vjp(function, *arrays)
        return y, pullback(y)

    return run


def causal(query, key, value, **options):
    return attention(query, key, value, is_causal=True, **options)


def up(x, w, **options):
    return linear(x, w, activation="gelu_tanh", **options)


OPERATIONS = {
    "rows": (2, rms_norm, ((8, 256, 1024), "d"), ((1024,),)),
    "features": (0, rms_norm, ((8, 256, 1024), None, None, "d"), ((1024,), "d")),
    "heads": (3, causal, *(((2, 512, 8, 64), None, None, "d"),) * 3),
    "outputs": (2, up, ((8, 256, 1024),), ((1024, 4096), None, "d")),
}


@pytest.mark.drawn(1 / 3)
@pytest.mark.parametrize("name", OPERATIONS)
def test_collectives_are_those_of_xla(name, gpus):
    kernels, function, *arguments = OPERATIONS[name]
    structs = [struct(gpus, *each) for each in arguments]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = collectives(gradients(function), *structs, kernels=kernels)
    assert found == collectives(gradients(lambda *arrays: function(*arrays, implementation="xla")), *structs, kernels=0)


def block(x, scale, up, down):
    wide = x.astype(jnp.float32)
    normed = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + 1e-6) * scale
    return x + jax.nn.gelu(normed.astype(x.dtype) @ up) @ down


@pytest.mark.parametrize("transform", [lambda function: function, gradients], ids=["forward", "gradient"])
def test_a_fused_block_has_the_collectives_of_the_block(transform, gpus):
    """Data parallel rows and tensor parallel weights would both be gathered around kernels."""
    structs = struct(gpus, (4096, 1024)), struct(gpus, (1024,)), struct(gpus, (1024, 4096), None, "d")
    structs = *structs, struct(gpus, (4096, 1024), "d")
    reports = []
    with warnings.catch_warnings():
        warnings.simplefilter("error", KernelWarning)
        fused = xlafuse.fuse(block, ops=["norm_linear", "rms_norm"], report=reports.append)
        found = collectives(transform(fused), *structs)
    assert reports[0].taken
    assert found == collectives(transform(block), *structs)


def test_the_comparison_takes_sites_on_the_parts():
    mesh = AbstractMesh((4,), ("d",), axis_types=(AxisType.Auto,))
    structs = struct(mesh, (4096, 1024), "d"), *(struct(mesh, shape) for shape in ((1024,), (1024, 4096), (4096, 1024)))
    *_, result = xlafuse.compare(block, structs, strategies=["fused"]).strategies
    assert result.analysis is not None
    assert {site.outcome for site in result.sites} == {"taken"}
    assert "mosaic" in {launch.kind for launch in result.analysis.launches}
    assert not any("left to XLA" in note for note in result.analysis.provenance.notes)


def test_one_device_runs_the_kernel_without_a_word(gpus):
    structs = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((8, 256, 1024), (1024,))]
    with jax.sharding.use_abstract_mesh(ONE), warnings.catch_warnings(), recorded_choices() as choices:
        warnings.simplefilter("error")
        traced = jax.jit(gradients(rms_norm)).trace(*structs)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("mosaic_gpu_v2") == 2
    assert [choice.taken for choice in choices] == ["mosaic"]


def test_a_kernel_asked_for_by_name_runs_on_the_parts(gpus):
    def norm(x, scale):
        return rms_norm(x, scale, implementation="mosaic")

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        structs = struct(gpus, (8, 256, 1024), "d"), struct(gpus, (1024,))
        assert not collectives(norm, *structs, kernels=1)


def test_inside_shard_map_kernels_run_without_a_word(gpus):
    structs = [struct(gpus, (8, 256, 1024), "d"), struct(gpus, (1024,))]
    mesh = AbstractMesh((4,), ("d",), axis_types=(AxisType.Auto,), abstract_device=H200)
    mapped = jax.shard_map(rms_norm, mesh=mesh, in_specs=(P("d"), P()), out_specs=P("d"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        shardings = tuple(each.sharding for each in structs)
        plain = [jax.ShapeDtypeStruct(each.shape, each.dtype) for each in structs]
        traced = jax.jit(gradients(mapped), in_shardings=shardings).trace(*plain)
        assert traced.lower(lowering_platforms=("cuda",)).as_text().count("mosaic_gpu_v2") == 2


@pytest.mark.parametrize("check_vma", [True, False])
def test_a_long_attention_has_a_gradient_inside_shard_map(check_vma):
    mesh = AbstractMesh((4,), ("d",), axis_types=(AxisType.Auto,), abstract_device=H200)
    mapped = jax.shard_map(causal, mesh=mesh, in_specs=P("d"), out_specs=P("d"), check_vma=check_vma)
    heads = [jax.ShapeDtypeStruct((4, 4096, count, 128), jnp.bfloat16) for count in (32, 8, 8)]
    assert str(jax.make_jaxpr(gradients(mapped))(*heads)).count("attention_backward_fused") == (0 if check_vma else 1)


def test_under_an_automatic_mesh_kernels_take_parts():
    mesh = AbstractMesh((4,), ("d",), axis_types=(AxisType.Auto,), abstract_device=H200)
    x, scale = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((4096, 1024), (1024,)))
    with jax.sharding.use_abstract_mesh(mesh), recorded_choices() as choices:
        jax.eval_shape(rms_norm, x, scale)
    assert [choice.taken for choice in choices] == ["mosaic"]


@pytest.fixture
def rows():
    if len(jax.devices("cpu")) < 2:
        pytest.skip("needs two simulated CPU devices; run this folder by itself")
    mesh = Mesh(np.array(jax.devices("cpu")[:2]), ("d",))
    return jax.device_put(jnp.arange(32.0).reshape(8, 4), NamedSharding(mesh, P("d")))


@jax.custom_vjp
def tripled(x, scale):
    """Not what `doubled` computes, so that results show which one ran."""
    return 3 * x * scale


tripled.defvjp(
    lambda x, scale: (tripled(x, scale), (x, scale, x + 1)),
    lambda saved, dy: (3 * dy * saved[1], (3 * dy * (saved[2] - 1)).reshape(-1, 4).sum(0)),
)


def either(x, scale):
    def doubled(x, scale):
        return 2 * x * scale

    return by_devices("op", tripled, Reference(function=doubled))(x, scale)


def looped(x, scale):
    body = jax.checkpoint(lambda carry, own: (carry + either(x, own), None))
    return jax.lax.scan(body, jnp.zeros_like(x), jnp.stack([scale, scale]))[0]


@pytest.mark.filterwarnings("ignore::pallas_kernels.KernelWarning")
@pytest.mark.parametrize("wrap", [jax.jit, lambda function: function], ids=["jit", "eager"])
@pytest.mark.parametrize(("function", "times"), [(either, 1), (jax.vmap(either, (0, None)), 1), (looped, 2)])
def test_several_devices_compute_the_reference_and_one_the_kernel(function, times, wrap, rows):
    scale = jnp.arange(4.0)
    gradient = wrap(jax.grad(lambda x, scale: function(x, scale).sum(), argnums=(0, 1)))
    for x, factor in ((np.asarray(rows), 3), (rows, 2)):
        x = jnp.asarray(x)
        if wrap is jax.jit:  # outside jit and without a gradient nothing is traced
            np.testing.assert_array_equal(wrap(function)(x, scale), times * factor * x * scale)
        dx, dscale = gradient(x, scale)
        np.testing.assert_array_equal(dx, jnp.broadcast_to(times * factor * scale, x.shape))
        np.testing.assert_array_equal(dscale, times * factor * x.sum(0))


@pytest.mark.filterwarnings("ignore::pallas_kernels.KernelWarning")
def test_a_pullback_may_be_compiled_by_itself(rows):
    scale = jnp.arange(4.0)
    for function in (either, jax.jit(either)):
        y, pullback = jax.vjp(function, rows, scale)
        for run in (pullback, jax.jit(pullback)):
            np.testing.assert_array_equal(run(jnp.ones_like(y))[1], 2 * rows.sum(0))


def test_arrays_that_are_spread_outside_jit_are_left_to_xla(rows):
    with jax.sharding.use_abstract_mesh(ONE), recorded_choices() as choices:
        rms_norm(jnp.tile(rows, (1, 64)), jnp.ones(256))
    assert choices[0].taken == "xla"
    assert "an array is spread over several devices" in str(choices[0].reasons["mosaic"])


@pytest.mark.drawn(1 / 4)
@pytest.mark.parametrize("op", REGISTRY.values(), ids=lambda op: op.name)
def test_operations_lower_under_remat_vmap_and_scan(op):
    case = testing.make_case(op, op.tagged("test")[0], seed=0)

    def values(arguments):
        return tuple(testing.forward(replace(case, arguments=arguments), None).values())

    def rematerialized(arguments):
        return jax.vjp(jax.checkpoint(values), arguments)[1](case.cotangents)[0]

    def mapped(arguments):
        batched = {
            name: jax.tree.map(lambda leaf: leaf[None], arguments[name]) for name in op.batched if name in arguments
        }
        return jax.vmap(lambda own: values({**arguments, **own}))(batched)

    def scanned(arguments):
        return jax.lax.scan(lambda carry, _: (carry, values(arguments)), 0.0, length=2)[1]

    structs = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), case.arguments)
    with jax.sharding.use_abstract_mesh(ONE):
        for program in (rematerialized, mapped, scanned):
            jax.jit(program).trace(structs).lower(lowering_platforms=("cuda",))
