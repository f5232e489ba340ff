"""The decision table of real programs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest

from hlo_analysis import Analysis, Capture, DumpError
from hlo_analysis.decisions import CATEGORIES, categories, decide
from hlo_analysis.decisions.edges import launch_edges
from hlo_analysis.hlo import parse_module
from hlo_analysis.records import Decision

Analyzed = Callable[..., Analysis]


class Texts:
    """A capture's texts, some of them replaced."""

    def __init__(self, capture: Capture, **replaced: str | None) -> None:
        self.capture, self.replaced = capture, replaced

    def text(self, key: str) -> str | None:
        return self.replaced[key] if key in self.replaced else self.capture.text(key)


def between(analysis: Analysis, producer: str, consumer: str) -> list[Decision]:
    """Surviving edges between two scopes of the model, the forward pass only."""
    return [
        decision
        for decision in analysis.decisions
        if decision.verdict != "fused"
        and (one := analysis.launches[decision.producer_launch or 0]).scope == producer
        and (other := analysis.launches[decision.consumer_launch or 0]).scope == consumer
        and one.phase == other.phase == "forward"
    ]


@pytest.mark.parametrize("mode", ["forward", "grad"])
def test_every_edge_between_two_launches_has_one_decision(
    captured: Callable[..., Capture], analyzed: Analyzed, mode: str
) -> None:
    analysis = analyzed(mode)
    module = parse_module(captured(mode).require("final_hlo"))
    index = {launch.name: launch.index for launch in analysis.launches}
    edges = Counter((index[edge.producer], index[edge.consumer]) for edge in launch_edges(module, index))
    surviving = Counter((d.producer_launch, d.consumer_launch) for d in analysis.decisions if d.verdict != "fused")
    assert surviving == edges
    assert set(surviving.values()) == {1}


@pytest.mark.parametrize("mode", ["forward", "grad"])
def test_every_edge_is_explained(analyzed: Analyzed, mode: str) -> None:
    for decision in analyzed(mode).decisions:
        assert decision.category in CATEGORIES
        assert decision.category not in (categories.UNRECORDED, categories.OTHER_RULE), decision
        assert decision.reason
        assert decision.bytes > 0
        match decision.verdict:
            case "fused":
                assert decision.producer_launch == decision.consumer_launch is not None
                assert decision.pass_name
            case "rejected":
                assert decision.gain_us is not None
                assert decision.gain_us < 0
                assert decision.category == categories.SLOWER


def test_the_norm_stays_out_of_the_products_by_the_rewriters_own_words(analyzed: Analyzed) -> None:
    decisions = between(analyzed("forward"), "mlp_norm", "gate_up")
    assert decisions
    for decision in decisions:
        assert decision.pass_name == "triton-gemm-rewriter"
        assert decision.reason == "Not obviously profitable to fuse as input."
        assert decision.category == categories.MATRIX_PRODUCT
        assert decision.shape == "bf16[2,2048,512]"
        assert decision.bytes == 2 * 2 * 2048 * 512


def test_a_product_that_two_operations_read_has_no_epilogue(analyzed: Analyzed) -> None:
    """At this size XLA merges gate and up into one product, which SiLU alone reads twice."""
    found = {decision.category for decision in between(analyzed("forward"), "gate_up", "activation")}
    assert found == {categories.SEVERAL_USERS}


def test_fused_edges_by_the_pass_that_fused_them(analyzed: Analyzed) -> None:
    analysis = analyzed("forward")
    fused = [decision for decision in analysis.decisions if decision.verdict == "fused"]
    passes = Counter(decision.pass_name for decision in fused)
    assert set(passes) == {"triton-gemm-rewriter", "triton-softmax-rewriter", "priority-fusion"}
    for decision in fused:
        launch = analysis.launches[decision.producer_launch or 0]
        if decision.pass_name == "triton-softmax-rewriter":
            assert dict(launch.opcodes)["reduce"] >= 1
        if decision.pass_name == "triton-gemm-rewriter":
            assert dict(launch.opcodes)["dot"] == 1


def test_products_that_became_library_calls(analyzed: Analyzed) -> None:
    analysis = analyzed("forward", xla_gpu_enable_triton_gemm=False)
    libraries = {launch.index for launch in analysis.launches if launch.kind in ("cublas", "cublaslt")}
    assert len(libraries) >= 6
    for decision in analysis.decisions:
        touches = {decision.producer_launch, decision.consumer_launch} & libraries
        if decision.category == categories.INSERTED:  # a copy of what cuBLAS adds its product to
            assert analysis.launches[decision.producer_launch or 0].kind == "copy"
            continue
        assert bool(touches) == (decision.category == categories.LIBRARY_CALL), decision


