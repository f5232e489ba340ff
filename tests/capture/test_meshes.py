"""Functions and arguments that bring a mesh: lowered without ours, and compiled for as many devices as it has."""

from __future__ import annotations

import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import topologies
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, NamedSharding, PartitionSpec

from hlo_analysis import analyze
from hlo_analysis.capture import capture
from hlo_analysis.capture.lowering import lower
from hlo_analysis.capture.meshes import devices_of
from hlo_analysis.errors import CaptureError
from hlo_analysis.hlo import parse_module
from hlo_analysis.targets import load_target
from pallas_kernels import linear, rms_norm

ROWS = jax.ShapeDtypeStruct((64, 128), jnp.float32)


def gathered(devices: int, **given: Any):
    """What several devices make of their rows, gathered on each."""

    def on_each(rows: jax.Array) -> jax.Array:
        return 2 * jax.lax.all_gather(jnp.sin(rows), "rows", tiled=True)

    if devices:
        given["mesh"] = AbstractMesh((devices,), ("rows",), axis_types=(AxisType.Auto,))
    return jax.shard_map(on_each, in_specs=PartitionSpec("rows"), out_specs=PartitionSpec(), check_vma=False, **given)


def test_collectives_are_compiled_for_all_devices_of_the_mesh(compiler: None) -> None:
    captured = capture(gathered(4), ROWS)
    module = parse_module(captured.require("final_hlo"))
    opcodes = {
        found.opcode for computation in module.computations.values() for found in computation.instructions.values()
    }
    assert opcodes & {"all-gather", "all-gather-start"}
    assert str(module.entry.parameters[0].shape) == "f32[16,128]"
    assert any("spread over 4 devices" in note for note in captured.provenance.notes)
    # Made asynchronous after fusion, it has another name: it was there all the same.
    analysis = analyze(captured)
    assert [launch.kind for launch in analysis.launches] == ["loop", "collective", "loop"]
    assert not any("put in after fusion" in decision.reason for decision in analysis.decisions)
    assert any("takes no fusion" in decision.reason for decision in analysis.decisions)


def test_eight_devices_send_over_their_links(compiler: None) -> None:
    """Rows over eight GPUs in groups of four: what each sends, and the time at NVLink's 450 GB/s in one direction."""
    mesh = AbstractMesh((2, 4), ("host", "rows"), axis_types=(AxisType.Auto, AxisType.Auto))

    def on_each(rows: jax.Array) -> tuple[jax.Array, ...]:
        total = jax.lax.psum(rows, ("host", "rows"))
        return total, jax.lax.all_gather(jnp.sin(rows), "rows", tiled=True)

    split = PartitionSpec(("host", "rows"))
    mapped = jax.shard_map(
        on_each, mesh=mesh, in_specs=split, out_specs=(PartitionSpec(), PartitionSpec("host")), check_vma=False
    )
    analysis = analyze(capture(mapped, jax.ShapeDtypeStruct((32768, 4096), jnp.float32)))
    assert analysis.device.link_bandwidth == 450e9
    one = 4096 * 4096 * 4  # bytes of one GPU's rows
    collectives = {launch.op_name.rpartition("/")[2]: launch for launch in analysis.launches if launch.link_bytes}
    assert {name: launch.link_bytes for name, launch in collectives.items()} == {
        "psum": 2 * one * 7 // 8,
        "all_gather": 3 * one,
    }
    for launch in collectives.values():
        assert launch.limiter == "link"
        assert launch.roofline_us == pytest.approx(launch.link_bytes / 450e9 * 1e6 + 2.4)
        assert launch.estimated_us >= launch.link_bytes / 450e9 * 1e6
    assert all(launch.limiter != "link" for launch in analysis.launches if launch.kind != "collective")
    assert any("at the peak rate of the links" in note for note in analysis.provenance.notes)


def test_a_mesh_of_one_device_says_nothing() -> None:
    lowered = lower(gathered(1), (ROWS,), target=load_target("h200"))
    assert (lowered.devices, lowered.notes) == (1, ())


def test_without_a_mesh_the_error_is_jaxs_own() -> None:
    with pytest.raises(CaptureError, match="mesh cannot be empty") as error:
        lower(gathered(0), (ROWS,), target=load_target("h200"))
    assert "_device" not in str(error.value)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("mode", ["forward", "grad"])
def test_arguments_cut_over_a_mesh_stay_cut(kind: AxisType, mode: Any) -> None:
    cut = NamedSharding(AbstractMesh((4,), ("rows",), axis_types=(kind,)), PartitionSpec("rows"))
    rows = jax.ShapeDtypeStruct(ROWS.shape, ROWS.dtype, sharding=cut)
    lowered = lower(lambda rows: jnp.sin(rows).sum(), (rows,), target=load_target("h200"), mode=mode)
    assert lowered.devices == 4


