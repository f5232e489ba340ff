"""Bytes read and written, on HLO written by hand and on fusions that Hypothesis makes up."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hlo_analysis.costs.flops import flops_of
from hlo_analysis.costs.traffic import pass_usage, usage_of
from hlo_analysis.hlo import parse_module
from hlo_analysis.program.host_memory import without_host


def usage(entry: str, *computations: str):
    """Usage of the root instruction of `entry` (lines of an ENTRY computation)."""
    module = parse_module("HloModule m\n\n" + "\n\n".join([*computations, "ENTRY %main {\n" + entry + "\n}"]) + "\n")
    return usage_of(module, module.entry, module.entry.root_instruction)


def test_each_operand_once_and_each_result():
    body = """%body {
  %p = bf16[64,128]{1,0} parameter(0)
  %q = f32[128]{0} parameter(1)
  %wide = f32[64,128]{1,0} convert(%p)
  %rows = f32[64,128]{1,0} broadcast(%q), dimensions={1}
  %sum = f32[64,128]{1,0} add(%wide, %rows)
  %square = f32[64,128]{1,0} multiply(%sum, %wide)
  ROOT %both = (f32[64,128]{1,0}, f32[64,128]{1,0}) tuple(%sum, %square)
}"""
    found = usage(
        """  %x = bf16[64,128]{1,0} parameter(0)
  %y = f32[128]{0} parameter(1)
  ROOT %f = (f32[64,128]{1,0}, f32[64,128]{1,0}) fusion(%x, %y), kind=kLoop, calls=%body""",
        body,
    )
    narrow, wide = 64 * 128 * 2, 64 * 128 * 4
    assert found.reads == {(0, ()): narrow, (1, ()): 128 * 4}
    assert found.writes == {(0,): wide, (1,): wide}
    # convert; add reads the 128 values that the broadcast shows; multiply reads both.
    assert found.unfused_bytes == (narrow + wide) + (wide + 128 * 4 + wide) + 3 * wide


@pytest.mark.parametrize(
    ("line", "read"),
    [
        ("slice(%p), slice={[0:8], [0:128]}", 8 * 128 * 4),
        ("dynamic-slice(%p, %i, %i), dynamic_slice_sizes={8,128}", 8 * 128 * 4),
    ],
)
def test_only_the_slice_is_read(line, read):
    body = f"""%body {{
  %p = f32[64,128]{{1,0}} parameter(0)
  %i = s32[] parameter(1)
  %b = f32[64,128]{{1,0}} bitcast(%p)
  %s = f32[8,128]{{1,0}} {line.replace("%p", "%b")}
  %k = f32[] convert(%i)
  %kk = f32[8,128]{{1,0}} broadcast(%k), dimensions={{}}
  ROOT %r = f32[8,128]{{1,0}} add(%s, %kk)
}}"""
    found = usage(
        """  %x = f32[64,128]{1,0} parameter(0)
  %n = s32[] parameter(1)
  ROOT %f = f32[8,128]{1,0} fusion(%x, %n), kind=kLoop, calls=%body""",
        body,
    )
    assert found.reads == {(0, ()): read, (1, ()): 4}
    assert found.bytes_written == 8 * 128 * 4


def test_a_slice_beside_another_use_reads_all():
    body = """%body {
  %p = f32[64]{0} parameter(0)
  %s = f32[8]{0} slice(%p), slice={[0:8]}
  %n = f32[64]{0} negate(%p)
  ROOT %t = (f32[8]{0}, f32[64]{0}) tuple(%s, %n)
}"""
    found = usage(
        """  %x = f32[64]{0} parameter(0)
  ROOT %f = (f32[8]{0}, f32[64]{0}) fusion(%x), kind=kLoop, calls=%body""",
        body,
    )
    assert found.reads == {(0, ()): 256}
    assert found.unfused_bytes == (32 + 32) + (256 + 256)


IN_PLACE = """%body {
  %cache = f32[64,128]{1,0} parameter(0)
  %new = bf16[1,128]{1,0} parameter(1)
  %i = s32[] parameter(2)
  %zero = s32[] constant(0)
  %wide = f32[1,128]{1,0} convert(%new)
  ROOT %u = f32[64,128]{1,0} dynamic-update-slice(%cache, %wide, %i, %zero)
}"""
IN_PLACE_ENTRY = """  %c = f32[64,128]{1,0} parameter(0)
  %n = bf16[1,128]{1,0} parameter(1)
  %i = s32[] parameter(2)
  ROOT %f = f32[64,128]{1,0} fusion(%c, %n, %i), kind=kLoop, calls=%body"""


def test_update_in_place():
    found = usage(IN_PLACE_ENTRY, IN_PLACE)
    assert found.reads == {(0, ()): 0, (1, ()): 256, (2, ()): 4}
    assert found.writes == {(): 512}


def test_a_scatter_writes_at_most_its_buffer():
    """4096 rows that are summed into 2: the sums are made in the cache."""
    body = """%add {
  %l = f32[] parameter(0)
  %r = f32[] parameter(1)
  ROOT %s = f32[] add(%l, %r)
}

