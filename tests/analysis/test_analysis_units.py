"""FLOPs, sources of values, roofline, kinds, memory and kernel resources, each on text written by hand."""

from __future__ import annotations

import json

import pytest

from hlo_analysis import DumpError
from hlo_analysis.costs.flops import Flops, flops_of
from hlo_analysis.costs.memory import parse_buffer_assignment
from hlo_analysis.costs.resources import Resources, read_resources
from hlo_analysis.costs.roofline import bound, supported_estimate, xla_estimate
from hlo_analysis.costs.traffic import usage_of
from hlo_analysis.hlo import parse_module
from hlo_analysis.hlo.scope import scope_of
from hlo_analysis.program.dataflow import Dataflow
from hlo_analysis.program.launch_kinds import kind_of
from hlo_analysis.program.launch_sites import find_launches
from hlo_analysis.records import Device, LaunchKind, Memory
from hlo_analysis.targets import load_target

DEVICE = Device(
    name="made-up",
    description="",
    memory_bandwidth=1e12,
    matrix_flops=(("bf16", 100e12), ("f8", 200e12)),
    vector_flops=10e12,
    launch_overhead_us=2.0,
    source="",
)


def module_of(*lines: str, before: str = ""):
    entry = "ENTRY %main {\n" + "\n".join(f"  {line}" for line in lines) + "\n}\n"
    return parse_module("HloModule m\n\n" + before + entry)


def flops(*lines: str, before: str = "") -> Flops:
    module = module_of(*lines, before=before)
    return flops_of(module, module.entry, module.entry.root_instruction)


def test_products_count_two_for_each_multiply_add():
    found = flops(
        "%a = bf16[4,8,16]{2,1,0} parameter(0)",
        "%b = bf16[4,16,32]{2,1,0} parameter(1)",
        "ROOT %d = f32[4,8,32]{2,1,0} dot(%a, %b), lhs_batch_dims={0}, lhs_contracting_dims={2}, "
        "rhs_batch_dims={0}, rhs_contracting_dims={1}",
    )
    assert found == Flops(matrix=(("bf16", 2 * 4 * 8 * 16 * 32),))


def test_a_float32_product_at_highest_precision_is_vector_work():
    line = "ROOT %d = f32[8,32]{1,0} dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}"
    operands = ("%a = f32[8,16]{1,0} parameter(0)", "%b = f32[16,32]{1,0} parameter(1)")
    count = 2 * 8 * 16 * 32
    assert flops(*operands, line) == Flops(matrix=(("f32", count),))
    assert flops(*operands, line + ", operand_precision={highest,highest}") == Flops(vector=count)
    assert flops(*operands, line + ", algorithm=dot_bf16_bf16_f32_x3") == Flops(matrix=(("bf16", 3 * count),))


def test_a_kernel_counts_the_products_that_the_program_states_beside_it():
    """Of 100 elements of its results; `jax.vmap` over four makes 400."""
    call = 'ROOT %c = (f32[4,25]{1,0}, f32[300]{0}) custom-call(%a), custom_call_target="mosaic_gpu_v2"'
    stated = """, frontend_attributes={matrix_flops="bf16 7000 / 100"}"""
    operand = "%a = bf16[8]{0} parameter(0)"
    assert flops(operand, call + stated) == Flops(matrix=(("bf16", 28000),))
    assert flops(operand, call) == Flops()
    assert flops(operand, call + """, frontend_attributes={matrix_flops="bf16 many"}""") == Flops()


