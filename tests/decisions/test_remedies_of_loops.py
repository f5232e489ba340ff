"""Remedies of what a loop hands its next run, sums up or leaves in a stack."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from launch_programs import Program, text_of

from hlo_analysis.decisions import categories
from hlo_analysis.remedies import loop_texts, texts


@pytest.mark.parametrize(("opcodes", "is_sum"), [(("dot", "add"), True), (("dot", "add", "multiply"), False)])
def test_products_that_a_loop_adds_up_are_one_product_after_it(opcodes: tuple[str, ...], is_sum: bool) -> None:
    """The gradient of a scan's weight; a running sum that is scaled, as that of attention, cannot wait."""
    program = Program().launch("dw", {"x": 1, "dw": 100}, 100, "triton_gemm", opcodes=opcodes, repeat=8)
    carried = replace(program.launches[0].inputs[1], producer=0)
    program.launches[0] = replace(program.launches[0], inputs=(program.launches[0].inputs[0], carried))
    (missed,) = program.rank()
    assert missed.category == categories.BOUNDARY
    assert missed.remedy == (loop_texts.SUMMED_AFTER if is_sum else loop_texts.CARRIED).text


_TURNED = """  %d = f32[8,8]{1,0} dot(%x, %w), lhs_contracting_dims={1}
  %t = f32[8,8]{1,0} tanh(%d)
  ROOT %s = f32[8,8]{1,0} add(%acc, %t)"""


_BEFORE = """  %t = f32[8,8]{1,0} tanh(%x)
  %d = f32[8,8]{1,0} dot(%t, %w), lhs_contracting_dims={1}
  ROOT %s = f32[8,8]{1,0} add(%acc, %d)"""


@pytest.mark.parametrize(("hlo", "is_sum"), [(_TURNED, False), (_BEFORE, True)])
def test_only_products_themselves_are_added_up_after_the_loop(hlo: str, is_sum: bool) -> None:
    """What is made of each step's product, as its tanh, is not what is made of the one of all steps."""
    program = Program().launch("s", {"x": 1, "s": 100}, 100, "triton_gemm", opcodes=("dot", "add"), repeat=8, hlo=hlo)
    (launch,) = program.launches
    program.launches[0] = replace(launch, inputs=(launch.inputs[0], replace(launch.inputs[1], producer=0)))
    assert [missed.remedy for missed in program.rank()] == [
        (loop_texts.SUMMED_AFTER if is_sum else loop_texts.CARRIED).text
    ]


_SCALED = """  %m = f32[8,8]{1,0} multiply(%x, %half)
  %d = f32[8,8]{1,0} dot(%m, %w), lhs_contracting_dims={1}, metadata={op_name="while/transpose(jvp())/dot"}
  ROOT %s = f32[8,8]{1,0} add(%acc, %d), metadata={op_name="OP"}"""


@pytest.mark.parametrize(
    ("op_name", "carried", "remedy"),
    [
        ("transpose(jvp())/while/add_any", "%acc", loop_texts.SUMMED_AFTER),  # of a scan's gradient
        ("while/add", "%old", loop_texts.CARRIED),  # a mean that decays
    ],
)
def test_a_products_factors_may_be_scaled_and_the_sum_may_not(op_name: str, carried: str, remedy: texts.Remedy) -> None:
    hlo = _SCALED.replace("OP", op_name).replace("%acc", carried)
    if carried == "%old":
        hlo = "  %old = f32[8,8]{1,0} multiply(%acc, %rate)\n" + hlo
    opcodes = ("dot", "add", "multiply")
    program = Program().launch("s", {"x": 1, "s": 100}, 100, opcodes=opcodes, repeat=8, hlo=hlo, phase="backward")
    (launch,) = program.launches
    program.launches[0] = replace(
        launch, kind="triton_gemm", inputs=(launch.inputs[0], replace(launch.inputs[1], producer=0))
    )
    assert [missed.remedy for missed in program.rank()] == [text_of(remedy)]


def test_a_product_that_each_step_adds_to_an_array_is_made_after_the_loop() -> None:
    program = Program().launch("d", {"x": 1, "y": 1}, 100, "triton_gemm", opcodes=("dot",), repeat=8)
    program.launch("dw", {"d": 100, "dw": 100}, 100, opcodes=("add",), repeat=8)
    carried = replace(program.launches[1].inputs[1], producer=1)
    program.launches[1] = replace(program.launches[1], inputs=(program.launches[1].inputs[0], carried))
    assert {missed.remedy for missed in program.rank()} == {text_of(loop_texts.SUMMED_AFTER)}