%body {
  %sums = f32[2,128]{1,0} parameter(0)
  %rows = s32[4096,1]{1,0} parameter(1)
  %new = f32[4096,1,128]{2,1,0} parameter(2)
  ROOT %u = f32[2,128]{1,0} scatter(%sums, %rows, %new), to_apply=%add
}"""
    entry = """  %c = f32[2,128]{1,0} parameter(0)
  %i = s32[4096,1]{1,0} parameter(1)
  %n = f32[4096,1,128]{2,1,0} parameter(2)
  ROOT %f = f32[2,128]{1,0} fusion(%c, %i, %n), kind=kInput, calls=%body"""
    found = usage(entry, body)
    assert found.reads == {(0, ()): 1024, (1, ()): 4096 * 4, (2, ()): 4096 * 512}
    assert found.writes == {(): 1024}
    assert found.bytes_read + found.bytes_written <= found.unfused_bytes


def test_an_update_that_is_read_on_is_not_in_place():
    body = IN_PLACE.replace("ROOT %u", "%u").replace(
        "%i, %zero)\n", "%i, %zero)\n  ROOT %n = f32[64,128]{1,0} negate(%u)\n"
    )
    found = usage(IN_PLACE_ENTRY, body)
    assert found.reads[0, ()] == 64 * 128 * 4
    assert found.writes == {(): 64 * 128 * 4}


def test_filling_reads_nothing():
    body = """%body {
  %zero = f32[] constant(0)
  ROOT %b = f32[64]{0} broadcast(%zero), dimensions={}
}"""
    found = usage("  ROOT %f = f32[64]{0} fusion(), kind=kLoop, calls=%body", body)
    assert (found.bytes_read, found.bytes_written, found.unfused_bytes) == (0, 256, 256)


def test_an_instruction_on_its_own():
    found = usage("  %x = f32[64]{0} parameter(0)\n  ROOT %c = f32[64]{0} copy(%x)")
    assert (found.bytes_read, found.bytes_written, found.unfused_bytes) == (256, 256, 512)


def test_an_operand_that_stands_twice_is_read_once():
    found = usage(
        """  %x = f32[64,64]{1,0} parameter(0)
  ROOT %c = (f32[64,64]{1,0}, s8[4096]{0}) custom-call(%x, %x), custom_call_target="__cublas$gemm" """.rstrip()
    )
    assert found.bytes_read == 64 * 64 * 4
    # The s8 vector is scratch.
    assert found.writes == {(0,): 64 * 64 * 4}


def test_an_eight_bit_result_of_another_call_is_no_scratch():
    found = usage(
        """  %x = f32[64,64]{1,0} parameter(0)
  ROOT %c = (f32[64,64]{1,0}, s8[4096]{0}) custom-call(%x), custom_call_target="mine" """.rstrip()
    )
    assert found.writes == {(0,): 64 * 64 * 4, (1,): 4096}


def test_passes_of_a_sort():
    module = parse_module(
        """HloModule m

