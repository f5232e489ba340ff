"""What a capture holds: for a GPU that is not there, forward and gradient, and for the CPU."""

from __future__ import annotations

import functools
import gc
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from capture_programs import FLOATS, INTEGERS, LAYER_ARGUMENTS, layer
from jax._src.cudnn import fused_attention_stablehlo
from jax.experimental.pallas import mosaic_gpu as plgpu

from hlo_analysis import analyze
from hlo_analysis.capture import Capture, capture
from hlo_analysis.capture.lowering import Lowered, describe_arguments, gradient, lower
from hlo_analysis.hlo import parse_module
from hlo_analysis.targets import load_target

STAGES = ("before_optimizations", "before_priority_fusion", "after_priority_fusion", "before_rename", "after_rename")
ARTEFACTS = (
    *STAGES,
    "final_hlo",
    "thunk_sequence",
    "thunk_metadata",
    "priority_fusion_dump",
    "buffer_assignment",
    "memory_usage",
    "target_config",
    "worker_log",
)


def test_every_artefact_is_there_and_is_what_it_says(gemm: Capture) -> None:
    for key in ARTEFACTS:
        assert gemm.text(key), key
    assert gemm.text("no such artefact") is None
    for key in (*STAGES, "final_hlo"):
        assert parse_module(gemm.require(key)).name == "jit_layer", key
    assert "mlp/dot_general" in gemm.require("final_hlo")
    assert 'name: "NVIDIA H200"' in gemm.require("target_config")
    assert "fusion_steps" in gemm.require("priority_fusion_dump")
    assert gemm.manifest.complete


def test_manifest_says_how_it_was_made(gemm: Capture) -> None:
    manifest = gemm.manifest
    provenance = manifest.provenance
    assert manifest.label == "a layer"
    assert manifest.device.name == manifest.target == provenance.target == "h200"
    assert manifest.compute_capability == (9, 0)
    assert provenance.function == "layer"
    assert provenance.mode == "forward"
    assert provenance.arguments == ("x: bf16[256,256]", "weights['kernel']: bf16[256,256]", "index: i32[3]")
    assert dict(provenance.versions)["jax"] == jax.__version__
    assert provenance.compile_seconds > 0
    assert provenance.created.endswith("+00:00")
    matrix = 256 * 256 * 2
    assert gemm.memory.argument_bytes == 2 * matrix + 3 * 4
    assert gemm.memory.output_bytes >= matrix + 3 * 4
    assert gemm.memory.peak_bytes >= gemm.memory.argument_bytes + gemm.memory.output_bytes


def test_small_gemm_is_not_in_the_recording(gemm: Capture) -> None:
    assert gemm.provenance.gemm_choice == "default"
    assert gemm.provenance.autotune_hits == 0
    assert gemm.provenance.autotune_lookups >= 1
    assert any("XLA's default kernels" in note for note in gemm.provenance.notes)


def test_a_program_without_gemm_chooses_nothing(compiler: None) -> None:
    made = capture(lambda x: jnp.tanh(x) + 1, FLOATS, autotune=None)
    assert made.provenance.gemm_choice == "none"
    assert made.provenance.notes == ()
    assert made.require("thunk_sequence").count("kCustomKernel") == 1


def test_gradient_computes_what_a_training_step_does() -> None:
    rng = np.random.default_rng(0)
    x, kernel, cotangent = (jnp.asarray(rng.normal(size=(4, 4)), jnp.float32) for _ in range(3))
    index = jnp.arange(3)
    program, cotangents = gradient(layer, (x, {"kernel": kernel}, index))
    assert [(leaf.shape, leaf.dtype) for leaf in cotangents] == [((4, 4), jnp.float32)]
    (y, next_index), gradients = program(x, {"kernel": kernel}, index, [cotangent])
    expected, pullback = jax.vjp(lambda x, kernel: jnp.tanh(x @ kernel), x, kernel)
    np.testing.assert_array_equal(y, expected)
    np.testing.assert_array_equal(next_index, [1, 2, 3])
    assert len(gradients) == 2
    for ours, theirs in zip(gradients, pullback(cotangent), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-6)