def test_meshes_that_name_no_gpu_name_the_target_inside_shard_map() -> None:
    """Also where the same function was traced for another target before, and JAX remembers it."""
    seen: list[str | None] = []

    def named(rows: jax.Array) -> jax.Array:
        device = jax.sharding.get_abstract_mesh().abstract_device
        seen.append(device and device.device_kind)
        return jnp.sin(rows)

    def spread(device: AbstractDevice | None) -> Any:
        mesh = AbstractMesh((2,), ("rows",), axis_types=(AxisType.Auto,), abstract_device=device)
        return jax.jit(jax.shard_map(named, mesh=mesh, in_specs=PartitionSpec("rows"), out_specs=PartitionSpec("rows")))

    unnamed = spread(None)
    for target in ("h200", "a100", "h200"):
        lower(unnamed, (ROWS,), target=load_target(target))
    assert list(dict.fromkeys(seen)) == ["NVIDIA H200", "NVIDIA A100-SXM4-80GB"]
    seen.clear()
    another = AbstractDevice(device_kind="NVIDIA B200", num_cores=148, platform="gpu")
    lower(spread(another), (ROWS,), target=load_target("h200"))
    assert set(seen) == {"NVIDIA B200"}
    seen.clear()
    jax.eval_shape(spread(None), ROWS)
    assert set(seen) == {None}


@pytest.mark.parametrize("devices", [1, 4])
def test_arguments_in_the_hosts_memory_stay_there(devices: int) -> None:
    mesh = AbstractMesh((devices,), ("rows",), axis_types=(AxisType.Auto,))
    place = NamedSharding(mesh, PartitionSpec("rows"), memory_kind="pinned_host")
    rows = jax.ShapeDtypeStruct(ROWS.shape, ROWS.dtype, sharding=place)
    lowered = lower(lambda rows: 2 * jax.device_put(rows, jax.memory.Space.Device), (rows,), target=load_target("h200"))
    assert lowered.devices == devices
    assert b"pinned_host" in lowered.bytecode


def over(mesh: AbstractMesh, spec: PartitionSpec, shape: tuple[int, ...]) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, spec))


FOUR = AbstractMesh((2, 2), ("data", "tensor"), axis_types=(AxisType.Auto, AxisType.Auto))


def test_cudnn_attention_lowers_over_a_mesh_without_devices_within_shard_map_and_outside() -> None:
    spec = PartitionSpec("data")
    heads = over(FOUR, spec, (4, 128, 2, 64))

    def attend(heads: jax.Array) -> jax.Array:
        return jax.nn.dot_product_attention(heads, heads, heads, implementation="cudnn")

    mapped = jax.shard_map(attend, mesh=FOUR, in_specs=spec, out_specs=spec, check_vma=False)
    inside = lower(mapped, (heads,), target=load_target("h200"))
    outside = lower(attend, (heads,), target=load_target("h200"))
    assert inside.devices == outside.devices == 4
    assert b"CustomSPMDPartitioning" not in inside.bytecode
    assert b"CustomSPMDPartitioning" in outside.bytecode


def test_calls_that_python_cuts_are_compiled_for_their_parts(compiler: None) -> None:
    """The worker asks this process how: a kernel and cuDNN's attention see one device's parts, and nothing is gathered.

    The gradient of rows on two axes is summed over the one that cuts them.
    """

    def layer(x: jax.Array, scale: jax.Array) -> jax.Array:
        heads = jnp.reshape(jnp.asarray(rms_norm(x, scale)), (*x.shape[:2], -1, 64))
        return jax.nn.dot_product_attention(heads, heads, heads, implementation="cudnn")

    x = over(FOUR, PartitionSpec("data"), (4, 256, 512))
    captured = capture(layer, x, over(FOUR, PartitionSpec(), (512,)), mode="grad")
    launches = analyze(captured).launches
    assert {"mosaic", "cudnn"} <= {launch.kind for launch in launches}
    (kernel,) = [launch for launch in launches if launch.kind == "mosaic" and launch.phase == "forward"]
    assert "bf16[2,256,512]" in {value.shape.partition("{")[0] for value in kernel.inputs}
    (total,) = [launch for launch in launches if launch.kind == "collective"]
    assert total.axes == (("data", 2),)
    assert parse_module(captured.require("final_hlo")).entry.parameters[0].shape.dimensions == (2, 256, 512)