%less {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %c = pred[] compare(%a, %b), direction=LT
}

ENTRY %main {
  %x = f32[64]{0} parameter(0)
  ROOT %s = f32[64]{0} sort(%x), dimensions={0}, to_apply=%less
}
"""
    )
    sort = module.entry.root_instruction
    whole = usage_of(module, module.entry, sort)
    copy = pass_usage(whole, sort, "copy", 0, 3)
    later = pass_usage(whole, sort, "sort", 1, 3)
    assert (copy.reads, copy.writes) == ({(0, ()): 256}, {(): 256})
    assert (later.reads, later.writes) == ({(-1, ()): 256}, {(): 256})
    assert pass_usage(whole, sort, "memset", 0, 3).bytes_read == 0


# Fusions made up: every step takes earlier values of one square shape, or makes one of another shape.

SQUARE = "f32[16,16]{1,0}"
STEPS = (
    ("{s} negate({a})", SQUARE),
    ("{s} add({a}, {b})", SQUARE),
    ("{s} multiply({a}, {a})", SQUARE),
    ("{s} bitcast({a})", SQUARE),
    ("{s} reshape({a})", SQUARE),
    ("{s} transpose({a}), dimensions={{1,0}}", SQUARE),
    ("{s} dynamic-update-slice({a}, {row}, {i}, {i})", SQUARE),
    ("{s} broadcast({row1}), dimensions={{1}}", SQUARE),
    ("{s} broadcast({zero}), dimensions={{}}", SQUARE),
    ("{s} iota(), iota_dimension=0", SQUARE),
    ("{s} concatenate({row}, {rest}), dimensions={{0}}", SQUARE),
    ("f32[1,16]{{1,0}} slice({a}), slice={{[3:4], [0:16]}}", "row"),
    ("f32[1,16]{{1,0}} dynamic-slice({a}, {i}, {i}), dynamic_slice_sizes={{1,16}}", "row"),
    ("f32[15,16]{{1,0}} slice({a}), slice={{[0:15], [0:16]}}", "rest"),
    ("f32[16]{{0}} reduce({a}, {zero}), dimensions={{0}}, to_apply=%add", "row1"),
)


@st.composite
def fusions(draw) -> str:
    """The text of a module whose entry is one fusion."""
    lines = ["%zero = f32[] constant(0)"]
    parameters: list[str] = []
    pools: dict[str, list[tuple[str, str]]] = {SQUARE: [], "row": [], "row1": [], "rest": []}

    def parameter(shape: str) -> str:
        name = f"%p{len(parameters)}"
        lines.append(f"{name} = {shape} parameter({len(parameters)})")
        parameters.append(shape)
        return name

    shapes = {SQUARE: SQUARE, "row": "f32[1,16]{1,0}", "row1": "f32[16]{0}", "rest": "f32[15,16]{1,0}"}
    index = parameter("s32[]")
    for kind, count in ((SQUARE, 2), ("row", 1), ("row1", 1), ("rest", 1)):
        for _ in range(count):
            pools[kind].append((parameter(shapes[kind]), shapes[kind]))

    def pick(kind: str) -> str:
        return draw(st.sampled_from(pools[kind]))[0]

    for number in range(draw(st.integers(1, 12))):
        template, kind = draw(st.sampled_from(STEPS))
        text = template.format(
            s=SQUARE,
            a=pick(SQUARE),
            b=pick(SQUARE),
            row=pick("row"),
            row1=pick("row1"),
            rest=pick("rest"),
            zero="%zero",
            i=index,
        )
        name = f"%v{number}"
        lines.append(f"{name} = {text}")
        pools[kind].append((name, shapes[kind]))
    values = [value for pool in pools.values() for value in pool]
    # XLA leaves no dead code: what nothing uses is returned.
    used = {word.strip(",") for line in lines for word in line.partition("(")[2].replace(")", " ").split()}
    dead = [value for value in values if value[0] not in used and value[0].startswith("%v")]
    returned = dead + draw(st.lists(st.sampled_from(values), min_size=0 if dead else 1, max_size=2))
    if len(returned) == 1 and draw(st.booleans()):
        name, result = returned[0]
        lines.append(f"ROOT %root = {result} negate({name})" if name not in lines[-1] else f"ROOT {lines.pop()}")
    else:
        result = "(" + ", ".join(shape for _, shape in returned) + ")"
        lines.append(f"ROOT %root = {result} tuple({', '.join(name for name, _ in returned)})")
    arguments = "\n".join(f"  %a{k} = {shape} parameter({k})" for k, shape in enumerate(parameters))
    operands = ", ".join(f"%a{k}" for k in range(len(parameters)))
    return f"""HloModule m

