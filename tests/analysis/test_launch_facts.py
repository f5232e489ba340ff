"""Facts of a launch: what its instructions are computed from, and whose scopes it does the work of."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hlo_analysis.hlo import parse_module
from hlo_analysis.hlo.attributes import dot_dimensions, integers, interior_padding, slice_strides, window_size
from hlo_analysis.program.facts import LaunchRow, facts_of
from hlo_analysis.program.launch_rows import scopes_of, with_readers_scopes
from hlo_analysis.records.launches import Value

TEXT = """HloModule m

fused {
  p = f32[8,16]{1,0} parameter(1)
  q = f32[16,8]{1,0} parameter(0)
  n = f32[8,16]{1,0} negate(p), metadata={op_name="jit(f)/block/add"}
  d = f32[8,8] dot(n, q), lhs_contracting_dims={1}, rhs_contracting_dims={0}, metadata={op_name="jit(f)/block/norm/m"}
  s = f32[4,8]{1,0} slice(d), slice={[0:8:2], [0:8]}, metadata={op_name="jit(f)/block/rope/op"}
  z = f32[] constant(0)
  w = f32[11,8]{1,0} pad(s, z), padding=1_0_2x0_0
  ROOT m = f32[11,8]{1,0} multiply(w, w), metadata={op_name="jit(f)/transpose(jvp(block))/mlp/gate/mul"}
}

ENTRY main {
  x = f32[16,8]{1,0} parameter(0)
  y = (f32[8,16]{1,0}, f32[]) parameter(1)
  ROOT fusion = f32[11,8]{1,0} fusion(x, y#0), kind=kLoop, calls=fused
}
"""


def test_facts_of_a_fusion() -> None:
    module = parse_module(TEXT)
    facts = facts_of(module, module.entry.root_instruction)
    (dot,), (cut,), (pad,) = facts.of("dot"), facts.of("slice"), facts.of("pad")
    assert facts.root is facts.instructions["m"]
    assert facts.operand_origins(dot) == (frozenset({"y"}), frozenset({"x"}))
    assert facts.origins["m"] == {"x", "y"}
    dimensions = dot_dimensions(dot)
    assert dimensions is not None
    assert (dimensions.lhs_batch, dimensions.lhs_contracting, dimensions.rhs_contracting) == ((), (1,), (0,))
    assert (slice_strides(cut), interior_padding(pad), window_size(pad), integers(pad, "none")) == (
        (2, 1),
        (2, 0),
        (),
        (),
    )
    assert facts.phases == {"forward", "backward"}


def test_scopes_leave_out_enclosing_ones_and_instructions_without_work() -> None:
    module = parse_module(TEXT)
    facts = facts_of(module, module.entry.root_instruction)
    own = ("block/norm", "forward")
    assert scopes_of(facts, own) == (own, ("block/mlp/gate", "backward"))


def test_a_gather_without_a_scope_takes_its_readers_among_its_scopes() -> None:
    own: tuple[str, Any] = ("block/mlp", "backward")
    given = Value(name="w", shape="f32[8]", bytes=32, producer=0)
    gather = LaunchRow(index=0, thunk_id=0, name="w", kind="collective", computation="main")
    reader = replace(gather, index=1, kind="cublas", scope=own[0], phase=own[1], inputs=(given,))
    gather, _ = with_readers_scopes([replace(gather, scopes=(("block", "forward"),)), reader])
    assert (gather.scope, gather.phase, gather.scopes) == (*own, (own, ("block", "forward")))