def test_complex_products_solves_and_fourier_transforms():
    line = "ROOT %d = c64[8,32]{1,0} dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}"
    found = flops("%a = c64[8,16]{1,0} parameter(0)", "%b = c64[16,32]{1,0} parameter(1)", line)
    assert found.total == 8 * (8 * 16 * 32)
    found = flops(
        "%a = f32[4,16,16]{1,2,0} parameter(0)",
        "%b = f32[4,16,3]{1,2,0} parameter(1)",
        'ROOT %s = (f32[4,16,3]{1,2,0}, s8[0]{0}) custom-call(%a, %b), custom_call_target="__cublas$triangularSolve"',
    )
    assert found.total == 4 * 16 * 16 * 3
    scaled = (f"%{name} = f4e2m1fn[2,{rows},64]{{2,1,0}} parameter(0)" for name, rows in (("a", 8), ("b", 16)))
    call = 'ROOT %d = (bf16[2,8,16]{2,1,0}, u8[0]{0}) custom-call(%a, %b), custom_call_target="__cudnn$blockScaledDot"'
    assert flops(*scaled, call) == Flops(matrix=(("f4e2m1fn", 2 * 2 * 8 * 16 * 64),))
    assert dict(load_target("b200").device.matrix_flops)["f4"] == 9e15
    found = flops(
        "%x = f32[6,1024]{1,0} parameter(0)",
        "ROOT %f = c64[6,513]{1,0} fft(%x), fft_type=RFFT, fft_length={1024}",
    )
    assert found == Flops(vector=6 * 5 * 1024 * 10 // 2)


def test_grouped_convolution():
    found = flops(
        "%x = f32[2,10,10,8]{3,2,1,0} parameter(0)",
        "%w = f32[3,3,2,16]{3,2,1,0} parameter(1)",
        "ROOT %c = f32[2,8,8,16]{3,2,1,0} convolution(%x, %w), window={size=3x3}, dim_labels=b01f_01io->b01f, "
        "feature_group_count=4",
    )
    assert found.total == 2 * (2 * 8 * 8 * 16) * (3 * 3 * 2)


def test_a_fusion_counts_elementwise_work_and_reductions_but_no_moves():
    body = """%sum {
  %l = f32[] parameter(0)
  %r = f32[] parameter(1)
  ROOT %s = f32[] add(%l, %r)
}

%body {
  %p = bf16[8,16]{1,0} parameter(0)
  %c = f32[8,16]{1,0} convert(%p)
  %e = f32[8,16]{1,0} exponential(%c)
  %t = f32[16,8]{0,1} transpose(%e), dimensions={1,0}
  %z = f32[] constant(0)
  ROOT %r2 = f32[16]{0} reduce(%t, %z), dimensions={1}, to_apply=%sum
}

"""
    found = flops(
        "%x = bf16[8,16]{1,0} parameter(0)",
        "ROOT %f = f32[16]{0} fusion(%x), kind=kInput, calls=%body",
        before=body,
    )
    assert found == Flops(vector=2 * 8 * 16)


CONTROL = """%body {
  %s = (s32[], f32[8]{0}, f32[8]{0}) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %x = f32[8]{0} get-tuple-element(%s), index=1
  %k = f32[8]{0} get-tuple-element(%s), index=2
  %y = f32[8]{0} add(%x, %k)
  ROOT %t = (s32[], f32[8]{0}, f32[8]{0}) tuple(%i, %y, %k)
}

%test {
  %s2 = (s32[], f32[8]{0}, f32[8]{0}) parameter(0)
  ROOT %go = pred[] constant(true)
}

%yes {
  %v = f32[8]{0} parameter(0)
  ROOT %n = f32[8]{0} negate(%v)
}

%no {
  ROOT %w = f32[8]{0} parameter(0)
}

%later {
  %q = f32[8]{0} parameter(0)
  ROOT %sine = f32[8]{0} sine(%q)
}

"""
CONTROL_ENTRY = (
    "%zero = s32[] constant(0)",
    "%a = f32[8]{0} parameter(0)",
    "%b = f32[8]{0} parameter(1)",
    "%flag = pred[] parameter(2)",
    "%c = f32[8]{0} copy(%a)",
    "%init = (s32[], f32[8]{0}, f32[8]{0}) tuple(%zero, %c, %b)",
    "%loop = (s32[], f32[8]{0}, f32[8]{0}) while(%init), condition=%test, body=%body",
    "%out = f32[8]{0} get-tuple-element(%loop), index=1",
    "%bits = f32[2,4]{1,0} bitcast(%out)",
    "%back = f32[8]{0} bitcast(%bits)",
    "%either = f32[8]{0} conditional(%flag, %back, %b), true_computation=%yes, false_computation=%no",
    "%start = ((f32[8]{0}), f32[8]{0}, u32[]) async-start(%either), calls=%later",
    "ROOT %done = f32[8]{0} async-done(%start)",
)


@pytest.mark.parametrize(
    ("computation", "instruction", "sources"),
    [
        ("main", "out", ["y", "c"]),
        ("main", "back", ["y", "c"]),
        ("body", "x", ["y", "c"]),
        ("body", "k", ["b"]),
        ("body", "i", ["zero"]),
        ("yes", "v", ["y", "c"]),
        ("main", "either", ["n", "b"]),
        ("later", "q", ["n", "b"]),
        ("main", "done", ["sine"]),
        ("main", "a", ["a"]),
    ],
)
def test_sources_across_control_flow(computation, instruction, sources):
    flow = Dataflow(module_of(*CONTROL_ENTRY, before=CONTROL))
    assert [source.name for source in flow.sources(computation, instruction)] == sources


@pytest.mark.parametrize(("trips", "sources"), [(3, ["y"]), (0, ["y", "c"])])
def test_what_a_loop_leaves_is_not_what_it_began_with_where_it_is_known_to_run(trips, sources):
    """What it hands on as it came still comes from outside."""
    known = f', backend_config={{"known_trip_count":{{"n":"{trips}"}}}}'
    lines = [line + known if " while(" in line else line for line in CONTROL_ENTRY]
    flow = Dataflow(module_of(*lines, before=CONTROL))
    assert [source.name for source in flow.sources("main", "out")] == sources
    assert [source.name for source in flow.sources("main", "loop", (2,))] == ["b"]
    assert [source.name for source in flow.sources("body", "x")] == ["y", "c"]


def test_sources_of_tuple_elements():
    flow = Dataflow(
        module_of(
            "%a = f32[8]{0} parameter(0)",
            '%call = (f32[8]{0}, f32[4]{0}) custom-call(%a), custom_call_target="x"',
            "ROOT %n = f32[4]{0} negate(%call#1)",
        )
    )
    assert [source.name for source in flow.sources("main", "call#1")] == ["call#1"]


def test_what_starts_a_copy_or_collective_writes_one_element_of_its_tuple():
    module = module_of(
        "%a = f32[8]{0} parameter(0)",
        "%start = (f32[8]{0:S(5)}, f32[8]{0}, u32[]) copy-start(%a)",
        "%copied = f32[8]{0:S(5)} copy-done(%start)",
        "%begun = (f32[8]{0}, f32[32]{0}) all-gather-start(%a), dimensions={0}",
        "%gathered = f32[32]{0} all-gather-done(%begun)",
        "ROOT %all = (f32[8]{0:S(5)}, f32[32]{0}) tuple(%copied, %gathered)",
    )
    instructions = module.entry.instructions
    assert usage_of(module, module.entry, instructions["start"]).writes == {(0,): 32}
    assert usage_of(module, module.entry, instructions["begun"]).writes == {(1,): 128}
    assert kind_of(module, instructions["begun"], "") == "collective"
    flow = Dataflow(module)
    found = [source.name for element in (0, 1) for source in flow.sources("main", "all", (element,))]
    assert found == ["start#0", "begun#1"]
    launched = [site.instruction for site in find_launches(module, None, None).sites]
    assert launched == [instructions["start"], instructions["begun"]]


def test_roofline_takes_the_longer_and_names_it():
    memory = bound(10_000_000, Flops(matrix=(("bf16", 10**8),)), DEVICE)
    assert (memory.time_us, memory.limiter) == (pytest.approx(10 + 2), "memory")
    compute = bound(10_000_000, Flops(matrix=(("bf16", 10**10),)), DEVICE)
    assert (compute.time_us, compute.limiter) == (pytest.approx(100 + 2), "compute")
    tiny = bound(1000, Flops(), DEVICE)
    assert (tiny.time_us, tiny.limiter) == (pytest.approx(0.001 + 2), "overhead")


def test_roofline_peaks_by_type():
    assert bound(0, Flops(matrix=(("f8e4m3fn", 10**10),)), DEVICE).compute_us == pytest.approx(50)
    # Not in the device's table: the vector units do it.
    assert bound(0, Flops(matrix=(("f64", 10**10),)), DEVICE).compute_us == pytest.approx(1000)
    assert bound(0, Flops(vector=10**10), DEVICE).compute_us == pytest.approx(1000)


def costs(**by_model: float):
    entries = [{"name": name.replace("_", "-").strip("-"), "exec_time_us": time} for name, time in by_model.items()]
    config = json.dumps({"reification_cost": entries})
    return module_of(
        "%a = f32[8]{0} parameter(0)", f"ROOT %c = f32[8]{{0}} copy(%a), backend_config={config}"
    ).entry.root_instruction


def test_xla_estimate_takes_the_model_meant_for_the_kind():
    instruction = costs(_=14.0, indexing_cost_model=28.0, experimental_gemm_cost_model=50.0, sol=7.0)
    tiling = {"xla_gpu_experimental_cost_model_gemm_tiling_default": "true"}
    assert xla_estimate(instruction, "loop", {}) == (14.0, "gpu-performance-model")
    assert xla_estimate(instruction, "triton", {}) == (28.0, "indexing-cost-model")
    assert xla_estimate(instruction, "triton_gemm", {}) is None
    assert xla_estimate(instruction, "triton_gemm", tiling) == (50.0, "experimental-gemm-cost-model")
    assert xla_estimate(instruction, "cublaslt", {}) == (7.0, "sol")
    assert xla_estimate(instruction, "mosaic", {}) is None
    assert xla_estimate(costs(_=9e8), "loop", {}) is None


@pytest.mark.parametrize(
    ("target", "kind"),
    [
        ("__cublas$lt$matmul$f8", "cublaslt"),
        ("__cublas$gemm", "cublas"),
        ("__cudnn$fmhaSoftmax", "cudnn"),
        ("mosaic_gpu_v2", "mosaic"),
        ("triton_kernel_call_ffi", "jax_triton"),
        ("__gpu$xla.gpu.triton", "jax_triton"),
        ("cusolver_potrf_ffi", "custom_call"),
    ],
)
def test_custom_calls_by_target(target, kind):
    module = module_of(
        "%a = f32[8]{0} parameter(0)", f'ROOT %c = f32[8]{{0}} custom-call(%a), custom_call_target="{target}"'
    )
    assert kind_of(module, module.entry.root_instruction, "kCustomCall") == kind


def test_a_call_that_reads_a_slice_in_its_place():
    body = """%body {
  %p = f32[8]{0} parameter(0)
  %s = f32[4]{0} slice(%p), slice={[0:4]}
  ROOT %c = f32[4]{0} custom-call(%s), custom_call_target="mosaic_gpu_v2"
}

"""
    line = "ROOT %f = f32[4]{0} fusion(%a), kind=kCustom, calls=%body, backend_config="
    config = '{"fusion_backend_config":{"kind":"__custom_fusion"}}'
    module = module_of("%a = f32[8]{0} parameter(0)", line + config, before=body)
    assert kind_of(module, module.entry.root_instruction, "kCustomCall") == "mosaic"


def test_a_product_left_to_the_loop_emitter():
    body = """%body {
  %p = bf16[64,64]{1,0} parameter(0)
  ROOT %d = bf16[64,64]{1,0} dot(%p, %p), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

"""
    line = "ROOT %f = bf16[64,64]{1,0} fusion(%a), kind=kCustom, calls=%body, backend_config="

    def kind(config: str) -> str:
        module = module_of("%a = bf16[64,64]{1,0} parameter(0)", line + config, before=body)
        return kind_of(module, module.entry.root_instruction, "kCustomKernel")

    assert kind('{"native_emitter_backend_config":{}}') == "loop"
    assert kind('{"fusion_backend_config":{"kind":"__triton_gemm"}}') == "triton_gemm"
    assert kind('{"fusion_backend_config":{"kind":"__triton"}}') == "triton_gemm"
    # Without matrix units it is vector work.
    product = Flops(matrix=(("bf16", 10**10),), vector=5)
    assert product.without_matrix_units() == Flops(vector=10**10 + 5)
    assert bound(0, product, DEVICE).compute_us < bound(0, product.without_matrix_units(), DEVICE).compute_us


def test_buffer_assignment():
    text = """\
BufferAssignment:
allocation 0: size 100, page 0, maybe-live-out:
 value: <1 a @0> (size=100,offset=0): bf16[50]{0}
allocation 1: size 30, page 0, parameter 0, shape |bf16[15]| at ShapeIndex {}:
allocation 2: size 7, page 0, parameter 1, shape |s8[7]| at ShapeIndex {}, maybe-live-out:
allocation 3: size 4, page 0, thread-local:
allocation 4: size 1000, page 0, preallocated-temp:
allocation 5: size 16, page 0, constant:
allocation 6: size 5000, color 5, page 0, preallocated-temp:
"""
    assert parse_buffer_assignment(text) == Memory(
        argument_bytes=37, output_bytes=100, temp_bytes=1000, peak_bytes=100 + 37 + 1000 + 16
    )


def test_kernel_resources():
    kernel = {
        "kernel": "k",
        "registers": 63,
        "spill_store_bytes": 8,
        "spill_load_bytes": 4,
        "static_shared_bytes": 1,
        "dynamic_shared_bytes": None,
        "grid": [8, 1, 1],
        "block": None,
        "ptx": ".entry k()",
    }
    assert read_resources(json.dumps([kernel])) == {
        "k": (Resources(registers=63, spill_bytes=12, shared_memory_bytes=1, grid=(8, 1, 1), ptx=".entry k()"),)
    }
    assert read_resources(None) == {}
    with pytest.raises(DumpError, match="expected a JSON list of kernels"):
        read_resources('{"a": 1}')


def test_the_name_of_a_pallas_kernel_is_no_scope():
    assert scope_of("jit(block)/block/mlp_norm/rms_norm_residual/mpmd_map") == ("block/mlp_norm", "forward")


@pytest.mark.parametrize(
    ("kind", "ours", "xla", "said"),
    [
        ("loop", 30.0, 10.0, "support the report's in 95% of the time"),
        ("transpose", 10.0, 30.0, "support XLA's in 63% of the time"),
        ("loop", 15.0, 10.0, ""),
        ("triton_gemm", 30.0, 10.0, ""),
        ("loop", 30.0, None, ""),
    ],
)
def test_which_estimate_recordings_support(monkeypatch, kind: LaunchKind, ours: float, xla: float | None, said: str):
    monkeypatch.setattr("hlo_analysis.costs.roofline.OURS_IS_CLOSER", {"loop": 0.95, "transpose": 0.37})
    support = supported_estimate(kind, ours, xla)
    assert support.endswith(said)
    assert bool(said) is bool(support)
