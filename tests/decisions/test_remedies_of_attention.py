"""The remedy of a missed fusion, where one end is of attention, a softmax or a loss."""

from __future__ import annotations

from dataclasses import replace

import pytest
from launch_programs import MIB, Program, softmax, text_of

from hlo_analysis.catalogue import PATTERNS, Kernel
from hlo_analysis.decisions import categories
from hlo_analysis.hotspots import remedies as hotspots
from hlo_analysis.records import Value
from hlo_analysis.remedies import grouped, texts


def attention() -> Program:
    return (
        Program()
        .launch("q", {"x": 10}, 10)
        .launch("k", {"x": 10}, 10)
        .launch("s", {"q": 10, "k": 10}, 800, "triton_gemm", scope="attention", shape="f32[8,64,64]")
        .launch("p", {"s": 800}, 400, "triton", scope="attention", **softmax("s"))
        .launch("o", {"p": 400, "v": 10}, 10, "triton_gemm", scope="attention")
    )


def test_attention_scores_have_the_remedy_of_attention() -> None:
    first, second, *_ = attention().rank()
    assert (first.value, second.value) == ("s", "p")
    for missed in (first, second):
        assert missed.remedy_kind == "kernel"
        assert missed.remedy.startswith("attention:")
        assert "cudnn" in missed.remedy


def test_a_pattern_without_a_kernel_is_told_in_general_terms() -> None:
    first, *_ = attention().rank(catalogue=())
    assert first.remedy.startswith("one kernel that keeps the scores on the chip")


@pytest.mark.parametrize(("reason", "name"), [(None, "flash: "), ("too large", "")])
def test_a_kernel_that_cannot_take_the_launches_is_not_named(reason: str | None, name: str) -> None:
    kernel = Kernel(name="flash", pattern="attention", package="p", unsupported=lambda launches: reason)
    first, *_ = attention().rank(catalogue=[kernel])
    assert first.remedy.startswith(f"{name}one kernel that keeps the scores on the chip")


def test_a_kernel_covers_a_pattern_that_there_is() -> None:
    with pytest.raises(ValueError, match=r"got 'atention' for kernel 'flash'; did you mean 'attention'"):
        Kernel(name="flash", pattern="atention", package="p")


def test_every_pattern_of_a_remedy_is_known() -> None:
    remedies = (*vars(texts).values(), *vars(grouped).values(), *vars(hotspots).values())
    found = [found.pattern for found in remedies if isinstance(found, texts.Remedy) and found.pattern]
    assert set(found) == set(PATTERNS)


def test_attention_scores_need_not_be_kept_for_the_backward_pass() -> None:
    program = attention().launch("dv", {"p": 400, "do": 10}, 10, "triton_gemm", phase="backward")
    first, second, *_ = program.rank()
    assert (first.value, second.value) == ("s", "p")
    assert second.bytes_at_stake == 1200 * MIB


def test_scores_of_arguments_and_their_gradients_are_scores_a_mask_is_none_of_their_factors() -> None:
    program = (
        Program()
        .launch("s", {"q": 10, "k": 10, "mask": 800}, 800, "triton_gemm", opcodes=("dot", "select"))
        .launch("p", {"s": 800}, 800, "triton", **softmax("s"))
        .launch("o", {"p": 800, "v": 10}, 10, "triton_gemm")
        .launch("dp", {"do": 10, "v": 10}, 800, "triton_gemm", phase="backward")
        .launch("ds", {"dp": 800, "p": 800}, 400, opcodes=("multiply", "reduce", "subtract"), phase="backward")
        .launch("dq", {"ds": 400, "k": 10}, 10, "triton_gemm", phase="backward")
    )
    remedies = {missed.value: missed.remedy for missed in program.rank()}
    assert {"s", "p", "dp", "ds"} <= remedies.keys()
    assert all(remedies[value].startswith("attention:") for value in ("s", "p", "dp", "ds"))


@pytest.mark.parametrize(("other", "is_score"), [("s", True), ("h", False)])
def test_the_gradient_of_scores_is_put_together_with_them(other: str, is_score: bool) -> None:
    """That of a hidden layer of as many elements is not. What lies between, as a transpose, is of the gradient, too."""
    program = attention().launch("h", {"x": 10}, 800)
    program.launch("dp", {"do": 10, "v": 10}, 800, "triton_gemm", phase="backward")
    program.launch("turned", {"dp": 800}, 800, opcodes=("transpose",), phase="backward")
    program.launch("ds", {"turned": 800, other: 800}, 400, opcodes=("multiply", "subtract"), phase="backward")
    remedies = {missed.value: missed.remedy for missed in program.rank()}
    assert all(remedies[value].startswith("attention:") == is_score for value in ("dp", "turned"))


def test_the_gradient_of_a_hidden_layer_is_no_attention() -> None:
    """Both factors may be made by launches, as where XLA copies a donated weight that it overwrites early."""
    program = (
        Program()
        .launch("w", {"weight": 1}, 1, "copy")
        .launch("d", {"x": 1}, 1, phase="backward")
        .launch("h", {"d": 1, "w": 1}, 100, "triton_gemm", phase="backward")
        .launch("g", {"h": 100}, 100, opcodes=("exponential", "multiply"), phase="backward")
        .launch("dw", {"g": 100, "x": 1}, 1, "triton_gemm", phase="backward")
    )
    assert not any(missed.remedy.startswith("attention:") for missed in program.rank())


