"""The estimate of one launch, and the sectors that strided reads take."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hlo_analysis.costs.coalescing import cache_bytes
from hlo_analysis.costs.estimate import estimate
from hlo_analysis.costs.flops import Flops
from hlo_analysis.costs.slow_work import atomic_updates, row_alignment
from hlo_analysis.hlo import parse_module
from hlo_analysis.records import Efficiency
from hlo_analysis.targets import load_target

DEVICE = replace(
    load_target("h200").device,
    memory_bandwidth=1e12,
    matrix_flops=(("bf16", 1e15),),
    core_count=100,
    clock_hz=1e9,
    efficiency=Efficiency(
        memory=0.5,
        vector=0.5,
        power=0.8,
        matrix=0.5,
        attention=0.25,
        kernel_us=1.0,
        cache_bytes_per_clock=20.0,
        atomics_per_clock=0.5,
        unaligned=(0.25, 0.5),
        source="",
    ),
)
PRODUCT = Flops(matrix=(("bf16", 10**12),))


def test_the_longest_of_memory_compute_and_cache():
    assert estimate(10**9, Flops(), DEVICE, kind="loop") == pytest.approx(2001)
    assert estimate(10**9, PRODUCT, DEVICE, kind="cublaslt") == pytest.approx(2501)
    assert estimate(10**9, PRODUCT, DEVICE, kind="cudnn", attention=True) == pytest.approx(5001)
    assert estimate(10**9, Flops(), DEVICE, kind="loop", cache_bytes=6 * 10**9) == pytest.approx(3001)
    assert estimate(0, Flops(), DEVICE, kind="loop") == 1.0


def test_vector_work_reductions_and_atomics_take_their_time():
    work = Flops(vector=10**9)
    per_flop = 2e6 / DEVICE.vector_flops
    assert estimate(0, work, DEVICE, kind="loop") == pytest.approx(10**9 * per_flop + 1)
    assert estimate(0, work, DEVICE, kind="reduction", reduced=10**9) == pytest.approx(9 * 10**9 * per_flop + 1)
    assert estimate(0, Flops(), DEVICE, kind="scatter", atomic_updates=10**8) == pytest.approx(2001)


def test_rows_of_odd_sizes_slow_triton_products_alone():
    assert estimate(0, PRODUCT, DEVICE, kind="triton_gemm", row_alignment=2) == pytest.approx(10001)
    assert estimate(0, PRODUCT, DEVICE, kind="triton_gemm", row_alignment=4) == pytest.approx(5001)
    assert estimate(0, PRODUCT, DEVICE, kind="cublaslt", row_alignment=2) == pytest.approx(2501)


PRODUCT_OF_ODD_ROWS = """HloModule product
ENTRY main {
  logits = bf16[64,%d]{1,0} parameter(0)
  w = bf16[%d,128]{1,0} parameter(1)
  ROOT dot = bf16[64,128]{1,0} dot(logits, w), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}"""


@pytest.mark.parametrize(("vocabulary", "alignment"), [(50257, 2), (30522, 4), (50260, 8), (50264, 16), (50304, 16)])
def test_alignment_of_a_product_s_rows(vocabulary: int, alignment: int):
    module = parse_module(PRODUCT_OF_ODD_ROWS % (vocabulary, vocabulary))
    assert row_alignment(module.entry.instructions) == alignment


SCATTER = """HloModule scatter
add {
  a = bf16[] parameter(0)
  b = bf16[] parameter(1)
  ROOT c = bf16[] add(a, b)
}
ENTRY main {
  table = %s[512,64]{1,0} parameter(0)
  rows = s32[32,1]{1,0} parameter(1)
  updates = %s[32,1,64]{2,1,0} parameter(2)
  ROOT s = %s[512,64]{1,0} scatter(table, rows, updates), \
update_window_dims={1,2}, inserted_window_dims={}, \
scatter_dims_to_operand_dims={0}, index_vector_dim=1, unique_indices=%s, to_apply=add
}"""


@pytest.mark.parametrize(
    ("dtype", "unique", "count"), [("bf16", "false", 2048), ("f32", "false", 0), ("bf16", "true", 0)]
)
def test_updates_of_16_bits_are_atomic_unless_unique(dtype: str, unique: str, count: int):
    instructions = parse_module(SCATTER % (dtype, dtype, dtype, unique)).entry.instructions
    assert atomic_updates(instructions) == count


def test_few_blocks_leave_cores_idle():
    assert estimate(0, PRODUCT, DEVICE, kind="triton_gemm", grid=(50, 1, 1)) == pytest.approx(5001)
    assert estimate(0, PRODUCT, DEVICE, kind="triton_gemm", grid=(10, 15, 1)) == pytest.approx(2500 / 0.75 + 1)
    assert estimate(0, PRODUCT, DEVICE, kind="triton_gemm", grid=(100, 1, 1)) == pytest.approx(2501)


def test_xla_knows_the_tiles_of_triton_fusions():
    assert estimate(10**6, Flops(), DEVICE, kind="triton", xla_us=14.0) == 14.0
    assert estimate(10**6, Flops(), DEVICE, kind="triton", xla_us=1.0) == pytest.approx(3.0)
    assert estimate(10**6, Flops(), DEVICE, kind="triton", xla_us=1e6) == pytest.approx(64.0)
    assert estimate(10**6, Flops(), DEVICE, kind="reduction", xla_us=14.0) == pytest.approx(3.0)


def test_without_constants_it_is_the_roofline_without_overhead():
    assert estimate(10**9, PRODUCT, load_target("cpu").device, kind="loop") == pytest.approx(1e6)


@pytest.mark.parametrize(
    ("operand", "dimensions", "result", "sectors"),
    [
        # Threads walk along the fourth-fastest dimension: an element a sector.
        ("bf16[4,512,512]", "2,1,0", "f32[512,512,4]", 32),
        # Eight elements of four rows each.
        ("bf16[4,4096]", "1,0", "f32[4096,4]", 4),
        # The fastest dimension stays.
        ("bf16[64,32,128]", "1,0,2", "f32[32,64,128]", 2),
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
    assert cache_bytes(module, fusion, "loop") == sectors * count + fusion.shape.byte_size
    assert cache_bytes(module, fusion, "transpose") == 0
