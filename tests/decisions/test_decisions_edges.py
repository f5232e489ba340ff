"""Data edges between launches, and which earlier instructions a launch came from, on hand-written modules."""

from __future__ import annotations

from hlo_analysis.decisions.align import origins, stem
from hlo_analysis.decisions.edges import Edge, launch_edges
from hlo_analysis.hlo import parse_module

PAIR = """HloModule m

%pair (p: f32[8]) -> (f32[8], f32[4]) {
  %p = f32[8]{0} parameter(0)
  %n = f32[8]{0} negate(%p)
  %s = f32[4]{0} slice(%p), slice={[0:4]}
  ROOT %t = (f32[8]{0}, f32[4]{0}) tuple(%n, %s)
}

%one (p.1: f32[2,4]) -> f32[2,4] {
  %p.1 = f32[2,4]{1,0} parameter(0)
  ROOT %e = f32[2,4]{1,0} exponential(%p.1)
}

ENTRY %main (x: f32[8]) -> (f32[2,4], f32[4]) {
  %x = f32[8]{0} parameter(0)
  %pair_fusion = (f32[8]{0}, f32[4]{0}) fusion(%x), kind=kLoop, calls=%pair
  %gte = f32[8]{0} get-tuple-element(%pair_fusion), index=0
  %b = f32[2,4]{1,0} bitcast(%gte)
  %one_fusion = f32[2,4]{1,0} fusion(%b), kind=kLoop, calls=%one
  %gte.1 = f32[4]{0} get-tuple-element(%pair_fusion), index=1
  ROOT %out = (f32[2,4]{1,0}, f32[4]{0}) tuple(%one_fusion, %gte.1)
}
"""

LOOP = """HloModule m

%body (s: (s32[], f32[8], f32[8])) -> (s32[], f32[8], f32[8]) {
  %s = (s32[], f32[8]{0}, f32[8]{0}) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %a = f32[8]{0} get-tuple-element(%s), index=1
  %w = f32[8]{0} get-tuple-element(%s), index=2
  %sine = f32[8]{0} sine(%a)
  %add = f32[8]{0} add(%sine, %w)
  ROOT %next = (s32[], f32[8]{0}, f32[8]{0}) tuple(%i, %add, %w)
}

%condition (s.1: (s32[], f32[8], f32[8])) -> pred[] {
  %s.1 = (s32[], f32[8]{0}, f32[8]{0}) parameter(0)
  %i.1 = s32[] get-tuple-element(%s.1), index=0
  %c = s32[] constant(3)
  ROOT %less = pred[] compare(%i.1, %c), direction=LT
}

ENTRY %main (x: f32[8]) -> f32[8] {
  %x = f32[8]{0} parameter(0)
  %zero = s32[] constant(0)
  %cosine = f32[8]{0} cosine(%x)
  %weight = f32[8]{0} negate(%x)
  %start = (s32[], f32[8]{0}, f32[8]{0}) tuple(%zero, %cosine, %weight)
  %loop = (s32[], f32[8]{0}, f32[8]{0}) while(%start), condition=%condition, body=%body
  %result = f32[8]{0} get-tuple-element(%loop), index=1
  ROOT %tanh = f32[8]{0} tanh(%result)
}
"""


def names(edges: tuple[Edge, ...]) -> set[tuple[str, str, bool]]:
    return {(edge.producer, edge.consumer, edge.crosses) for edge in edges}


def test_bitcasts_and_tuples_are_looked_through() -> None:
    module = parse_module(PAIR)
    (edge,) = launch_edges(module, {"pair_fusion", "one_fusion"})
    assert (edge.producer, edge.consumer, edge.crosses) == ("pair_fusion", "one_fusion", False)
    assert [path for path, _ in edge.values] == [(0,)]
    assert (edge.byte_size, edge.shape_text, edge.positions) == (32, "f32[8]", {0})


def test_what_launches_nothing_is_looked_through_whatever_it_is() -> None:
    module = parse_module(PAIR)
    assert launch_edges(module, {"one_fusion"}) == ()


def test_a_loop_is_crossed_from_outside_from_its_own_end_and_to_the_outside() -> None:
    edges = launch_edges(parse_module(LOOP), {"sine", "add", "cosine", "weight", "tanh", "less"})
    assert names(edges) == {
        ("sine", "add", False),
        ("add", "sine", True),  # the next iteration's
        ("cosine", "sine", True),
        ("weight", "add", True),
        ("add", "tanh", True),
        ("cosine", "tanh", True),  # a loop that runs no iteration
    }