def test_the_softmax_of_a_loss_is_no_attention() -> None:
    program = (
        Program()
        .launch("logits", {"h": 10, "w": 40}, 400, "triton_gemm")
        .launch("sum", {"logits": 400}, 1, "reduction", opcodes=("exponential", "reduce"))
        .launch("loss", {"sum": 1}, 1, opcodes=("log",))
        .launch("d", {"logits": 400, "sum": 1}, 400, opcodes=("exponential", "subtract"), phase="backward")
        .launch("dh", {"d": 400, "w": 40}, 10, "triton_gemm", phase="backward")
    )
    remedies = {missed.value: missed.remedy for missed in program.rank()}
    assert remedies["logits"].startswith("linear_cross_entropy:")
    assert remedies["d"] == text_of(texts.LINEAR_PROLOGUE)


def test_a_loss_beside_the_array_is_no_sum_of_the_normalization() -> None:
    """What the first launch of the backward pass sums, row by row, is the loss; the batch norm's are over columns."""
    loss = "%x = f32[64,128]{1,0} parameter(0)\n %l = f32[64] reduce(%x, %zero), dimensions={1}, to_apply=%add"
    sums = loss.replace("{1},", "{0},")
    program = Program().launch("d", {"x": 100}, 100, "reduction", opcodes=("reduce", "rsqrt"), hlo=loss)
    first = program.launches[0]
    program.launches[0] = replace(first, outputs=(*first.outputs, Value(name="l", shape="f32[64]", bytes=64)))
    (missed,) = program.launch("s", {"d": 100}, 1, opcodes=("reduce", "rsqrt", "subtract"), hlo=sums).rank()
    assert missed.remedy.startswith("batch_norm:")


def test_a_loss_takes_the_logarithm_of_its_sum() -> None:
    program = Program().launch("max", {"x": 100}, 100, "reduction", opcodes=("reduce",))
    program.launch("sum", {"max": 100}, 1, "reduction", opcodes=("exponential", "reduce"))
    assert program.rank()[0].remedy.startswith("softmax:")
    assert program.launch("loss", {"sum": 1}, 1, opcodes=("log",)).rank()[0].remedy.startswith("cross_entropy:")


def test_sums_along_a_softmax_are_no_softmax() -> None:
    program = Program().launch("p", {"x": 100}, 100, opcodes=("exponential", "divide"))
    program.launch("c", {"p": 100}, 100, opcodes=("reduce-window",)).launch("n", {"c": 100}, 1, opcodes=("reduce",))
    assert not any(missed.remedy.startswith("softmax") for missed in program.rank())


def test_transposed_operands_of_attention_go_to_a_kernel_that_takes_them_as_they_are() -> None:
    program = Program().launch("k", {"x": 100}, 100, opcodes=("transpose", "add")).launch("q", {"x": 100}, 100)
    program.launch("s", {"q": 100, "k": 100}, 800, "triton_gemm", opcodes=("dot",))
    program.launch("p", {"s": 800}, 400, "triton", **softmax("s"))
    program.launch("o", {"p": 400, "v": 10}, 10, "triton_gemm", opcodes=("dot",))
    remedies = {missed.value: missed.remedy for missed in program.rank()}
    assert "as their projections write them" in remedies["k"]
    assert remedies["q"] == text_of(texts.LINEAR_PROLOGUE)


def test_a_softmax_in_one_kernel_is_not_to_be_made_one() -> None:
    program = Program().launch("mask", {"x": 100}, 100, opcodes=("select",))
    program.launch("s", {"mask": 100}, 100, "triton", opcodes=("exponential", "reduce", "divide"))
    (missed,) = program.rank()
    assert missed.remedy == text_of(texts.ONE_KERNEL)


def test_exponentials_that_are_added_up_later_are_to_be_a_loss_in_one_kernel() -> None:
    """XLA's kernel makes the maximum and the exponentials, writes these, and another adds them up."""
    hlo = "%b = f32[8] broadcast(%m)\n%d = f32[8] subtract(%x, %b)\n%e = f32[8] exponential(%d)"
    program = Program().launch("e", {"x": 100}, 100, "triton", opcodes=("exponential", "reduce", "subtract"), hlo=hlo)
    program.launch("sum", {"e": 100}, 1, "reduction", opcodes=("reduce",))
    missed, *_ = program.launch("loss", {"sum": 1}, 1, opcodes=("log",)).rank()
    assert missed.remedy.startswith("cross_entropy:")


def test_a_gate_is_no_attention() -> None:
    """Its product grows too, but it is made with a weight."""
    program = (
        Program()
        .launch("h", {"x": 10}, 10)
        .launch("g", {"h": 10, "wg": 50}, 400, "triton_gemm", scope="mlp")
        .launch("u", {"h": 10, "wu": 50}, 400, "triton_gemm", scope="mlp")
        .launch("m", {"g": 400, "u": 400}, 400, opcodes=("multiply", "logistic"), scope="mlp")
    )
    remedies = {missed.value: missed.remedy for missed in program.rank() if missed.category != categories.SHARED_INPUT}
    assert remedies["g"].startswith("gated_linear:")
    assert remedies["u"].startswith("gated_linear:")