def test_fusion_switched_off(analyzed: Analyzed) -> None:
    analysis = analyzed("forward", xla_disable_hlo_passes="priority-fusion,multi_output_fusion,triton-softmax-rewriter")
    found = Counter(decision.category for decision in analysis.decisions)
    assert found[categories.SWITCHED_OFF] > 40
    assert found[categories.UNRECORDED] == 0
    assert {missed.remedy_kind for missed in analysis.missed if missed.category == categories.SWITCHED_OFF} == {
        "option"
    }


def test_without_any_word_the_edges_are_all_there(captured: Callable[..., Capture], analyzed: Analyzed) -> None:
    capture = captured("forward")
    gone = ("priority_fusion_dump", "before_priority_fusion", "after_priority_fusion", "worker_log", "before_rename")
    module = parse_module(capture.require("final_hlo"))
    index = {launch.name: launch.index for launch in analyzed("forward").launches}
    decisions = decide(Texts(capture, **dict.fromkeys(gone)), module, index)
    apart = [decision for decision in decisions if decision.verdict != "fused"]
    whole = [decision for decision in analyzed("forward").decisions if decision.verdict != "fused"]
    assert [(d.producer, d.consumer) for d in apart] == [(d.producer, d.consumer) for d in whole]
    assert all(decision.reason.startswith("[") for decision in decisions)
    # What was fused is read off the launches themselves.
    opcodes = {launch.index: dict(launch.opcodes) for launch in analyzed("forward").launches}
    fused = [decision for decision in decisions if decision.verdict == "fused"]
    assert len(fused) > 30
    assert all(sum(opcodes[decision.producer_launch or 0].values()) > 1 for decision in fused)


def test_without_the_log_priority_fusion_still_speaks(captured: Callable[..., Capture], analyzed: Analyzed) -> None:
    capture = captured("forward")
    module = parse_module(capture.require("final_hlo"))
    index = {launch.name: launch.index for launch in analyzed("forward").launches}
    decisions = decide(Texts(capture, worker_log=None), module, index)
    passes = {decision.pass_name for decision in decisions if decision.verdict != "fused"}
    assert passes == {"priority-fusion"}


def test_without_the_stages_between_launches_are_matched_by_content(
    captured: Callable[..., Capture], analyzed: Analyzed
) -> None:
    capture = captured("grad")
    module = parse_module(capture.require("final_hlo"))
    index = {launch.name: launch.index for launch in analyzed("grad").launches}
    decisions = decide(Texts(capture, before_rename=None, after_rename=None), module, index)
    assert decisions == analyzed("grad").decisions


def test_a_dump_that_was_cut_off_is_an_error(captured: Callable[..., Capture], analyzed: Analyzed) -> None:
    capture = captured("forward")
    module = parse_module(capture.require("final_hlo"))
    dump = capture.require("priority_fusion_dump")
    with pytest.raises(DumpError, match="cut off"):
        decide(Texts(capture, priority_fusion_dump=dump[: len(dump) // 2]), module, {})


def test_where_xla_stopped_early_a_late_stage_stands_in(captured: Callable[..., Capture]) -> None:
    capture = captured("forward")
    module = parse_module(capture.require("after_rename"))
    index = {
        name: number
        for number, (name, instruction) in enumerate(module.entry.instructions.items())
        if instruction.opcode == "fusion"
    }
    decisions = decide(Texts(capture, final_hlo=None), module, index)
    surviving = [decision for decision in decisions if decision.verdict != "fused"]
    assert surviving
    assert all(decision.pass_name for decision in surviving)


def test_steps_of_random_bits_are_left_out() -> None:
    jax = pytest.importorskip("jax")
    pytest.importorskip("jax_plugins.xla_cuda13")
    from hlo_analysis import analyze, capture

    def dropout(key, x):
        return jax.numpy.where(jax.random.bernoulli(key, 0.9, x.shape), x, 0)

    arguments = jax.ShapeDtypeStruct((2,), "uint32"), jax.ShapeDtypeStruct((256, 256), "float32")
    analysis = analyze(capture(dropout, *arguments, target="h200", autotune=None))
    xors = sum(dict(launch.opcodes).get("xor", 0) for launch in analysis.launches)
    assert xors >= 20
    assert len(analysis.decisions) < 60


def test_the_cpu_target_says_that_xla_keeps_no_record() -> None:
    jax = pytest.importorskip("jax")
    from hlo_analysis import analyze, capture

    def softmax(x, weight):
        return jax.nn.softmax(jax.nn.gelu(x @ weight), -1)

    arguments = jax.ShapeDtypeStruct((64, 128), "float32"), jax.ShapeDtypeStruct((128, 256), "float32")
    analysis = analyze(capture(softmax, *arguments, target="cpu"))
    apart = [decision for decision in analysis.decisions if decision.verdict != "fused"]
    assert apart
    for decision in apart:
        assert decision.category in (categories.UNRECORDED, categories.LIBRARY_CALL)
        assert "CPU" in decision.reason or decision.category == categories.LIBRARY_CALL
