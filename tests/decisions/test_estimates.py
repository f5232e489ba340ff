"""What a remedy is estimated to save: less where other launches still need the value, or what it is made of."""

from __future__ import annotations

from typing import Any

import pytest
from launch_programs import MIB, Program, softmax, text_of

from hlo_analysis.decisions import categories
from hlo_analysis.records import MissedFusion
from hlo_analysis.remedies import loop_texts, texts

STATISTICS: dict[str, Any] = {"opcodes": ("reduce", "multiply")}
NORM = ("reduce", "rsqrt", "multiply")
DOT: dict[str, Any] = {"kind": "triton_gemm", "opcodes": ("dot",)}


def of(program: Program, value: str) -> MissedFusion:
    """The missed fusion of a value that one launch writes."""
    (found,) = (
        missed for missed in program.rank() if missed.value == value and missed.category != categories.SHARED_INPUT
    )
    return found


def test_a_norms_kernel_reads_once_what_another_launch_writes() -> None:
    program = Program().launch("x", {"a": 100, "b": 100}, 100, opcodes=("multiply",))
    program.launch("s", {"x": 100}, 1, "reduction", **STATISTICS)
    program.launch("r", {"s": 1}, 1, opcodes=("rsqrt",)).launch("y", {"x": 100, "r": 1}, 100, opcodes=("multiply",))
    found = of(program, "x")
    assert found.remedy == text_of(texts.RMS_NORM)
    assert found.bytes_at_stake == 100 * MIB  # one read of two, and neither the write nor a launch
    assert found.time_at_stake_us == pytest.approx(100)


@pytest.mark.parametrize("side", ["before", "behind"])
def test_a_norm_that_xla_has_in_one_kernel_names_no_other(side: str) -> None:
    program = Program()
    if side == "before":
        program.launch("h", {"x": 100, "z": 100}, 100, opcodes=("multiply",))
        program.launch("y", {"h": 100}, 100, "triton", opcodes=NORM)
    else:
        program.launch("h", {"x": 100}, 100, "triton", opcodes=NORM).launch("y", {"h": 100, "z": 100}, 100)
    assert of(program, "h").remedy == text_of(texts.ONE_KERNEL)


def test_a_sum_before_a_norm_is_the_kernels_residual() -> None:
    """Also where XLA has the norm in one kernel."""
    program = Program().launch("h", {"x": 100, "z": 100}, 100, opcodes=("add",))
    program.launch("y", {"h": 100}, 100, "triton", opcodes=NORM)
    assert of(program, "h").remedy in (text_of(texts.RMS_NORM), text_of(texts.LAYER_NORM))


def test_a_gradient_that_several_launches_reduce_is_the_norms() -> None:
    """XLA computes the gradient of the input in one kernel and sums the gradient of the scale in another."""
    program = Program().launch("g", {"w": 100, "z": 100}, 100, phase="backward")
    program.launch("dx", {"g": 100, "x": 100}, 100, "triton", opcodes=(*NORM, "subtract"), phase="backward")
    program.launch("db", {"g": 100}, 1, "reduction", opcodes=("reduce",), phase="backward")
    assert of(program, "g").remedy == text_of(texts.LAYER_NORM)
    assert of(program, "g").bytes_at_stake == 100 * MIB


@pytest.mark.parametrize(("inputs", "saved"), [({"a": 50}, 350), ({"a": 100, "b": 100}, 0)])
def test_products_that_do_the_work_before_them_read_what_it_is_made_of(inputs: dict[str, int], saved: int) -> None:
    """Each of three: of one array half as large that pays, of two it does not."""
    program = Program().launch("h", inputs, 100, phase="backward")
    for name in ("p", "q", "r"):
        program.launch(name, {"h": 100, f"w_{name}": 10}, 100, **DOT, phase="backward")
    found = [missed for missed in program.rank() if missed.remedy == text_of(texts.LINEAR_PROLOGUE)]
    # Written once and read three times, less two more readings of the inputs.
    assert [missed.bytes_at_stake for missed in found] == ([300 * MIB] if saved else [])