def test_kernels_that_devices_share_state_the_products_of_their_parts(compiler: None) -> None:
    """XLA's partitioner drops the attribute that says so, and the kernel's name, by which a profile shows it."""
    x, w = over(FOUR, PartitionSpec("data"), (512, 256)), over(FOUR, PartitionSpec(), (256, 128))

    def product(x: jax.Array, w: jax.Array) -> jax.Array:
        with jax.named_scope("projection"):
            return linear(x, w, activation="gelu", implementation="mosaic")

    (launch,) = analyze(capture(product, x, w)).launches
    assert (launch.kernel, launch.flops) == ("linear_mosaic_gpu_kernel", 2 * 256 * 256 * 128)
    assert launch.scope == "projection"


def test_gradients_lie_as_their_arguments_do(compiler: None) -> None:
    """A weight cut over devices has its gradient scattered over them, not summed on each."""
    x, w = over(FOUR, PartitionSpec("data"), (64, 128)), over(FOUR, PartitionSpec("data", "tensor"), (128, 256))
    results = parse_module(capture(jnp.matmul, x, w, mode="grad").require("final_hlo")).entry.root_instruction.shape
    assert "bf16[64,128]" in str(results)


def test_a_specs_axes_are_those_of_the_arguments_mesh() -> None:
    def constrained(x: jax.Array) -> jax.Array:
        return jax.lax.with_sharding_constraint(jnp.sin(x), PartitionSpec("data", "tensor"))

    lowered = lower(constrained, (over(FOUR, PartitionSpec("data"), (64, 128)),), target=load_target("h200"))
    assert lowered.devices == 4
    assert b"sharding_constraint" in lowered.bytecode


@pytest.mark.parametrize(
    ("spec", "other", "message"),
    [
        (PartitionSpec(None, "tensor"), FOUR, r"w: the mesh axis tensor=2 does not divide dimension 1 of .*\(64, 7\)"),
        (PartitionSpec("rows"), AbstractMesh((8,), ("rows",)), "w is on a mesh of {'rows': 8}, and x on one of"),
    ],
)
def test_shardings_that_do_not_fit_name_argument_and_axis(spec: Any, other: Any, message: str) -> None:
    def product(x: jax.Array, w: jax.Array) -> jax.Array:
        return x @ w

    arguments = over(FOUR, PartitionSpec("data"), (64, 64)), over(other, spec, (64, 7))
    with pytest.raises(CaptureError, match=message):
        lower(product, arguments, target=load_target("h200"))


def test_sizes_that_are_left_open_are_told_by_name() -> None:
    (rows,) = jax.export.symbolic_shape("rows")
    with pytest.raises(CaptureError, match="sizes that are left open, rows: expected numbers"):
        lower(jnp.sin, (jax.ShapeDtypeStruct((rows, 4), jnp.float32),), target=load_target("h200"))


def test_an_array_on_one_device_is_its_shape_alone() -> None:
    assert lower(jnp.sin, (jnp.ones((4, 4)),), target=load_target("h200")).devices == 1


def test_attached_gpus_are_told_which_parts_kernels_take() -> None:
    attached = replace(load_target("attached"), device_kind="NVIDIA H200", core_count=132, compute_capability=(9, 0))
    arguments = over(FOUR, PartitionSpec("data"), (64, 128)), over(FOUR, PartitionSpec(), (128,))
    with warnings.catch_warnings(action="error"):
        lowered = lower(rms_norm, arguments, target=attached)
    assert lowered.devices == 4
    assert b"CustomSPMDPartitioning" in lowered.bytecode


def test_cpus_run_a_program_over_a_mesh() -> None:
    x, w = over(FOUR, PartitionSpec(None, "data"), (64, 128)), over(FOUR, PartitionSpec("data"), (128, 64))
    rows = np.arange(64)[::-1].astype(np.int32)

    def step(x: jax.Array, w: jax.Array, count: jax.Array, rows: jax.Array) -> tuple[jax.Array, jax.Array]:
        return jnp.sin(x)[rows] @ w, count + 1

    count = jax.ShapeDtypeStruct((8,), jnp.float32)
    analysis = analyze(capture(jax.jit(step, donate_argnums=2), x, w, count, rows, target="cpu", measure=True))
    assert [launch.axes for launch in analysis.launches if launch.kind == "collective"] == [(("data", 2),)]
    assert analysis.measured is not None
    assert (analysis.measured.source, analysis.measured.wall_us is None) == ("a profiled run of 4 devices", False)


def test_threads_share_the_devices_of_a_mesh(monkeypatch: pytest.MonkeyPatch) -> None:
    made = topologies.get_topology_desc

    def slowly(*args: Any, **kwargs: Any) -> Any:
        time.sleep(0.1)  # so that the other thread asks meanwhile
        return made(*args, **kwargs)

    monkeypatch.setattr(topologies, "get_topology_desc", slowly)
    with ThreadPoolExecutor(2) as pool:
        one, other = pool.map(lambda target: devices_of(target, 3), [load_target("h200")] * 2)
    assert one is other
