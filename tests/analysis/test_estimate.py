"""The estimate of one launch, and the sectors that strided reads take."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from hlo_analysis.costs.coalescing import cache_bytes
from hlo_analysis.costs.estimate import Work, estimate, longest
from hlo_analysis.costs.flops import Flops, flops_of
from hlo_analysis.costs.resources import count_instructions
from hlo_analysis.costs.slow_work import (
    AtomicUpdates,
    atomic_updates,
    filter_channels,
    has_unaligned_rows,
    is_transposed,
    loads_slowly,
)
from hlo_analysis.hlo import parse_module
from hlo_analysis.records import Efficiency, LaunchKind
from hlo_analysis.targets import load_target

DEVICE = replace(
    load_target("h200").device,
    memory_bandwidth=1e12,
    matrix_flops=(("bf16", 1e15), ("f32", 1e15)),
    core_count=100,
    clock_hz=1e9,
    efficiency=Efficiency(
        memory=0.5,
        vector=0.5,
        power=0.8,
        matrix=0.5,
        attention=0.25,
        kernel_us=1.0,
        issued_per_clock=4.0,
        clocks_per_instruction=8.0,
        blocks_per_clock=0.5,
        bytes_per_clock=50.0,
        cache_bytes_per_clock=20.0,
        atomics_per_clock=0.5,
        contended_clocks=50.0,
        slow_loads=0.25,
        transposed=0.5,
        few_channels=0.1,
        direct_flops_per_clock=1.0,
        source="",
    ),
)
PRODUCT = Flops(matrix=(("bf16", 10**12),))


def took(kind: LaunchKind = "loop", /, **work: Any) -> float:
    """The estimate without the microsecond of any kernel."""
    return estimate(Work(kind=kind, **work), DEVICE) - 1.0


def test_the_longest_of_memory_compute_and_cache():
    assert took(bytes_moved=10**9) == pytest.approx(2000)
    assert took("cublaslt", bytes_moved=10**9, flops=PRODUCT) == pytest.approx(2500)
    assert took("cudnn", bytes_moved=10**9, flops=PRODUCT, attention=True) == pytest.approx(5000)
    assert took(bytes_moved=10**9, cache_bytes=6 * 10**9) == pytest.approx(3000)
    assert took() == 0


def test_vector_work_and_atomics_take_their_time():
    assert took(flops=Flops(vector=10**9)) == pytest.approx(10**9 * 2e6 / DEVICE.vector_flops)
    assert took("scatter", atomic_updates=AtomicUpdates(elements=10**8, width=64)) == pytest.approx(2000)


def test_a_scatter_takes_longest_if_all_rows_are_the_same():
    updates = AtomicUpdates(elements=8192 * 1024, width=1024)
    work = Work(kind="scatter", atomic_updates=updates)
    # 204800 threads add 200 rows of 1024 at once.
    assert longest(work, DEVICE) == pytest.approx(8192 * 200 * 50 / 1e3)
    assert longest(Work(kind="loop"), DEVICE) is None
    certain = Work(kind="scatter", atomic_updates=replace(updates, places=1))
    assert longest(certain, DEVICE) is None
    assert estimate(certain, DEVICE) == pytest.approx(8192 * 200 * 50 / 1e3 + 1)


def test_warps_issue_instructions_as_fast_as_there_are_many():
    kernel = {"grid": (100, 100, 1), "block": (8 * 32, 1, 1), "instructions": 1000}

    def issued(**work: Any) -> float:
        """With the microsecond of any kernel, in which it has begun to issue them."""
        return took(**work) + 1.0

    # 100 blocks a multiprocessor, 8 warps each.
    assert issued(**kernel) == pytest.approx(100 * 8 * 1000 / 4 / 1e3)
    assert issued(**kernel, resident_warps=64) == pytest.approx(200)
    # One block at a time: 8 warps issue one instruction in a clock.
    assert issued(**kernel, resident_warps=8) == pytest.approx(800)
    # No more warps than the launch has.
    assert issued(grid=(1,), block=(32,), instructions=1000, resident_warps=64) == pytest.approx(8)


def test_blocks_start_one_after_the_other():
    assert took(grid=(10**6, 1, 1), block=(128, 1, 1)) == pytest.approx(2000)


def test_few_blocks_move_few_bytes():
    assert took("reduction", bytes_moved=10**7, grid=(4, 1, 1)) == pytest.approx(10**7 / (4 * 50) / 1e3)
    assert took("reduction", bytes_moved=10**7, grid=(200, 1, 1)) == pytest.approx(20)


def test_products_by_how_their_operands_lie():
    assert took("triton_gemm", flops=PRODUCT, loads_slowly=True) == pytest.approx(10000)
    assert took("triton_gemm", bytes_moved=10**9, loads_slowly=True) == pytest.approx(8000)
    assert took("cublaslt", bytes_moved=10**9, unaligned=True) == pytest.approx(8000)
    assert took("cublaslt", flops=PRODUCT, unaligned=True) == took("cublaslt", flops=PRODUCT)
    assert took("cublaslt", flops=PRODUCT, transposed=True) == pytest.approx(5000)


def test_convolutions_by_the_channels_that_a_filter_sums_over():
    assert took("cudnn", flops=PRODUCT, filter_channels=64) == pytest.approx(2500)
    assert took("cudnn", flops=PRODUCT, filter_channels=3) == pytest.approx(25000)
    assert took("cudnn", flops=Flops(matrix=(("f32", 10**9),)), filter_channels=1) == pytest.approx(10**4)


PRODUCT_OF_ROWS = """HloModule product
ENTRY main {
  x = %s parameter(0)
  w = bf16[%d,128]{1,0} parameter(1)
  ROOT dot = bf16[64,128]{1,0} dot(x, w), lhs_contracting_dims={%d}, rhs_contracting_dims={0}
}"""


@pytest.mark.parametrize(
    ("x", "axis", "slow"),
    [
        # Summed along rows: 16 bytes at once or not.
        ("bf16[64,50257]{1,0}", 1, True),
        ("bf16[64,30522]{1,0}", 1, True),
        ("bf16[64,50264]{1,0}", 1, False),
        # Summed over rows: words of 4 bytes are copied as they are.
        ("bf16[64,30522]{1,0}", 0, False),
        ("bf16[64,50257]{1,0}", 0, True),
        # Rows of the other dimension.
        ("bf16[64,50257]{0,1}", 1, False),
        # A vector has one row, whatever its layout says.
        ("bf16[1,50257]{0,1}", 1, False),
        ("f32[64,50257]{1,0}", 1, False),
    ],
)
def test_operands_that_threads_load_a_few_bytes_at_a_time(x: str, axis: int, slow: bool):
    module = parse_module(PRODUCT_OF_ROWS % (x, 64, axis))
    assert loads_slowly(module.entry.instructions) is slow


@pytest.mark.parametrize(
    ("kind", "operand", "result", "unaligned"),
    [
        ("cublaslt", "bf16[192,1500,64]{2,1,0}", "bf16[192,1500,1500]{2,1,0}", True),
        ("cublaslt", "bf16[192,1500,1500]{2,1,0}", "bf16[192,1500,64]{2,1,0}", True),
        ("cublaslt", "bf16[192,1500,64]{2,1,0}", "bf16[192,64,1504]{2,1,0}", False),
        ("cublaslt", "f32[192,1500,64]{2,1,0}", "f32[192,1500,1500]{2,1,0}", False),
        ("cublaslt", "bf16[8,64]{1,0}", "bf16[1,1500]{1,0}", False),
        # Triton's loads are told apart by what it sums along.
        ("triton_gemm", "bf16[192,1500,1500]{2,1,0}", "bf16[192,1500,64]{2,1,0}", False),
        ("triton_gemm", "bf16[192,1500,64]{2,1,0}", "bf16[192,1500,1500]{2,1,0}", True),
        ("loop", "bf16[192,1500,64]{2,1,0}", "bf16[192,1500,1500]{2,1,0}", False),
    ],
)
def test_rows_at_no_multiple_of_16_bytes(kind: str, operand: str, result: str, unaligned: bool):
    program = f"HloModule m\nENTRY main {{\n  x = {operand} parameter(0)\n  ROOT y = {result} custom-call(x)\n}}"
    x, y = parse_module(program).entry.instructions.values()
    assert has_unaligned_rows(kind, [x.shape], y.shape) is unaligned


LIBRARY_PRODUCT = """HloModule product
ENTRY main {
  x = %s parameter(0)
  w = %s parameter(1)
  ROOT dot = f32[512,512]{1,0} custom-call(x, w), custom_call_target="__cublas$lt$matmul", \
backend_config={"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["%d"],\
"rhs_contracting_dimensions":["%d"]}}}
}"""


@pytest.mark.parametrize(
    ("dtype", "axes", "transposed"),
    [
        ("f32", (1, 1), False),
        ("f32", (0, 1), False),
        ("f32", (0, 0), True),
        ("bf16", (0, 0), False),
        ("c64", (0, 0), False),
    ],
)
def test_float32_products_that_sum_over_rows(dtype: str, axes: tuple[int, int], transposed: bool):
    shape = f"{dtype}[512,512]{{1,0}}"
    module = parse_module(LIBRARY_PRODUCT % (shape, shape, *axes))
    operands = [module.entry.instructions[name].shape for name in ("x", "w")]
    assert is_transposed(module.entry.root_instruction, operands) is transposed


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ('"operand_precision":["DEFAULT","DEFAULT"]', Flops(matrix=(("f32", 2**28),))),
        ('"operand_precision":["HIGHEST","HIGHEST"]', Flops(vector=2**28)),
        ('"algorithm":"ALG_DOT_F32_F32_F32"', Flops(vector=2**28)),
        ('"algorithm":"ALG_DOT_TF32_TF32_F32_X3"', Flops(matrix=(("f32", 3 * 2**28),))),
    ],
)
def test_a_library_s_product_is_as_exact_as_its_configuration_says(config: str, expected: Flops) -> None:
    text = LIBRARY_PRODUCT % ("f32[512,512]", "f32[512,512]", 1, 0)
    text = text.replace('{"dot_dimension', f'{{"precision_config":{{{config}}},"dot_dimension')
    module = parse_module(text)
    assert flops_of(module, module.entry, module.entry.root_instruction) == expected


CONVOLUTION = """HloModule convolution
ENTRY main {
  x = bf16[64,224,224,3]{3,2,1,0} parameter(0)
  w = bf16[1024,16,16,3]{3,2,1,0} parameter(1)
  ROOT c = (bf16[%s]{3,2,1,0}, u8[0]{0}) custom-call(x, w), window={size=16x16 stride=16x16}, \
dim_labels=b01f_o01i->b01f, custom_call_target="__cudnn$%s"
}"""


@pytest.mark.parametrize(
    ("target", "result", "channels"),
    [
        ("convForward", "64,14,14,1024", 3),
        ("convBackwardFilter", "1024,16,16,3", 3),
        ("convBackwardFilter", "1024,16,16,1", 0),
    ],
)
def test_channels_of_a_filter(target: str, result: str, channels: int):
    module = parse_module(CONVOLUTION % (result, target))
    operands = [module.entry.instructions[name].shape for name in ("x", "w")]
    assert filter_channels(module.entry.root_instruction, operands) == channels


SCATTER = """HloModule scatter
add {
  a = bf16[] parameter(0)
  b = bf16[] parameter(1)
  ROOT c = bf16[] add(a, b)
}
ENTRY main {
  table = %(dtype)s[512,64]{1,0} parameter(0)
  given = s32[32,1]{1,0} parameter(1)
  zero = s32[] constant(0)
  equal = s32[32,1]{1,0} broadcast(zero), dimensions={}
  updates = %(dtype)s[32,1,64]{2,1,0} parameter(2)
  ROOT s = %(dtype)s[512,64]{1,0} scatter(table, %(rows)s, updates), \
update_window_dims={1,2}, inserted_window_dims={}, \
scatter_dims_to_operand_dims={0}, index_vector_dim=1, unique_indices=%(unique)s, to_apply=add
}"""


@pytest.mark.parametrize(
    ("dtype", "rows", "unique", "updates"),
    [
        ("bf16", "given", "false", AtomicUpdates(elements=2048, width=64)),
        ("bf16", "equal", "false", AtomicUpdates(elements=2048, width=64, places=1)),
        ("f32", "given", "false", None),
        ("bf16", "given", "true", None),
    ],
)
def test_updates_of_16_bits_are_atomic_unless_unique(dtype: str, rows: str, unique: str, updates: AtomicUpdates | None):
    text = SCATTER % {"dtype": dtype, "rows": rows, "unique": unique}
    assert atomic_updates(parse_module(text).entry.instructions) == updates


def test_few_blocks_leave_cores_idle():
    assert took("triton_gemm", flops=PRODUCT, grid=(50, 1, 1)) == pytest.approx(5000)
    assert took("triton_gemm", flops=PRODUCT, grid=(10, 15, 1)) == pytest.approx(2500 / 0.75)
    assert took("triton_gemm", flops=PRODUCT, grid=(100, 1, 1)) == pytest.approx(2500)


def test_without_constants_it_is_the_roofline_without_overhead():
    work = Work(kind="loop", bytes_moved=10**9, flops=PRODUCT, grid=(9,), block=(128,), instructions=10**6)
    assert estimate(work, load_target("cpu").device) == pytest.approx(1e6)


@pytest.mark.parametrize(
    ("operand", "dimensions", "result", "sectors"),
    [
        # Threads walk along the fourth-fastest dimension: an element a sector.
        ("bf16[4,512,512]", "2,1,0", "f32[512,512,4]", 32),
        # Eight elements of four rows each.
        ("bf16[4,4096]", "1,0", "f32[4096,4]", 4),
        # The fastest dimension stays: nothing but what is needed.
        ("bf16[64,32,128]", "1,0,2", "f32[32,64,128]", 0),
    ],
)
def test_sectors_of_a_warp(operand: str, dimensions: str, result: str, sectors: int):
    source = operand.replace("bf16", "f32")
    module = parse_module(f"""HloModule m

%body (p: {operand}) -> {result} {{
  %p = {operand} parameter(0)
  %c = {source} convert(%p)
  ROOT %t = {result} transpose(%c), dimensions={{{dimensions}}}
}}

ENTRY %main (x: {operand}) -> {result} {{
  %x = {operand} parameter(0)
  ROOT %f = {result} fusion(%x), kind=kLoop, calls=%body
}}
""")
    fusion = module.entry.root_instruction
    count = fusion.shape.element_count
    assert cache_bytes(module, fusion, "loop") == (sectors * count + fusion.shape.byte_size if sectors else 0)
    assert cache_bytes(module, fusion, "transpose") == 0


COLUMN_SUM = """HloModule m

%%add {
  a = bf16[] parameter(0)
  b = bf16[] parameter(1)
  ROOT c = bf16[] add(a, b)
}

%%body (p: bf16[4096,512]) -> bf16[%d] {
  p = bf16[4096,512]{1,0} parameter(0)
  zero = bf16[] constant(0)
  ROOT r = bf16[%d]{0} reduce(p, zero), dimensions={%d}, to_apply=%%add
}

ENTRY %%main (x: bf16[4096,512]) -> bf16[%d] {
  x = bf16[4096,512]{1,0} parameter(0)
  ROOT f = bf16[%d]{0} fusion(x), kind=kCustom, calls=%%body, backend_config={"fusion_backend_config":\
{"kind":"__triton","block_level_fusion_config":{"num_warps":"8","output_tiles":[{"sizes":["%d"]}]}}}
}"""


@pytest.mark.parametrize(("axis", "tile", "times"), [(0, 4, 8), (0, 16, 2), (0, 32, 0), (1, 4, 0)])
def test_sums_over_columns_in_narrow_tiles_fetch_more_than_they_read(axis: int, tile: int, times: int):
    size = (512, 4096)[axis]
    module = parse_module(COLUMN_SUM % (size, size, axis, size, size, tile))
    read = times * 4096 * 512 * 2
    assert cache_bytes(module, module.entry.root_instruction, "triton") == (read + 512 * 2 if read else 0)


def test_transposes_in_tiles_of_a_few_columns():
    module = parse_module("""HloModule m

%body (p: bf16[512,4096]) -> bf16[4096,512] {
  p = bf16[512,4096]{1,0} parameter(0)
  ROOT t = bf16[4096,512]{1,0} transpose(p), dimensions={1,0}
}

ENTRY %main (x: bf16[512,4096]) -> bf16[4096,512] {
  x = bf16[512,4096]{1,0} parameter(0)
  ROOT f = bf16[4096,512]{1,0} fusion(x), kind=kCustom, calls=%body, backend_config={"fusion_backend_config":\
{"kind":"__triton","block_level_fusion_config":{"num_warps":"8","output_tiles":[{"sizes":["8","512"]}]}}}
}""")
    size = 512 * 4096 * 2
    assert cache_bytes(module, module.entry.root_instruction, "triton") == 4 * size + size


PTX = """.visible .entry first(.param .u64 a)
{
\t.reg .b32 \t%r<3>;
$L__BB0_1:
\tmov.u32 \t%r1, %tid.x;
\t@%p1 bra \t$L__BB0_1;
\t// begin inline asm
\tadd.s32 %r2, %r1, 1;
\tret;
}
.visible .entry second()
{
\tret;
}
"""


def test_instructions_of_a_kernel():
    assert count_instructions(PTX, "first") == 4
    assert count_instructions(PTX, "second") == 1
    assert count_instructions(PTX, "third") == 0
