"""What decides a kernel's time beside bytes and FLOPs: waits, tiles, atomic sectors, branches, scattered reads."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from hlo_analysis.costs.coalescing import cache_bytes
from hlo_analysis.costs.estimate import Work, estimate, longest
from hlo_analysis.costs.flops import Flops
from hlo_analysis.costs.pipeline import Steps, steps_of, steps_us
from hlo_analysis.costs.slow_work import CacheUpdates, cache_updates, executed_share, filled_tiles, sums_columns
from hlo_analysis.hlo import parse_module
from hlo_analysis.records import Efficiency
from hlo_analysis.targets import load_target

DEVICE = replace(
    load_target("h200").device,
    memory_bandwidth=1e12,
    matrix_flops=(("bf16", 1e14), ("f32", 1e14)),
    core_count=100,
    clock_hz=1e9,
    efficiency=Efficiency(
        kernel_us=1.5,
        repeated_us=1.0,
        load_us=1.0,
        column_bytes_per_clock=5.0,
        atomic_sectors_per_clock=20.0,
        complex=0.5,
        few_channels=0.1,
    ),
)
STEPS = Steps(count=9, stages=3, resident=2, flops=10**5, element_type="bf16")


@pytest.mark.parametrize(
    ("changed", "blocks", "us"),
    [
        ({}, 100, 8 * 0.5),
        ({}, 200, 8 * 0.5),  # two on each multiprocessor
        ({}, 201, 17 * 0.5 + 1.0),  # and one more
        ({"stages": 1}, 100, 8 * 2.0),
        ({"stages": 2}, 100, 8 * 1.0),
        ({"flops": 10**7}, 100, 8 * 10.0),  # a step computes for longer than it waits
        ({"flops": 10**7}, 200, 8 * 20.0),
    ],
)
def test_a_step_of_a_product_waits_for_its_loads(changed: dict[str, int], blocks: int, us: float):
    assert steps_us(replace(STEPS, **changed), blocks, DEVICE) == pytest.approx(us)
    work = Work(kind="triton_gemm", steps=replace(STEPS, **changed), grid=(blocks,))
    assert estimate(work, DEVICE) == pytest.approx(us + 1.5)


PRODUCT = """HloModule m

%%body (x: %(dtype)s[8,2592,1024], w: %(dtype)s[8,2592,256]) -> f32[8,1024,256] {
  x = %(dtype)s[8,2592,1024]{2,1,0} parameter(0)
  w = %(dtype)s[8,2592,256]{2,1,0} parameter(1)
  ROOT d = f32[8,1024,256]{2,1,0} dot(x, w), lhs_batch_dims={0}, lhs_contracting_dims={1}, rhs_batch_dims={0}, \
rhs_contracting_dims={1}, backend_config={"sizes":["16"]}
}