%add {{
  %l = f32[] parameter(0)
  %r = f32[] parameter(1)
  ROOT %s = f32[] add(%l, %r)
}}

%body {{
  {chr(10).join("  " + line for line in lines).strip()}
}}

ENTRY %main {{
{arguments}
  ROOT %f = {result} fusion({operands}), kind=kLoop, calls=%body
}}
"""


@settings(max_examples=300, deadline=None)
@given(fusions())
def test_fused_traffic_is_never_above_unfused(text):
    module = parse_module(text)
    found = usage_of(module, module.entry, module.entry.root_instruction)
    assert found.bytes_read + found.bytes_written <= found.unfused_bytes
    body = module.computations["body"]
    for (position, path), count in found.reads.items():
        assert 0 <= count <= body.parameters[position].shape.byte_size, (position, path)
    assert found.bytes_written > 0


# What stands before a slice is made for the slice alone.

ROW_NORM = """%add {
  %l = f32[] parameter(0)
  %r = f32[] parameter(1)
  ROOT %s = f32[] add(%l, %r)
}

%body {
  %x = f32[8,64,128]{2,1,0} parameter(0)
  %scale = f32[128]{0} parameter(1)
  %square = f32[8,64,128]{2,1,0} multiply(%x, %x)
  %zero = f32[] constant(0)
  %sum = f32[8,64]{1,0} reduce(%square, %zero), dimensions={2}, to_apply=%add
  %rsqrt = f32[8,64]{1,0} rsqrt(%sum)
  %rows = f32[8,64,128]{2,1,0} broadcast(%rsqrt), dimensions={0,1}
  %normal = f32[8,64,128]{2,1,0} multiply(%x, %rows)
  %columns = f32[8,64,128]{2,1,0} broadcast(%scale), dimensions={2}
  %scaled = f32[8,64,128]{2,1,0} multiply(%normal, %columns)
  END
}"""
ROW_FUSION = """  %x = f32[8,64,128]{2,1,0} parameter(0)
  %scale = f32[128]{0} parameter(1)
  ROOT %f = f32[8,1,128]{2,1,0} fusion(%x, %scale), kind=kLoop, calls=%body"""


@pytest.mark.parametrize(
    ("end", "rows"),
    [
        ("ROOT %last = f32[8,1,128]{2,1,0} slice(%scaled), slice={[0:8], [63:64], [0:128]}", 8),
        # A slice of the flat array, and one of the transposed: the way to the parameter leads through both.
        ("%flat = f32[512,128]{1,0} bitcast(%scaled)\n  ROOT %last = f32[8,128]{1,0} slice(%flat), "
         "slice={[0:8], [0:128]}", 8),
        ("%turned = f32[64,8,128]{2,1,0} transpose(%scaled), dimensions={1,0,2}\n  ROOT %last = f32[1,8,128]{2,1,0} "
         "slice(%turned), slice={[3:4], [0:8], [0:128]}", 8),
        # Two slices read two rows a batch; beside a use of all, all.
        ("%a = f32[8,1,128]{2,1,0} slice(%scaled), slice={[0:8], [0:1], [0:128]}\n"
         "  %b = f32[8,1,128]{2,1,0} slice(%scaled), slice={[0:8], [63:64], [0:128]}\n"
         "  ROOT %both = f32[8,1,128]{2,1,0} add(%a, %b)", 16),
        ("%last = f32[8,1,128]{2,1,0} slice(%scaled), slice={[0:8], [63:64], [0:128]}\n"
         "  ROOT %both = (f32[8,1,128]{2,1,0}, f32[8,64]{1,0}) tuple(%last, %sum)", 512),
    ],
    ids=["slice", "bitcast", "transpose", "two", "beside"],
)  # fmt: skip
def test_before_a_slice_only_what_it_needs_is_read_and_done(end, rows):
    found = usage(ROW_FUSION, ROW_NORM.replace("END", end))
    assert found.reads == {(0, ()): rows * 128 * 4, (1, ()): 128 * 4}


def test_a_slice_needs_less_arithmetic():
    slice_ = "ROOT %last = f32[8,1,128]{2,1,0} slice(%scaled), slice={[0:8], [63:64], [0:128]}"
    text = "HloModule m\n\n" + ROW_NORM.replace("END", slice_) + "\n\nENTRY %main {\n" + ROW_FUSION + "\n}\n"
    module = parse_module(text)
    # Of eight rows: a square, a sum, two products a value, and a root a row.
    assert flops_of(module, module.entry, module.entry.root_instruction).total == 8 * (4 * 128 + 1)


def test_several_results_of_one_walk_are_made_whole():
    text = """HloModule m

