from __future__ import annotations

from functools import partial

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.export
import jax.numpy as jnp
import pytest
from jax._src.mesh import AbstractDevice
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from pallas_kernels import (
    REGISTRY,
    Norm,
    attention,
    bias_activation,
    choice,
    get_op,
    linear,
    norm_linear,
    recorded_choices,
    rms_norm,
)
from pallas_kernels.dispatch import choose
from pallas_kernels.primitives.platform import target_device

X, SCALE = jnp.ones((2, 256)), jnp.ones((256,))
RUNS, REFUSES = (lambda: None), (lambda: "it is Tuesday")


def test_nothing_requested_takes_the_first_that_runs():
    assert choose("op", None, {"mosaic": RUNS, "xla": RUNS}, preferred=("mosaic",)) == "mosaic"
    assert choose("op", None, {"mosaic": REFUSES, "xla": RUNS}, preferred=("mosaic",)) == "xla"


def test_a_preference_that_the_operation_has_not_is_passed_over():
    support = {"mosaic": RUNS, "xla": RUNS}
    assert choose("op", None, support, preferred=("cudnn", "a name of next year", "mosaic")) == "mosaic"


def test_choices_are_recorded_with_the_reasons_against_the_others():
    def step(x, w):
        return rms_norm(linear(x, w), jnp.ones(512, jnp.bfloat16))

    x, w = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((16, 512), (512, 512)))
    for device, taken in (("NVIDIA H200", "mosaic"), ("NVIDIA A100-SXM4-40GB", "xla")):
        with jax.sharding.use_abstract_mesh(abstract_mesh(device)), recorded_choices() as choices:
            jax.eval_shape(step, x, w)
        assert [choice.operation for choice in choices] == ["linear", "rms_norm"]
        norm = choices[1]
        assert norm.taken == norm.runnable[0] == taken
        assert norm.reasons["xla"] is None
        line = step.__code__.co_firstlineno + 1
        assert norm.where == f"{__file__}:{line}"
        assert str(norm).startswith(f"rms_norm at {__file__}:{line}: {taken} (")
    assert "Hopper" in str(norm)
    jax.eval_shape(step, x, w)
    assert len(choices) == 2


def test_a_choice_that_cannot_be_made_is_recorded_too():
    with recorded_choices() as choices, pytest.raises(NotImplementedError, match="Tuesday"):
        choose("op", ("mosaic", "cudnn"), {"mosaic": REFUSES, "xla": RUNS})
    (choice,) = choices
    assert choice.taken is None
    assert choice.runnable == ("xla",)
    assert choice.reasons == {"mosaic": "it is Tuesday", "xla": None}


def test_a_choice_is_asked_for_without_a_call():
    x, w, scale = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((16, 4096), (4096, 4096), (4096,)))
    with jax.sharding.use_abstract_mesh(abstract_mesh("NVIDIA H200")):
        assert choice(norm_linear, x, w, norm=Norm(scale=scale)).taken == "mosaic"
        assert choice(linear, x, w, activation="relu", implementation="xla").taken == "xla"
        made = choice(lambda x, w, scale: rms_norm(linear(x, w), scale), x, w, scale)
    assert (made.operation, made.taken) == ("linear", "mosaic")
    assert "Hopper" in choice(linear, x, w).reasons["mosaic"]
    with pytest.raises(ValueError, match="linear: w"):
        choice(linear, x, scale)
    with pytest.raises(ValueError, match="calls an operation"):
        choice(jnp.sum, x)


def self_attention(x, scale, **options):
    heads = (x * scale).reshape(x.shape[0], 2, 2, 64)
    return attention(heads, heads, heads, **options)


@pytest.mark.parametrize(
    "function", [rms_norm, linear, bias_activation, self_attention], ids=lambda each: each.__name__
)
def test_sizes_known_only_at_run_time_are_left_to_xla(function):
    (rows,) = jax.export.symbolic_shape("rows")
    x = jax.ShapeDtypeStruct((rows, 256), jnp.bfloat16)
    other = jnp.ones((256, 256) if function is linear else 256, jnp.bfloat16)
    with jax.sharding.use_abstract_mesh(abstract_mesh("NVIDIA H200")):
        for implementation in (None, "xla"):
            traced = partial(function, implementation=implementation)
            assert "mpmd_map" not in str(jax.make_jaxpr(traced)(x, other))
        with pytest.raises(NotImplementedError, match="known only when the program runs"):
            jax.eval_shape(partial(function, implementation="mosaic"), x, other)