ENTRY %%main (x: %(dtype)s[8,2592,1024], w: %(dtype)s[8,2592,256]) -> f32[8,1024,256] {
  x = %(dtype)s[8,2592,1024]{2,1,0} parameter(0)
  w = %(dtype)s[8,2592,256]{2,1,0} parameter(1)
  ROOT f = f32[8,1024,256]{2,1,0} fusion(x, w), kind=kCustom, calls=%%body, backend_config={"fusion_backend_config":\
{"kind":"__triton_nested_gemm_fusion","block_level_fusion_config":{"num_stages":3,"num_warps":"2",\
"output_tiles":[{"sizes":["1","128","64"]}]}}}
}"""


def test_steps_of_a_product_by_triton():
    module = parse_module(PRODUCT % {"dtype": "f32"})
    steps = steps_of(module.entry.root_instruction, module.computations["body"].instructions, threads=64)
    # 168 registers of 64 threads: six blocks; 36 KB of shared memory: six.
    assert steps == Steps(count=162, stages=3, resident=6, flops=2 * 128 * 64 * 16, element_type="f32")


def test_launches_of_long_loops_find_their_data_cached():
    assert estimate(Work(kind="loop", repeat=128), DEVICE) == pytest.approx(1.0)
    assert estimate(Work(kind="loop", repeat=4), DEVICE) == pytest.approx(1.5)


def test_complex_products_reach_a_share():
    work = {"kind": "cublaslt", "flops": Flops(matrix=(("c64", 10**10),))}
    assert estimate(Work(**work), DEVICE) == pytest.approx(200 + 1.5)


CONVOLUTION = """HloModule m
ENTRY main {
  x = bf16[%(data)s]{3,2,1,0} parameter(0)
  w = bf16[%(filter)s]{3,2,1,0} parameter(1)
  ROOT c = (bf16[%(result)s]{3,2,1,0}, u8[0]{0}) custom-call(x, w), window={size=3x3}, \
dim_labels=b01f_o01i->b01f, custom_call_target="__cudnn$%(target)s"
}"""


@pytest.mark.parametrize(
    ("target", "data", "kernel", "result", "share"),
    [
        ("convForward", "128,56,56,64", "256,3,3,64", "128,56,56,256", 1.0),
        ("convForward", "128,56,56,64", "64,3,3,64", "128,56,56,64", 0.5),
        ("convForward", "128,56,56,64", "320,3,3,64", "128,56,56,320", 320 / 384),
        ("convForward", "3,16,16,64", "1024,3,3,64", "3,16,16,1024", 48 / 100),
        ("convBackwardInput", "128,56,56,256", "256,3,3,64", "128,56,56,64", 0.5),
        ("convBackwardFilter", "128,56,56,64", "128,56,56,64", "64,3,3,64", 0.5),
        ("convBackwardFilter", "128,56,56,64", "128,56,56,256", "256,3,3,64", 1.0),
    ],
)
def test_tiles_of_convolutions(target: str, data: str, kernel: str, result: str, share: float):
    text = CONVOLUTION % {"data": data, "filter": kernel, "result": result, "target": target}
    assert filled_tiles(parse_module(text).entry.root_instruction, core_count=100) == pytest.approx(share)


SCATTER = """HloModule scatter
add {
  a = %(dtype)s[] parameter(0)
  b = %(dtype)s[] parameter(1)
  ROOT c = %(dtype)s[] add(a, b)
}
ENTRY main {
  table = %(dtype)s[512,64]{1,0} parameter(0)
  rows = s32[32,1]{1,0} parameter(1)
  updates = %(dtype)s[%(updates)s]{2,1,0} parameter(2)
  ROOT s = %(dtype)s[512,64]{1,0} scatter(table, rows, updates), update_window_dims={1,2}, inserted_window_dims={}, \
scatter_dims_to_operand_dims={%(axis)d}, index_vector_dim=1, unique_indices=%(unique)s, to_apply=add
}"""


@pytest.mark.parametrize(
    ("dtype", "updates", "axis", "unique", "sectors", "requests"),
    [
        ("f32", "32,1,64", 0, "false", 32 * 64 * 4 // 32, 32 * 2),
        ("f32", "32,512,1", 1, "false", 32 * 512, 32 * 512),  # a column: neighbours of an update are a row apart
        ("s32", "32,1,64", 0, "false", 32 * 64 * 4 // 32, 32 * 2),
        ("bf16", "32,1,64", 0, "false", 0, 0),  # compared and swapped
        ("f32", "32,1,64", 0, "true", 0, 0),
    ],
)
def test_what_the_cache_adds(dtype: str, updates: str, axis: int, unique: str, sectors: int, requests: int):
    text = SCATTER % {"dtype": dtype, "updates": updates, "axis": axis, "unique": unique}
    found = cache_updates(parse_module(text).entry.instructions)
    assert found == CacheUpdates(sectors=sectors, requests=requests)
    work = Work(kind="scatter", cache_updates=found)
    least = sectors / 20 / 1e3 + 1.5
    assert estimate(work, DEVICE) == pytest.approx(least)
    assert longest(work, DEVICE) == (pytest.approx(max(least, requests / 0.95 / 1e3)) if sectors else None)


def test_warps_run_the_branches_that_they_need():
    text = """HloModule m
ENTRY main {
  a = f32[64,%(size)d]{1,0} parameter(0)
  b = f32[64,%(size)d]{1,0} parameter(1)
  c = f32[64,%(size)d]{1,0} parameter(2)
  d = f32[64,%(size)d]{1,0} parameter(3)
  ROOT r = f32[64,%(all)d]{1,0} concatenate(a, b, c, d), dimensions={1}
}"""
    shares = [
        executed_share(parse_module(text % {"size": size, "all": 4 * size}).entry.instructions) for size in (8, 4096)
    ]
    assert shares == [1.0, pytest.approx(0.25, abs=0.01)]


@pytest.mark.parametrize(
    ("shape", "axis", "result", "is_column"),
    [
        ("bf16[4096,512]", 0, "512", True),
        ("f32[4096,512]", 0, "512", False),
        ("bf16[4096,512]", 1, "4096", False),
        ("bf16[524288,4]", 0, "4", False),
    ],
)
def test_sums_over_columns_are_slow(shape: str, axis: int, result: str, is_column: bool):
    text = f"""HloModule m