def test_an_asynchronous_launch_stands_where_it_is_started() -> None:
    text = """HloModule m

%async (p: f32[8]) -> f32[8] {
  %p = f32[8]{0} parameter(0)
  ROOT %inner = f32[8]{0} sine(%p)
}

ENTRY %main (x: f32[8]) -> f32[8] {
  %x = f32[8]{0} parameter(0)
  %first = f32[8]{0} cosine(%x)
  %start = ((f32[8]{0}), f32[8]{0}, u32[]) async-start(%first), calls=%async
  %done = f32[8]{0} async-done(%start)
  ROOT %last = f32[8]{0} tanh(%done)
}
"""
    edges = launch_edges(parse_module(text), {"first", "inner", "last"})
    assert names(edges) == {("first", "inner", False), ("inner", "last", False)}


def test_stem() -> None:
    assert [stem(name) for name in ("mul.20.3", "fusion", "a.b", "x.1.clone")] == [
        "mul.20",
        "fusion",
        "a.b",
        "x.1.clone",
    ]


EARLY = """HloModule m

%c.1 (p.1: f32[8]) -> f32[8] {
  %p.1 = f32[8]{0} parameter(0)
  %a.1 = f32[8]{0} negate(%p.1)
  ROOT %sine.1 = f32[8]{0} sine(%a.1)
}

%c.2 (p.2: f32[8]) -> f32[8] {
  %p.2 = f32[8]{0} parameter(0)
  ROOT %cosine.1 = f32[8]{0} cosine(%p.2)
}

ENTRY %main (x: f32[8]) -> (f32[8], f32[8], f32[8]) {
  %x = f32[8]{0} parameter(0)
  %fusion.1 = f32[8]{0} fusion(%x), kind=kLoop, calls=%c.1
  %fusion.2 = f32[8]{0} fusion(%x), kind=kLoop, calls=%c.2
  %tanh.4.0 = f32[8]{0} tanh(%fusion.1)
  ROOT %t = (f32[8]{0}, f32[8]{0}, f32[8]{0}) tuple(%fusion.1, %fusion.2, %tanh.4.0)
}
"""

# The two siblings merged, the lone tanh wrapped, and everything renamed.
LATE = """HloModule m

%both (q: f32[8]) -> (f32[8], f32[8]) {
  %q = f32[8]{0} parameter(0)
  %a.1 = f32[8]{0} negate(%q)
  %sine.1 = f32[8]{0} sine(%a.1)
  %cosine.1.clone.1 = f32[8]{0} cosine(%q)
  ROOT %pair = (f32[8]{0}, f32[8]{0}) tuple(%sine.1, %cosine.1.clone.1)
}

%wrapped (q.1: f32[8]) -> f32[8] {
  %q.1 = f32[8]{0} parameter(0)
  ROOT %tanh.4.1 = f32[8]{0} tanh(%q.1)
}

ENTRY %main (x: f32[8]) -> (f32[8], f32[8], f32[8]) {
  %x = f32[8]{0} parameter(0)
  %loop_sine_fusion = (f32[8]{0}, f32[8]{0}) fusion(%x), kind=kLoop, calls=%both
  %g0 = f32[8]{0} get-tuple-element(%loop_sine_fusion), index=0
  %g1 = f32[8]{0} get-tuple-element(%loop_sine_fusion), index=1
  %wrapped_tanh = f32[8]{0} fusion(%g0), kind=kLoop, calls=%wrapped
  ROOT %t = (f32[8]{0}, f32[8]{0}, f32[8]{0}) tuple(%g0, %g1, %wrapped_tanh)
}
"""


def test_origins_of_merged_and_wrapped_launches() -> None:
    found = origins([parse_module(EARLY), parse_module(LATE)])
    assert found["loop_sine_fusion"] == ("fusion.1", "fusion.2")
    assert found["wrapped_tanh"] == ("tanh.4.0",)


def test_modules_that_differ_by_names_alone_are_matched_by_position() -> None:
    renamed = EARLY.replace("fusion.1 ", "loop_sine_fusion ").replace("fusion.2 ", "fusion.1 ")
    renamed = renamed.replace("tanh(%fusion.1)", "tanh(%loop_sine_fusion)")
    renamed = renamed.replace("tuple(%fusion.1, %fusion.2,", "tuple(%loop_sine_fusion, %fusion.1,")
    found = origins([parse_module(EARLY), parse_module(renamed)])
    assert found["loop_sine_fusion"] == ("fusion.1",)
    assert found["fusion.1"] == ("fusion.2",)  # a name that moved on to another instruction