def test_kernels_take_parts_of_arrays_over_an_explicit_mesh_but_not_of_mapped_dimensions():
    device = AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="gpu")
    mesh = AbstractMesh((2,), ("data",), axis_types=(AxisType.Explicit,), abstract_device=device)
    x = jax.ShapeDtypeStruct((4, 256), jnp.bfloat16, sharding=NamedSharding(mesh, PartitionSpec("data")))
    scale = jax.ShapeDtypeStruct((256,), jnp.bfloat16, sharding=NamedSharding(mesh, PartitionSpec()))

    def norm(x, scale):
        return rms_norm(x, scale, implementation="mosaic")

    with jax.sharding.use_abstract_mesh(mesh):
        for each in (rms_norm, norm):
            jaxpr = str(jax.make_jaxpr(each)(x, scale))
            assert "shard_map" in jaxpr
            assert "mpmd_map" in jaxpr
        for each in (rms_norm, jax.jit(rms_norm)):
            assert "mpmd_map" not in str(jax.make_jaxpr(jax.vmap(each, in_axes=(0, None)))(x, scale))
        with pytest.raises(NotImplementedError, match=r"over 'data' of an explicit mesh.* jax\.shard_map"):
            jax.eval_shape(jax.vmap(norm, in_axes=(0, None)), x, scale)
        a_device = jax.shard_map(
            norm, in_specs=(PartitionSpec("data"), PartitionSpec()), out_specs=PartitionSpec("data")
        )
        assert "mpmd_map" in str(jax.make_jaxpr(a_device)(x, scale))


def test_sequences_are_orders_of_preference():
    support = {"mosaic": REFUSES, "xla": RUNS}
    assert choose("op", ("mosaic", "xla"), support) == "xla"
    assert choose("op", ["triton", "xla"], support) == "xla"


def test_explicit_requests_run_or_say_why():
    with pytest.raises(NotImplementedError, match=r"op cannot run as asked. 'mosaic': it is Tuesday. .*None"):
        choose("op", "mosaic", {"mosaic": REFUSES, "xla": RUNS})
    with pytest.raises(NotImplementedError, match=r"'triton': op has none of that name, only 'xla'"):
        choose("op", "triton", {"xla": RUNS})


def test_unknown_names_get_the_nearest():
    with pytest.raises(ValueError, match=r"unknown implementation 'mosiac'. Did you mean 'mosaic'"):
        rms_norm(X, SCALE, implementation="mosiac")
    with pytest.raises(ValueError, match="empty sequence"):
        rms_norm(X, SCALE, implementation=())
    with pytest.raises(ValueError, match=r"'rmsnorm'. Did you mean 'rms_norm'"):
        get_op("rmsnorm")


def test_only_implementations_of_the_operation_are_suggested():
    with pytest.raises(ValueError, match=r"unknown implementation 'cuda'\. It has 'mosaic', 'triton', 'xla'"):
        rms_norm(X, SCALE, implementation="cuda")


def test_mosaic_is_refused_on_a_cpu_and_none_is_xla():
    with pytest.raises(NotImplementedError, match=r"for Hopper GPUs .*force_gpu_interpret_mode"):
        rms_norm(X, SCALE, implementation="mosaic")
    assert "mosaic" not in str(jax.make_jaxpr(rms_norm)(X, SCALE))
    assert jnp.allclose(rms_norm(X, SCALE), 1.0)


@pytest.mark.parametrize(
    ("features", "dtype", "reason"),
    [(127, "float32", "127 features, .*128 to 16384"), (1, "bfloat16", "1 features, .*128 to 16384")],
)
def test_what_the_kernel_cannot_take_is_refused(features, dtype, reason):
    x = jnp.ones((2, features), dtype)
    with plgpu.force_gpu_interpret_mode(), pytest.raises(NotImplementedError, match=reason):
        rms_norm(x, jnp.ones((features,)), implementation="mosaic")


def abstract_mesh(kind):
    device = AbstractDevice(device_kind=kind, num_cores=114, platform="gpu")
    return AbstractMesh((1,), ("d",), axis_types=(AxisType.Auto,), abstract_device=device)


@pytest.mark.parametrize(
    ("kind", "is_hopper"),
    [("NVIDIA H200", True), ("NVIDIA H100 80GB HBM3", True), ("NVIDIA A100-SXM4-40GB", False), ("NVIDIA B200", False)],
)
def test_the_abstract_mesh_names_the_target(kind, is_hopper):
    with jax.sharding.use_abstract_mesh(abstract_mesh(kind)):
        device = target_device()
        program = str(jax.make_jaxpr(rms_norm)(X, SCALE))
    assert (device.platform, device.core_count, device.is_hopper) == ("cuda", 114, is_hopper)
    assert ("rms_norm_forward" in program or "mpmd_map" in program) == is_hopper


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"x": jnp.ones((2, 8), "int32"), "scale": jnp.ones(8)}, TypeError, "x must be floating, got int32"),
        ({"x": jnp.float32(1), "scale": jnp.ones(1)}, ValueError, "features axis"),
        ({"x": X, "scale": jnp.ones(255)}, ValueError, r"scale must be \(256,\).*got \(255,\)"),
        ({"x": X, "scale": SCALE, "residual": jnp.ones((256,))}, ValueError, r"like x, float32\[2, 256\]"),
        ({"x": X, "scale": SCALE, "residual": X.astype("bfloat16")}, ValueError, "got bfloat16"),
    ],
)
def test_arguments_that_do_not_belong_together(arguments, error, message):
    with pytest.raises(error, match=message):
        rms_norm(**arguments)


def test_registry_entries_are_consistent():
    for name, op in REGISTRY.items():
        assert op.name == name
        assert op.implementations[-1] == "xla"
        assert len({spec.name for spec in op.arg_specs}) == len(op.arg_specs)
        assert op.tagged("test") and op.tagged("bench")