add {{
  a = f32[] parameter(0)
  b = f32[] parameter(1)
  ROOT c = f32[] add(a, b)
}}
ENTRY main {{
  x = {shape}{{1,0}} parameter(0)
  wide = f32[{shape.partition("[")[2]}{{1,0}} convert(x)
  zero = f32[] constant(0)
  ROOT r = f32[{result}]{{0}} reduce(wide, zero), dimensions={{{axis}}}, to_apply=add
}}"""
    assert sums_columns(parse_module(text).entry.instructions) is is_column
    work = Work(kind="reduction", bytes_moved=10**9, sums_columns=is_column)
    assert estimate(work, DEVICE) == pytest.approx((2000 if is_column else 1000) + 1.5)


def fused(kind: str, body: str, result: str) -> Any:
    return parse_module(f"""HloModule m
add {{
  a = f32[] parameter(0)
  b = f32[] parameter(1)
  ROOT c = f32[] add(a, b)
}}
body {{
  p = f32[256,512]{{1,0}} parameter(0)
{body}
}}
ENTRY main {{
  x = f32[256,512]{{1,0}} parameter(0)
  ROOT f = {result} fusion(x), kind={kind}, calls=body
}}""")


SPREAD = 128 * 512 * 32 + 128 * 512 * 4


@pytest.mark.parametrize(
    ("kind", "body", "result", "threads", "expected"),
    [
        # Rows of a slice of a transpose: each element in a sector of its own.
        ("loop", "  t = f32[512,256]{1,0} transpose(p), dimensions={1,0}\n"
         "  ROOT s = f32[512,128]{1,0} slice(t), slice={[0:512], [0:128]}", "f32[512,128]{1,0}", 0, SPREAD),
        # The same to the kernel that goes through shared memory, where threads read along the rows.
        ("transpose", "  s = f32[128,512]{1,0} slice(p), slice={[0:128], [0:512]}\n"
         "  ROOT t = f32[512,128]{1,0} transpose(s), dimensions={1,0}", "f32[512,128]{1,0}", 0, 0),
        # A second transpose before it scatters what it reads.
        ("transpose", "  u = f32[512,256]{1,0} transpose(p), dimensions={1,0}\n"
         "  s = f32[512,128]{1,0} slice(u), slice={[0:512], [0:128]}\n"
         "  ROOT t = f32[128,512]{1,0} transpose(s), dimensions={1,0}", "f32[128,512]{1,0}", 0, SPREAD),
        # Every second element of a row: half of each sector is not needed.
        ("loop", "  ROOT s = f32[256,256]{1,0} slice(p), slice={[0:256], [0:512:2]}", "f32[256,256]{1,0}", 0,
         256 * 512 * 4 + 256 * 256 * 4),
        # Whole rows, moved, padded and turned around.
        ("loop", "  z = f32[] constant(0)\n  q = f32[256,512]{1,0} reverse(p), dimensions={0}\n"
         "  ROOT s = f32[260,512]{1,0} pad(q, z), padding=2_2x0_0", "f32[260,512]{1,0}", 0, 0),
        # A sum inside of a loop, one thread an element: a column takes a sector for each row.
        ("reduction", "  b = f32[256,8,64]{2,1,0} bitcast(p)\n  z = f32[] constant(0)\n"
         "  r = f32[256,64]{1,0} reduce(b, z), dimensions={1}, to_apply=add\n"
         "  ROOT t = f32[64,256]{1,0} transpose(r), dimensions={1,0}", "f32[64,256]{1,0}", 64 * 256,
         64 * 256 * 8 * 32 + 64 * 256 * 4),
    ],
)  # fmt: skip
def test_sectors_that_warps_read(kind: Any, body: str, result: str, threads: int, expected: int):
    module = fused("kLoop", body, result)
    assert cache_bytes(module, module.entry.root_instruction, kind, threads) == expected


def test_transposes_by_triton_that_cancel_read_rows():
    module = parse_module("""HloModule m

body {
  p = bf16[128,196,768]{2,1,0} parameter(0)
  t = bf16[128,768,196]{2,1,0} transpose(p), dimensions={0,2,1}
  b = bf16[128,12,64,196]{3,2,1,0} bitcast(t)
  ROOT r = bf16[128,12,196,64]{3,2,1,0} transpose(b), dimensions={0,1,3,2}
}

ENTRY main {
  x = bf16[128,196,768]{2,1,0} parameter(0)
  ROOT f = bf16[128,12,196,64]{3,2,1,0} fusion(x), kind=kCustom, calls=body, backend_config={"fusion_backend_config":\
{"kind":"__triton","block_level_fusion_config":{"num_warps":"4","output_tiles":[{"sizes":["128","1","1","32"]}]}}}
}""")
    assert cache_bytes(module, module.entry.root_instruction, "triton") == 0
