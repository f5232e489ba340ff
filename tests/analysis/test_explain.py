"""Edges found by the names of their ends, and their story."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hlo_analysis import Analysis
from hlo_analysis.errors import UnknownEdgeError
from hlo_analysis.explain import edges_of, find_edge, find_edges, find_ptx
from hlo_analysis.records import Decision, Trial
from hlo_analysis.report.edges import edge_list, edge_story
from tests.report.examples import llama_comparison


@pytest.fixture(scope="module")
def block() -> Analysis:
    analysis = llama_comparison()["xla"].analysis
    assert analysis is not None
    return analysis


@pytest.mark.parametrize(
    ("producer", "consumer"),
    [
        ("4", "#5"),
        ("gemm_fusion_dot.2", "softmax_fusion"),
        ("fusion_dot.2", "SOFTMAX"),
    ],
)
def test_numbers_names_and_parts_of_names_mean_the_same_edge(block: Analysis, producer: str, consumer: str):
    edge = find_edge(block, producer, consumer)
    assert (edge.producer, edge.consumer) == (4, 5)
    assert edge.missed is not None
    assert edge.missed.value == "gemm_fusion_dot.2"
    assert [decision.producer for decision in edge.decisions] == ["gemm_fusion_dot.2"]


def test_a_scope_means_all_of_its_launches_and_the_other_end_decides(block: Analysis):
    edge = find_edge(block, "block/rope", "block/attention")
    assert (edge.producer, edge.consumer) == (3, 4)


def test_edges_stand_by_what_remains_at_stake_then_by_size(block: Analysis):
    edges = edges_of(block)
    stakes = [edge.missed.remaining_us if edge.missed else 0.0 for edge in edges]
    assert stakes == sorted(stakes, reverse=True)
    without = [edge.bytes for edge in edges if edge.missed is None]
    assert without == sorted(without, reverse=True)
    assert {(edge.producer, edge.consumer) for edge in edges} == {
        (value.producer, launch.index)
        for launch in block.launches
        for value in launch.inputs
        if value.producer is not None
    }


def test_one_name_gives_the_edges_at_it(block: Analysis):
    assert {(edge.producer, edge.consumer) for edge in find_edges(block, "softmax_fusion")} == {(4, 5), (5, 6)}


def test_part_of_an_instruction_s_name_means_the_launch_that_holds_it(block: Analysis):
    held = replace(block.decisions[0], producer="triton_softmax.3", producer_launch=5)
    lost = replace(block.decisions[0], producer="gone.7", producer_launch=None)
    changed = replace(block, decisions=(held, lost))
    assert find_edges(changed, "triton_soft") == find_edges(changed, "5")
    with pytest.raises(UnknownEdgeError) as error:
        find_edges(changed, "gone.8")
    assert "'gone.7'" not in str(error.value)


def test_several_edges_are_listed(block: Analysis):
    with pytest.raises(UnknownEdgeError, match=r"fit 2 edges: #4 gemm_fusion_dot\.2 → #5 .*name launches by number"):
        find_edge(block, "block/attention", "block/attention")


def test_unknown_names_get_the_nearest(block: Analysis):
    with pytest.raises(UnknownEdgeError, match="did you mean 'softmax_fusion'"):
        find_edge(block, "softmx_fusion", "5")
    with pytest.raises(UnknownEdgeError, match="has launches #0 to #12"):
        find_edge(block, "13", "5")


def test_ends_without_an_edge_show_the_edges_at_them(block: Analysis):
    with pytest.raises(UnknownEdgeError, match=r"no value goes from '5' to '4'; .*#4 gemm_fusion_dot\.2 → #5"):
        find_edge(block, "5", "4")


def _decision(producer: str, consumer: str, pass_name: str, gain: float | None, launch: int) -> Decision:
    return Decision(
        producer=producer,
        consumer=consumer,
        verdict="fused",
        reason=f"[fused by {pass_name}]",
        category="fused",
        pass_name=pass_name,
        gain_us=gain,
        producer_launch=launch,
        consumer_launch=launch,
    )


def test_within_one_launch_the_decisions_stand_in_the_order_of_passes(block: Analysis):
    inside = (
        _decision("exp.1", "sum.1", "multi_output_fusion", None, 5),
        _decision("exp.1", "sum.1", "priority-fusion", 3.5, 5),
        _decision("max.1", "exp.1", "triton-softmax-rewriter", None, 5),
    )
    analysis = replace(block, decisions=(*block.decisions, *inside))
    edge = find_edge(analysis, "exp.1", "sum.1")
    assert (edge.producer, edge.consumer) == (5, 5)
    assert [decision.pass_name for decision in edge.decisions] == ["priority-fusion", "multi_output_fusion"]
    story = "\n".join(edge_story(analysis, edge))
    assert "#5 softmax_fusion holds both ends" in story
    assert "gain +3.50 µs" in story
    whole = find_edge(analysis, "5", "softmax_fusion")
    assert whole.decisions[0].pass_name == "triton-softmax-rewriter"
    assert set(inside) < set(whole.decisions)


def test_the_story_has_both_ends_the_reason_the_stake_and_the_remedy_with_its_trial(block: Analysis):
    trial = Trial(change="option a=b", saved_launches=1, saved_bytes=2_000_000, saved_us=12.0, helps=True)
    first = replace(block.missed[0], code="softmax(x)\nreturn", options=(("a", "b"),), trial=trial)
    analysis = replace(block, missed=(first, *block.missed[1:]))
    edge = edges_of(analysis)[0]
    story = edge_story(analysis, edge)
    text = "\n".join(story)
    assert story[0] == "#4 gemm_fusion_dot.2 → #5 softmax_fusion"
    for launch in (analysis.launches[4], analysis.launches[5]):
        assert f"{launch.source} · {launch.scope} · {launch.op_name}" in text
    assert "multiply ×3, convert ×2, reduce" in text
    assert "priority-fusion: rejected" in text
    assert "Fusing costs more than it saves" in text
    assert "897 µs after the missed fusions ranked above it (estimated). Rank 1." in text
    assert first.remedy[:40] in text
    assert "  option a=b" in story
    assert "    softmax(x)\n    return" in text
    assert "1 launch and 2.0 MB less (counted), 12 µs less (estimated); it helps." in text


def test_a_list_says_how_many_there_are(block: Analysis):
    lines = edge_list(block, edges_of(block), 2)
    assert lines[0].startswith("The costliest 2 of the ")
    assert len([line for line in lines if " → " in line]) == 2


def test_the_readers_of_one_missed_fusion_are_one_entry(block: Analysis):
    shared = replace(block.missed[0], producer=8, consumers=(9, 12), rank=1, remaining_us=5000.0)
    analysis = replace(block, missed=(shared,))
    lines = edge_list(analysis, edges_of(analysis))
    assert "1. #8 input_add_reduce_fusion → #9 loop_multiply_fusion.1, #12 gemm_fusion_dot.6" in lines[1]
    assert sum("5.00 ms at stake" in line for line in lines) == 1


def test_the_ptx_of_the_launches_that_a_name_refers_to(block: Analysis):
    places = {0: 0, 3: 1, 9: 0}
    launches = tuple(replace(launch, ptx=places.get(launch.index)) for launch in block.launches)
    analysis = replace(block, launches=launches, ptx=(".entry norm()\n", ".entry rope()\n"))
    assert find_ptx(analysis, "#3") == f"// #3 {launches[3].name}\n.entry rope()"
    both = find_ptx(replace(analysis, launches=tuple(replace(launch, scope="s") for launch in launches)), "s")
    assert both.splitlines()[:2] == [f"// #0 {launches[0].name}, #9 {launches[9].name}", ".entry norm()"]
    assert both.count(".entry") == 2
    with pytest.raises(
        UnknownEdgeError, match=r"no PTX of #5 softmax_fusion \(.*\): copies and library calls have none"
    ):
        find_ptx(analysis, "5")