def test_grad_mode(compiler: None) -> None:
    made = capture(layer, *LAYER_ARGUMENTS, mode="grad", autotune=None)
    module = parse_module(made.require("before_optimizations"))
    assert module.name == "jit_layer_grad"
    parameters = [parameter.shape for parameter in module.entry.parameters]
    # The integer argument takes part forward, and the cotangent of the one floating-point output comes last.
    assert [str(shape) for shape in parameters] == ["bf16[256,256]"] * 2 + ["s32[3]", "bf16[256,256]"]
    root = module.entry.instructions[module.entry.root]
    assert [str(shape) for shape in root.shape.elements] == ["bf16[256,256]", "s32[3]"] + ["bf16[256,256]"] * 2
    assert "transpose(jvp(mlp))" in made.require("final_hlo")
    assert made.provenance.mode == "grad"
    assert made.provenance.gemm_choice == "default"
    products = made.require("before_config_assignment").count("__triton_gemm")
    assert products == 3, "one product forward, two backward"


@pytest.mark.parametrize("form", ["jitted", "partial", "arrays"])
def test_any_function_and_any_arguments(form: str) -> None:
    def scaled(x: jax.Array, factor: float = 1.0) -> jax.Array:
        return x * factor

    fn = {"jitted": jax.jit(scaled), "partial": functools.partial(scaled, factor=2.0), "arrays": scaled}[form]
    x = jnp.ones((8, 8)) if form == "arrays" else jax.ShapeDtypeStruct((8, 8), jnp.float32)
    made = capture(fn, x, target="cpu")
    assert made.provenance.function == "scaled"
    assert made.provenance.arguments == ("x: f32[8,8]",)
    assert "f32[8,8]" in made.require("final_hlo")


def test_arguments_are_named_by_path() -> None:
    tree = {"a": [FLOATS, INTEGERS], "b": jax.eval_shape(lambda: jax.random.key(0))}
    named = describe_arguments(lambda *rest: rest, (tree, 2.5))
    assert named == (
        "argument_0['a'][0]: bf16[256,256]",
        "argument_0['a'][1]: i32[3]",
        "argument_0['b']: key<fry>[]",
        "argument_1: f32[]",
    )


def test_large_constants_are_pointed_out() -> None:
    assert Lowered(bytecode=b"x" * 1000, function="f", arguments=()).notes == ()
    (note,) = Lowered(bytecode=bytes(64 << 20), function="f", arguments=()).notes
    assert "closes over 64 MiB of arrays" in note


def test_frames_are_the_users_own(gemm: Capture) -> None:
    files = gemm.require("before_optimizations").partition("FileNames")[2].partition("FunctionNames")[0]
    assert "conftest.py" in files
    assert "lowering.py" not in files
    assert "api.py" not in files


def test_lower_context_is_entered_while_tracing(compiler: None) -> None:
    with jax.default_matmul_precision("highest"):
        expected = jax.make_jaxpr(lambda x: x @ x)(jnp.ones((2, 2)))
    made = capture(lambda x: x @ x, FLOATS, target="cpu", lower_context=jax.default_matmul_precision("highest"))
    assert "HIGHEST" in str(expected)
    assert "operand_precision={highest,highest}" in made.require("before_optimizations")


def test_cpu_target_has_no_launches_and_no_choices() -> None:
    made = capture(layer, *LAYER_ARGUMENTS, target="cpu")
    assert made.manifest.kind == "cpu"
    assert made.provenance.gemm_choice == "none"
    assert parse_module(made.require("final_hlo")).name == "jit_layer"
    assert made.text("thunk_sequence") is None
    assert made.text("before_cpu_fusion")
    assert made.memory.argument_bytes == 2 * 256 * 256 * 2 + 12


@pytest.mark.parametrize("name", ["a100", "a6000", "b200", "h100", "rtx-pro-6000"])
def test_every_shipped_gpu_compiles(name: str, compiler: None) -> None:
    made = capture(layer, *LAYER_ARGUMENTS, target=name)
    assert made.manifest.complete
    assert made.manifest.device.name == name
    assert made.require("thunk_sequence").count("\n") >= 2
    major, minor = made.manifest.compute_capability
    assert f"sm_{major}.{minor}" in made.manifest.files["final_hlo"]