%larger {
  %v = f32[] parameter(0)
  %i = s32[] parameter(1)
  %w = f32[] parameter(2)
  %j = s32[] parameter(3)
  %c = pred[] compare(%v, %w), direction=GT
  %a = f32[] select(%c, %v, %w)
  %b = s32[] select(%c, %i, %j)
  ROOT %t = (f32[], s32[]) tuple(%a, %b)
}

%body {
  %x = f32[64,128]{1,0} parameter(0)
  %i = s32[64,128]{1,0} iota(), iota_dimension=1
  %zero = f32[] constant(0)
  %none = s32[] constant(0)
  %most = (f32[64]{0}, s32[64]{0}) reduce(%x, %i, %zero, %none), dimensions={1}, to_apply=%larger
  ROOT %index = s32[64]{0} get-tuple-element(%most), index=1
}

ENTRY %main {
  %x = f32[64,128]{1,0} parameter(0)
  ROOT %f = s32[64]{0} fusion(%x), kind=kLoop, calls=%body
}
"""
    module = parse_module(text)
    assert usage_of(module, module.entry, module.entry.root_instruction).bytes_read == 64 * 128 * 4
    assert flops_of(module, module.entry, module.entry.root_instruction).total == 2 * 64 * 128


def test_what_lies_in_the_hosts_memory_is_no_traffic_of_the_gpus():
    """Offloading writes a part of a stack there, and takes another out of it."""
    module = parse_module("""HloModule m

ENTRY %main {
  %stack = bf16[4,64]{1,0:S(5)} parameter(0)
  %part = bf16[1,64]{1,0} parameter(1)
  %i = s32[] parameter(2)
  %put = bf16[4,64]{1,0:S(5)} dynamic-update-slice(%stack, %part, %i, %i)
  ROOT %got = bf16[1,64]{1,0} dynamic-slice(%put, %i, %i), dynamic_slice_sizes={1,64}
}
""")
    put, got = (module.entry.instructions[name] for name in ("put", "got"))
    found, host = without_host(usage_of(module, module.entry, put), module.entry, put)
    assert (found.reads[1, ()], found.bytes_written, host) == (128, 0, 128)
    assert found.unfused_bytes == found.bytes_read
    found, host = without_host(usage_of(module, module.entry, got), module.entry, got)
    assert (found.reads[0, ()], found.bytes_written, host) == (0, 128, 128)