@pytest.mark.parametrize("is_dependent", [True, False])
def test_an_epilogue_holds_no_reader_that_needs_another(is_dependent: bool) -> None:
    program = Program().launch("p", {"x": 100, "w": 10}, 100, **DOT).launch("a", {"p": 100}, 100, opcodes=("tanh",))
    program.launch("q", {"a" if is_dependent else "v": 100, "u": 10}, 100, **DOT)
    program.launch("b", {"p": 100, "q": 100}, 100, opcodes=("add", "tanh"))
    found = of(program, "p")
    assert found.remedy == text_of(texts.LINEAR_EPILOGUE)
    assert found.bytes_at_stake == (100 if is_dependent else 300) * MIB


def test_what_a_loop_computes_of_arguments_alone_may_precede_it() -> None:
    program = Program().launch("n", {"points": 100}, 10, "reduction", opcodes=("reduce",), flops=1, repeat=8)
    program.launch("d", {"n": 10, "d": 10}, 10, repeat=8)
    found = of(program, "n")
    assert found.remedy == loop_texts.INVARIANT.text
    assert found.bytes_at_stake == 8 * 110 * MIB  # the reader still reads it


@pytest.mark.parametrize(("hlo", "others", "is_kept"), [
    ("ROOT %e = f32[8] exponential(%a)", {"x": 100}, True),
    ("ROOT %e = f32[8] exponential(%a)", {"y": 100}, False),  # the backward pass would have to read x, too
    ("ROOT %e = f32[8] xor(%a, %a)", {"x": 100}, False),  # random bits cost more than their bytes
    ("ROOT %e = f32[] reduce(%a, %zero), dimensions={0}, to_apply=%add", {"x": 100}, False),
])  # fmt: skip
def test_what_the_backward_pass_could_compute_again_need_not_be_kept(
    hlo: str, others: dict[str, int], is_kept: bool
) -> None:
    program = Program().launch("e", {"x": 100}, 100, hlo=hlo, passed={"a": "x"})
    program.launch("g", {"e": 100, **others}, 100, phase="backward")
    found = [missed for missed in program.rank() if missed.category == categories.KEPT]
    assert [missed.remedy for missed in found] == [text_of(texts.CHECKPOINTED)] * is_kept
    assert [missed.bytes_at_stake for missed in found] == [200 * MIB] * is_kept


def test_an_activations_kernel_keeps_the_product_alone() -> None:
    program = Program().launch("p", {"x": 50, "w": 10}, 100, **DOT)
    program.launch("e", {"p": 100}, 100, hlo="ROOT %e = f32[8] exponential(%a)", passed={"a": "p"})
    program.launch("g", {"e": 100, "p": 100}, 100, phase="backward")
    found = next(missed for missed in program.rank() if missed.category == categories.KEPT)
    assert (found.remedy, found.kernel) == (text_of(texts.LINEAR_KEEPS_PRODUCT), "linear")


def test_what_an_attentions_kernel_writes_is_not_transposed() -> None:
    shapes = {"s": "f32[8,4096,4096]", "p": "f32[8,4096,4096]"}
    program = Program().launch("s", {"q": 2, "k": 2}, 100, **DOT).launch("p", {"s": 100}, 100, "triton", **softmax("s"))
    program.launch("o", {"p": 100, "v": 2}, 2, **DOT).launch("t", {"o": 2}, 2, "transpose", opcodes=("transpose",))
    program.launch("y", {"t": 2, "w": 1}, 2, **DOT)
    remedies = {missed.value: missed.remedy for missed in program.rank(shapes)}
    assert remedies["o"] == remedies["t"] == text_of(texts.UNTRANSPOSED_ATTENTION)


def test_a_softmaxs_kernel_keeps_no_exponentials_for_its_gradient() -> None:
    hlo = """%s = f32[8,8] parameter(0)
    %m = f32[8] reduce(%s, %lowest), dimensions={1}, to_apply=%add
    %rows = f32[8,8] broadcast(%m), dimensions={0}
    %d = f32[8,8] subtract(%s, %rows)
    ROOT %e = f32[8,8] exponential(%d)"""
    program = Program().launch("e", {"x": 100}, 100, opcodes=("exponential", "reduce"), hlo=hlo, passed={"s": "x"})
    program.launch("sum", {"e": 100}, 1, "reduction", opcodes=("reduce",))
    program.launch("g", {"e": 100, "sum": 1}, 100, phase="backward")
    found = of(program, "e")
    assert found.remedy == text_of(texts.SOFTMAX)
    assert found.bytes_at_stake == 200 * MIB  # written, and read for the sum; its gradient reads x in its place