def test_recorded_config_as_target(gemm: Capture, tmp_path: Path) -> None:
    path = tmp_path / "mine.txtpb"
    path.write_text(gemm.require("target_config").replace('"NVIDIA H200"', '"NVIDIA H200"  # as recorded'))
    made = capture(lambda x: x + 1, FLOATS, target=path)
    assert made.manifest.target == "mine"
    assert made.manifest.device.matrix_flops == gemm.manifest.device.matrix_flops


def test_cudnn_attention_without_cudnn(compiler: None) -> None:
    asked = fused_attention_stablehlo.check_compute_capability
    heads = jax.ShapeDtypeStruct((1, 128, 4, 64), jnp.bfloat16)

    def attention(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        return jax.nn.dot_product_attention(query, key, value, is_causal=True, implementation="cudnn")

    made = capture(attention, heads, heads, heads, mode="grad")
    assert made.require("thunk_sequence").count(": kCuDnn ") == 2
    assert fused_attention_stablehlo.check_compute_capability is asked, "JAX's own functions are back in place"


def test_resources_of_kernels(compiler: None) -> None:
    def body(x_ref, y_ref, scratch_ref):
        del scratch_ref
        y_ref[...] = plgpu.load(x_ref.at[...], layout=plgpu.Layout.WGMMA, optimized=False) + 1

    def program(x: jax.Array) -> jax.Array:
        kernel = plgpu.kernel(
            body,
            out_type=jax.ShapeDtypeStruct((128, 128), jnp.float32),
            grid=(7,),
            grid_names=("i",),
            scratch_types=(plgpu.SMEM((128, 256), jnp.float32),),
        )
        return jnp.sin(kernel(x)).sum()

    made = capture(program, jax.ShapeDtypeStruct((128, 128), jnp.float32))
    (mosaic,) = json.loads(made.require("mosaic_resources"))
    assert mosaic["kernel"] == "body_mosaic_gpu_kernel"
    assert (mosaic["grid"], mosaic["block"]) == ([7, 1, 1], [128, 1, 1])
    assert mosaic["dynamic_shared_bytes"] == 128 * 256 * 4
    assert 32 < mosaic["registers"] <= 255
    assert mosaic["spill_store_bytes"] == mosaic["spill_load_bytes"] == 0
    assert made.require("thunk_sequence").count(": kCustomCall ") == 1
    xla = {kernel["kernel"]: kernel for kernel in json.loads(made.require("ptx_resources"))}
    assert set(xla) == {"wrapped_sine", "input_reduce_fusion"}
    assert all(8 <= kernel["registers"] <= 255 for kernel in xla.values())
    static = xla["input_reduce_fusion"]["static_shared_bytes"]
    assert static > 0

    analysis = analyze(made)
    launches = {launch.kernel: launch for launch in analysis.launches}
    for name, launch in launches.items():
        assert launch.ptx is not None
        assert f".visible .entry {name}(" in analysis.ptx[launch.ptx]
    reduction, own = launches["input_reduce_fusion"], launches["body_mosaic_gpu_kernel"]
    assert reduction.shared_memory_bytes == static
    assert own.shared_memory_bytes == 128 * 256 * 4
    # Of an H200's 228 KiB a block takes 129 KiB: there is one block of four warps, of 64 warps.
    assert (own.occupancy, own.occupancy_limiter) == (4 / 64, "shared memory")


def test_temporary_files_go_with_the_capture(temporary_folders) -> None:
    made = capture(lambda x: x + 1, INTEGERS, target="cpu")
    assert len(temporary_folders()) == 1
    del made
    gc.collect()
    assert temporary_folders() == []


def test_kept_files_stay(tmp_path: Path, temporary_folders) -> None:
    made = capture(lambda x: x + 1, INTEGERS, target="cpu", keep=tmp_path / "kept")
    path = made.path
    del made
    gc.collect()
    assert temporary_folders() == []
    assert Capture.load(path).require("final_hlo").startswith("HloModule")


def test_static_arguments_stay_static_in_a_gradient() -> None:
    fn = jax.jit(lambda x, power, way: x**power if way == "power" else x, static_argnums=(1, 2))
    lowered = lower(fn, (FLOATS, 3, "power"), target=load_target("cpu"), mode="grad")
    assert len(lowered.arguments) == 3