def test_what_the_next_step_computes_with_cannot_be_summed_after_the_loop() -> None:
    """The residual stream of a decoding loop."""
    program = Program().launch("d", {"x": 1, "w": 1}, 100, "triton_gemm", opcodes=("dot",), repeat=8)
    program.launch("x", {"d": 100, "old": 100}, 100, opcodes=("add",), repeat=8)
    first, second = program.launches
    program.launches[1] = replace(second, inputs=(second.inputs[0], replace(second.inputs[1], name="x", producer=1)))
    program.launches[0] = replace(first, inputs=(replace(first.inputs[0], producer=1), first.inputs[1]))
    assert all(missed.remedy != text_of(loop_texts.SUMMED_AFTER) for missed in program.rank())


@pytest.mark.parametrize("is_read", [False, True])
def test_what_a_loops_steps_leave_is_copied_into_a_stack(is_read: bool) -> None:
    """What a scan saves for its backward pass; a cache that the next step reads must be one array."""
    program = Program().launch("h", {"x": 10, "w": 10}, 100, "triton_gemm", repeat=8, computation="body")
    program.launch("s", {"h": 100}, 100, opcodes=("subtract", "dynamic-update-slice"), repeat=8, computation="body")
    program.launches[1] = replace(program.launches[1], flops=1)  # of its index
    if is_read:
        program.launch("y", {"s": 10}, 10, "reduction", opcodes=("reduce",), repeat=8, computation="body")
    (missed,) = (missed for missed in program.rank() if missed.value == "h")
    assert (missed.remedy == text_of(loop_texts.STACKED)) is not is_read


def test_a_stack_beside_the_product_s_reader_changes_no_remedy() -> None:
    program = Program().launch("h", {"x": 10, "w": 10}, 100, "triton_gemm", opcodes=("dot",), repeat=8)
    program.launch("s", {"h": 100}, 100, "copy", opcodes=("dynamic-update-slice",), repeat=8)
    program.launch("y", {"h": 100}, 100, opcodes=("tanh",), repeat=8)
    missed = next(missed for missed in program.rank() if missed.category != categories.SHARED_INPUT)
    assert missed.consumers == (1, 2)
    assert missed.remedy.startswith("linear:")


@pytest.mark.parametrize(
    ("repeat", "limiter", "is_told"),
    [(9, "overhead", True), (1, "overhead", False), (9, "memory", False)],  # a mask as large as that is drawn in place
)
def test_a_loops_random_numbers_are_drawn_before_it(repeat: int, limiter: Any, is_told: bool) -> None:
    program = Program().launch("bits", {"key": 1}, 1, opcodes=("xor",), repeat=repeat, limiter=limiter)
    program.launches[0] = replace(program.launches[0], opcodes=(("xor", 20),))
    (missed,) = program.launch("state", {"bits": 1}, 1, repeat=repeat).rank()
    assert (missed.remedy == loop_texts.DRAWN.text) == is_told


@pytest.mark.parametrize(
    ("stacked", "within", "remedy"),
    [
        (2, "jvp()/while", loop_texts.RECOMPUTED),
        (2, "while", loop_texts.UNROLLED),  # without a gradient nothing reads them again: 3003 launches, by 4 steps 753
        (1, "jvp()/while", texts.MERGE_LOOPS),
    ],
)
def test_what_a_loop_keeps_in_many_stacks_is_computed_again(stacked: int, within: str, remedy: texts.Remedy) -> None:
    program = Program().launch("h", {"x": 1}, 50, repeat=9)
    for number, opcode in enumerate(["dynamic-update-slice"] * stacked + ["tanh"] * (4 - stacked)):
        program.launch(f"s{number}", {"h": 50}, 50, opcodes=(opcode,), repeat=9, op_name=f"jit(f)/{within}/s")
    assert text_of(remedy) in {missed.remedy for missed in program.rank()}


@pytest.mark.parametrize(("weight", "is_known"), [("w", True), ("h", False)])
def test_a_loops_product_of_its_input_goes_before_it(weight: str, is_known: bool) -> None:
    """Not the product of a state that the loop changes."""
    program = Program().launch("h", {"x": 1}, 9, repeat=9)
    program.launch("part", {"stack": 9}, 9, opcodes=("dynamic-slice",), repeat=9)
    program.launch("p", {"part": 9, weight: 9}, 50, "triton_gemm", opcodes=("dot",), repeat=9)
    found = {missed.value: missed.remedy for missed in program.launch("y", {"p": 50}, 50, repeat=9).rank()}
    assert (found["p"] == loop_texts.HOISTED.text) == is_known
