"""What collectives send, by each spelling of their groups."""

from __future__ import annotations

import pytest

from hlo_analysis import parse_module
from hlo_analysis.costs.flops import Flops
from hlo_analysis.costs.link import group_axes, group_size, link_bytes, mesh_of
from hlo_analysis.costs.roofline import bound
from hlo_analysis.targets import load_target, target_names

MODULE = """\
HloModule m, is_scheduled=true, num_partitions=8

%add (a: f32[], b: f32[]) -> f32[] {{
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}}

ENTRY %main (p: f32[64]) -> f32[64] {{
  %p = f32[64]{{0}} parameter(0)
  ROOT %c = f32[64]{{0}} {opcode}(%p), channel_id=1, {groups}{reducer}
}}
"""


def _sent(opcode: str, groups: str, operand_bytes: int = 800) -> int:
    reducer = ", to_apply=%add" if "reduce" in opcode else ""
    module = parse_module(MODULE.format(opcode=opcode, groups=groups, reducer=reducer))
    return link_bytes(module, module.entry.root_instruction, operand_bytes)


@pytest.mark.parametrize(
    ("groups", "devices"),
    [
        ("replica_groups={{0,1,2,3},{4,5,6,7}}", 4),
        ("replica_groups={{0},{1}}", 1),
        ("replica_groups=[2,4]<=[8]", 4),
        ("replica_groups=[4,2]<=[2,4]T(1,0)", 2),
        ("replica_groups=mesh['a'=2,'b'=4] {'b'}", 4),
        ("replica_groups=mesh['a'=2,'b'=4] {'a','b'}", 8),
        ("replica_groups=mesh['a'=2,'b'=4] {'b':(1)2}", 2),
        ("replica_groups={}", 8),
    ],
)
def test_spellings_of_groups(groups: str, devices: int):
    module = parse_module(MODULE.format(opcode="all-reduce", groups=groups, reducer=", to_apply=%add"))
    assert group_size(module, module.entry.root_instruction) == devices


@pytest.mark.parametrize(
    ("groups", "axes"),
    [
        ("replica_groups=mesh['a'=2,'b'=4] {'b'}", (("b", 4),)),
        ("replica_groups=mesh['a'=2,'b.4'=2,'b'=2] {'b.4','b'}", (("b", 4),)),
        ("replica_groups=[2,4]<=[8]", (("b", 4),)),
        ("replica_groups=[4,2]<=[2,4]T(1,0)", (("a", 2),)),
        ("replica_groups=[1,8]<=[8]", (("a", 2), ("b", 4))),
        ("replica_groups={{0,4},{1,5},{2,6},{3,7}}", (("a", 2),)),
        ("replica_groups={{0,1},{2,3},{4,5},{6,7}}", ()),  # half of an axis
        ("replica_groups={}", ()),
        ("replica_groups=mesh['axis_0'=2,'axis_1'=4] {'axis_1'}", (("b", 4),)),
        ("replica_groups=mesh['axis_0'=8] {'axis_0':(1)2}", (("a", 2),)),
        ("replica_groups=mesh['axis_0'=8] {'axis_0':(2)4}", (("b", 4),)),
    ],
)
def test_axes_of_groups(groups: str, axes: tuple[tuple[str, int], ...]):
    module = parse_module(MODULE.format(opcode="all-reduce", groups=groups, reducer=", to_apply=%add"))
    assert group_axes(module.entry.root_instruction, {"a": 2, "b": 4}) == axes


def test_the_programs_names_of_axes_go_before_xlas():
    groups = "replica_groups=mesh['axis_0'=8] {'axis_0'}"
    module = parse_module(MODULE.format(opcode="all-reduce", groups=groups, reducer=", to_apply=%add"))
    assert mesh_of(module) == {"axis_0": 8}
    assert mesh_of(module, "%x = f32[8] parameter(0), sharding={mesh['a'=2,'b'=4], [{'a'}]}") == {"a": 2, "b": 4}


@pytest.mark.parametrize(
    ("opcode", "sent"),
    [
        ("all-gather", 800 * 3),
        ("all-reduce", 800 * 2 * 3 // 4),
        ("all-reduce-start", 800 * 2 * 3 // 4),
        ("reduce-scatter", 800 * 3 // 4),
        ("all-to-all", 800 * 3 // 4),
        ("add", 0),
    ],
)
def test_bytes_sent_by_a_group_of_four(opcode: str, sent: int):
    assert _sent(opcode, "replica_groups=[2,4]<=[8]") == sent


def test_a_permutation_sends_its_operand():
    assert _sent("collective-permute", "source_target_pairs={{0,1},{1,0}}") == 800


def test_every_shipped_gpu_has_links():
    rates = {
        name: load_target(name).device.link_bandwidth for name in target_names() if name not in ("cpu", "attached")
    }
    assert min(rates.values()) >= 32e9
    assert rates["b200"] == 2 * rates["h200"] == 3 * rates["a100"] == 900e9


def test_links_bound_only_where_they_take_longest():
    device = load_target("h200").device
    both = bound(48_000_000, Flops(), device, link_bytes=45_000_000)
    assert (both.limiter, both.time_us) == ("link", pytest.approx(100 + 2.4))
    assert bound(4_800_000_000, Flops(), device, link_bytes=45_000_000).limiter == "memory"
