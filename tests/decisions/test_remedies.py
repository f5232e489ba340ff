"""The remedy of a missed fusion, by what stands on both ends: gates, copies, split sums, loops."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from launch_programs import MIB, Program, text_of

from hlo_analysis.decisions import categories
from hlo_analysis.records import Intermediate, Value
from hlo_analysis.remedies import loop_texts, texts


@pytest.mark.parametrize(("opcode", "remedy"), [("pad", "have the operation work"), ("transpose", "keep images and")])
def test_what_is_padded_or_transposed_for_a_convolution(opcode: str, remedy: str) -> None:
    conv = '%c = bf16[8] custom-call(%a, %w), custom_call_target="__cudnn$convForward"'
    program = Program().launch("a", {"x": 100}, 100, opcodes=(opcode,)).launch("c", {"a": 100}, 100, "cudnn", hlo=conv)
    assert program.rank()[0].remedy.startswith(remedy)


def test_a_copy_costs_its_own_traffic_and_has_a_remedy_by_whose_buffer_it_is() -> None:
    program = Program().launch("c", {"x": 100}, 100, "copy", opcodes=("copy",)).launch("b", {"c": 100}, 1)
    program.launch("d", {"c": 100}, 1, phase="backward").decide(0, 1, categories.INSERTED)
    (missed,) = (missed for missed in program.rank() if missed.value == "c")
    assert missed.bytes_at_stake == 200 * MIB
    assert missed.remedy.startswith("donate the argument")
    (missed,) = (missed for missed in program.rank(donated={"x"}) if missed.value == "c")
    assert missed.remedy.startswith("let nothing read the value after its update")


@pytest.mark.parametrize(
    ("sums", "remedy"),
    [("te,edf->tf", "xla_gpu_experimental_force_split_k=1"), ("reduce_sum", "linear: the work after the product")],
    ids=["XLA's", "the program's"],
)
def test_parts_of_a_split_sum_are_an_option_away_and_batches_that_the_program_sums_are_not(
    sums: str, remedy: str
) -> None:
    dot = (
        '%dot = f32[8,64,64] dot(%a, %b), lhs_batch_dims={1}, lhs_contracting_dims={2}, metadata={op_name="te,edf->tf"}'
    )
    add = f'%r = f32[64,64] reduce(%p, %z), dimensions={{0}}, to_apply=%add, metadata={{op_name="{sums}"}}'
    program = Program().launch("p", {"x": 10, "w": 10}, 80, "triton_gemm", hlo=dot)
    (missed,) = program.launch("r", {"p": 80}, 10, opcodes=("reduce",), hlo=add).rank()
    assert missed.remedy.startswith(remedy)


@pytest.mark.parametrize(("axis", "remedy"), [(0, "batch_norm:"), (1, "layer_norm:")])
def test_a_normalization_over_columns_is_of_the_batch(axis: int, remedy: str) -> None:
    sums = (
        f"%x = f32[64,128]{{1,0}} parameter(0)\n %r = f32[64] reduce(%x, %zero), dimensions={{{axis}}}, to_apply=%add"
    )
    program = Program().launch("c", {"x": 100}, 100, "cudnn").launch("s", {"c": 100}, 1, opcodes=("reduce",), hlo=sums)
    program.launch("y", {"c": 100, "s": 1}, 100, opcodes=("subtract", "rsqrt"))
    (missed,) = (missed for missed in program.rank() if missed.value == "c")
    assert missed.remedy.startswith(remedy)


def test_what_makes_a_loops_next_state_from_the_last_is_copied_in_place() -> None:
    program = Program().launch("p", {"w": 10}, 10, computation="body", repeat=9)
    program.launch("c", {"p": 10}, 10, "copy", opcodes=("copy",), computation="body", repeat=9)
    state = Value(name="c", shape="f32[10]", bytes=10 * MIB, producer=1)
    program.launches[0] = replace(program.launches[0], inputs=(*program.launches[0].inputs, state))
    (missed,) = program.decide(0, 1, categories.INSERTED).rank()
    assert missed.remedy == text_of(loop_texts.STATE)


def test_what_a_loop_carries() -> None:
    program = Program().launch("s", {"s": 10}, 10, computation="body", repeat=9)
    state = replace(program.launches[0].inputs[0], producer=0)
    program.launches[0] = replace(program.launches[0], inputs=(state,))
    (missed,) = program.rank()
    assert missed.remedy == text_of(loop_texts.CARRIED)


def test_what_xla_joins_for_one_sum_over_devices_is_an_option_away() -> None:
    program = Program().launch("a", {"x": 10}, 10).launch("b", {"y": 10}, 10)
    program.launch("j", {"a": 10, "b": 10}, 20, opcodes=("concatenate",), op_name="")
    program.launch("sum", {"j": 20}, 20, "collective", opcodes=("all-reduce",), op_name="psum")
    program.launch("s", {"sum": 20}, 10, "copy", opcodes=("slice",), op_name="psum")
    program.launch("z", {"s": 10}, 10).decide(4, 5, categories.INSERTED)
    remedies = {missed.value: missed.remedy for missed in program.rank()}
    assert all(remedies[value].startswith("xla_gpu_all_reduce_combine") for value in ("a", "b", "s"))


def test_a_cast_far_from_a_librarys_product_is_no_fallback() -> None:
    (missed,) = Program().launch("c", {"x": 50}, 100, opcodes=("convert",)).launch("a", {"c": 100}, 100).rank()
    assert missed.remedy == text_of(texts.ONE_KERNEL)


@pytest.mark.parametrize("opcodes", [("scatter", "iota"), ("scatter",)])
def test_the_gradient_of_a_pick_from_each_row_is_a_mask(opcodes: tuple[str, ...]) -> None:
    """As of jnp.take_along_axis. Indices of a table do not count its rows, and no cheap mask tells them."""
    program = Program().launch("zeros", {}, 800, opcodes=("broadcast",), phase="backward")
    program.launch("u", {"zeros": 1, "i": 1}, 800, "scatter", opcodes=opcodes, phase="backward")
    program.launch("y", {"u": 800}, 400, opcodes=("multiply",), phase="backward")
    program.launches[1] = replace(program.launches[1], bytes_written=MIB)
    found = [missed for missed in program.rank() if missed.remedy.startswith("pick by a mask")]
    assert [(missed.value, missed.consumers) for missed in found] == ([("zeros", (2,))] if "iota" in opcodes else [])


def test_a_norm_before_a_product_is_not_of_the_rows_after_it() -> None:
    program = Program().launch("root", {"x": 8}, 1, opcodes=("rsqrt", "reduce", "subtract"), phase="backward")
    program.launch("p", {"root": 1, "w": 1}, 1, "triton_gemm", opcodes=("dot",), phase="backward")
    program.launch("a", {"p": 1, "y": 100}, 100, opcodes=("multiply",), phase="backward")
    program.launch("s", {"a": 100, "p": 1}, 1, "reduction", opcodes=("reduce", "subtract"), phase="backward")
    remedy = next(missed.remedy for missed in program.rank() if missed.value == "a")
    assert remedy == text_of(texts.ONE_KERNEL)


def test_what_an_iteration_hands_the_next_cannot_leave_the_loop() -> None:
    program = Program().launch("r", {"h": 10}, 10, computation="body", repeat=9)
    program.launch("h", {"r": 10}, 10, computation="body", repeat=9)
    between = Intermediate(name="h", shape="f32[10]", bytes=10 * MIB, producer=1, consumers=(0,), bytes_moved=180 * MIB)
    (missed,) = program.decide(1, 0, categories.BOUNDARY).rank_of(between)
    assert missed.remedy.startswith("unroll the loop")


def test_what_a_loop_copies_out_of_a_stack_is_to_be_kept_apart() -> None:
    program = Program().launch("w", {"stack": 10}, 10, "copy", opcodes=("dynamic-slice", "subtract"), repeat=9)
    (missed,) = program.launch("p", {"w": 10}, 10, "triton_gemm", opcodes=("dot",), repeat=9).rank()
    assert missed.remedy.startswith("keep the parts apart")


@pytest.mark.parametrize(("high", "is_rotation"), [("add(%bc, %as)", True), ("add(%b, %as)", False)])
def test_a_rotation_that_is_joined_later_has_a_kernel(high: str, is_rotation: bool) -> None:
    hlo = f"""%a = f32[8,8] parameter(0)
    %b = f32[8,8] parameter(1)
    %c = f32[8,8] parameter(2)
    %s = f32[8,8] parameter(3)
    %ac = f32[8,8] multiply(%a, %c)
    %bs = f32[8,8] multiply(%b, %s)
    %bc = f32[8,8] multiply(%b, %c)
    %as = f32[8,8] multiply(%a, %s)
    %low = f32[8,8] subtract(%ac, %bs)
    %high = f32[8,8] {high}
    ROOT %t = (f32[8,8], f32[8,8]) tuple(%low, %high)"""
    opcodes = ("multiply", "subtract", "add")
    passed = {"a": "x", "b": "x", "c": "angles", "s": "angles"}
    ranked = (
        Program()
        .launch("angles", {"p": 1}, 8, opcodes=("cosine", "sine"))
        .launch("r", {"x": 16, "angles": 8}, 16, opcodes=opcodes, hlo=hlo, passed=passed)
        .launch("y", {"r": 16}, 16, opcodes=("concatenate",))
        .rank()
    )
    told = {missed.value: missed.remedy.startswith("rope: both halves") for missed in ranked}
    assert told == {"r": is_rotation, "angles": is_rotation}


def test_a_triangular_solve_is_no_product() -> None:
    solve = '%s = f32[8,8] custom-call(%a, %b), custom_call_target="__cublas$triangularSolve"'
    program = Program().launch("a", {"x": 10}, 10, opcodes=("tanh",)).launch("s", {"a": 10}, 10, "cublas", hlo=solve)
    (missed,) = program.rank()
    assert missed.remedy == text_of(texts.OWN_KERNEL)


def test_products_that_share_an_input_read_it_anew() -> None:
    program = Program().launch("h", {"x": 100}, 100, opcodes=("rsqrt", "reduce"))
    program.launch("g", {"h": 100, "wg": 50}, 40, "triton_gemm").launch("u", {"h": 100, "wu": 50}, 40, "cublaslt")
    assert all(missed.category != categories.SHARED_INPUT for missed in program.rank())


def test_two_halves_of_one_product_are_a_gate_and_an_activation_alone_is_not() -> None:
    def remedy(*opcodes: str, hlo: str = "") -> str:
        program = Program().launch("g", {"h": 10, "w": 50}, 400, "triton_gemm").launch("r", {"x": 400}, 400)
        program.launch("m", {"g": 400, "r": 400}, 400, opcodes=opcodes, hlo=hlo, passed={"a": "g", "b": "r"})
        return next(missed.remedy for missed in program.rank() if missed.value == "g")

    assert remedy("multiply", "exponential", "slice").startswith("gated_linear:")
    assert remedy("multiply", "tanh", "add").startswith("linear:")
    key = "%first = u32[1]{0} slice(%key), slice={[0:1]}"  # of an activation's dropout
    assert remedy("multiply", "tanh", "slice", hlo=key).startswith("linear:")
    column = "%last = f32[100]{0} slice(%g), slice={[0:1]}"  # of 400: what a radiance field gives beside three colours
    assert remedy("multiply", "exponential", "slice", hlo=column).startswith("linear:")
    decay = "%a = f32[400]{0} parameter(0)\n%b = f32[400]{0} parameter(1)\n"
    for name, remedied in (("%a", "gated_linear:"), ("%b", "linear:")):  # what is activated: the product, or a decay
        hlo = f"{decay}%half = f32[200]{{0}} slice(%a), slice={{[0:200]}}\n%e = f32[400]{{0}} exponential({name})\n"
        assert remedy("multiply", "exponential", "slice", hlo=hlo).startswith(remedied)
    half = "%gate = f32[200]{0} slice(%g), slice={[0:200]}"
    assert remedy("multiply", "exponential", "slice", hlo=half).startswith("gated_linear:")


@pytest.mark.parametrize(
    ("producer", "reader", "category", "kind", "remedy"),
    [
        (("loop", ("rsqrt",)), ("triton_gemm", ("dot",)), categories.MATRIX_PRODUCT, "kernel", "norm_linear:"),
        (("loop", ("tanh",)), ("triton_gemm", ("dot",)), categories.MATRIX_PRODUCT, "kernel", "write a kernel"),
        (("triton_gemm", ("dot",)), ("loop", ("add",)), categories.MATRIX_PRODUCT, "kernel", "linear:"),
        (("reduction", ("reduce",)), ("loop", ("rsqrt",)), categories.AFTER_REDUCTION, "kernel", "rms_norm:"),
        (("reduction", ("reduce",)), ("loop", ("rsqrt", "subtract")), categories.SLOWER, "kernel", "layer_norm:"),
        (("reduction", ("reduce",)), ("loop", ("exponential",)), categories.SLOWER, "kernel", "softmax:"),
        (("loop", ("transpose",)), ("triton_gemm", ("dot",)), categories.TILING, "rewrite", "give the operation"),
        (("loop", ("pad",)), ("cudnn", ()), categories.LIBRARY_CALL, "rewrite", "have the operation work on the part"),
        (("copy", ("copy",)), ("loop", ("add",)), categories.INSERTED, "rewrite", "donate"),
        (("triton_gemm", ("dot",)), ("collective", ("all-reduce",)), categories.TILING, "rewrite", "cut the work"),
        (("collective", ("all-reduce",)), ("copy", ("slice",)), categories.INSERTED, "option", "xla_gpu_all_reduce"),
        (("loop", ("convert",)), ("cublaslt", ()), categories.LIBRARY_CALL, "option", "xla_gpu_cublas_fallback"),
        (("loop", ("add",)), ("loop", ("add",)), categories.SWITCHED_OFF, "option", "leave XLA's fusion passes on"),
        (("loop", ("add",)), ("loop", ("add",)), categories.OTHER_RULE, "kernel", "write a kernel"),
    ],
)
def test_remedies(producer: Any, reader: Any, category: str, kind: str, remedy: str) -> None:
    program = Program().launch("a", {"x": 100}, 100, producer[0], opcodes=producer[1])
    (missed,) = program.launch("b", {"a": 100}, 100, reader[0], opcodes=reader[1]).decide(0, 1, category).rank()
    assert missed.category == category
    assert missed.remedy_kind == kind
    assert missed.remedy.startswith(remedy)
