"""The remedy of a missed fusion, by what stands on both ends: gates, copies, split sums, loops."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from launch_programs import DEVICE, MIB, Program, text_of

from hlo_analysis.decisions import categories
from hlo_analysis.missed import rank
from hlo_analysis.records import Intermediate, Value
from hlo_analysis.remedies import texts


@pytest.mark.parametrize(("opcode", "remedy"), [("pad", "pad both sides equally"), ("transpose", "keep images and")])
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
    assert missed.remedy.startswith("the argument is donated")


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


@pytest.mark.parametrize(
    ("repeat", "op_name", "remedy"),
    [
        (9, "jit(f)/while/body/dot", "unroll the loop by two"),
        (1, "jit(f)/while/body/dot", "take two steps in the loop's body"),
        (9, "jit(f)/jit(searchsorted)/while/body/select_n", "jnp.searchsorted(..., method='scan_unrolled')"),
    ],
)
def test_what_makes_a_loops_next_state_from_the_last_is_copied_in_place(repeat: int, op_name: str, remedy: str) -> None:
    """A loop whose count is not known before it runs counts once, and JAX cannot unroll it."""
    program = Program().launch("p", {"w": 10}, 10, computation="body", repeat=repeat, op_name=op_name)
    program.launch("c", {"p": 10}, 10, "copy", opcodes=("copy",), computation="body", repeat=repeat)
    state = Value(name="c", shape="f32[10]", bytes=10 * MIB, producer=1)
    program.launches[0] = replace(program.launches[0], inputs=(*program.launches[0].inputs, state))
    (missed,) = program.decide(0, 1, categories.INSERTED).rank()
    assert missed.remedy.startswith(remedy)


@pytest.mark.parametrize(("repeat", "remedy"), [(9, "unroll the loop by two"), (1, "take several steps in the loop")])
def test_what_a_loop_carries(repeat: int, remedy: str) -> None:
    program = Program().launch("s", {"s": 10}, 10, computation="body", repeat=repeat)
    state = replace(program.launches[0].inputs[0], producer=0)
    program.launches[0] = replace(program.launches[0], inputs=(state,))
    (missed,) = program.rank()
    assert missed.remedy.startswith(remedy)


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


def test_rows_that_are_put_in_order_are_better_gathered_than_scattered() -> None:
    def remedy(op_name: str) -> str:
        program = Program().launch("s", {"x": 100, "i": 1}, 100, "scatter", opcodes=("scatter",), op_name=op_name)
        return (
            program.launch("y", {"s": 100}, 50, opcodes=("reduce",)).decide(0, 1, categories.IN_PLACE).rank()[0].remedy
        )

    assert remedy("jit(f)/scatter").startswith("gather in place of")
    assert remedy("jit(f)/scatter-add") == text_of(texts.ONE_KERNEL)


@pytest.mark.parametrize(("phase", "is_told"), [("forward", True), ("backward", False)])
def test_rows_are_gathered_after_the_product_where_no_gradient_is_taken(phase: Any, is_told: bool) -> None:
    """A graph network's gradient was slower so: it then scatters what it gathers."""
    program = Program().launch("g", {"nodes": 10, "i": 1}, 100, opcodes=("gather",))
    program.launch("p", {"g": 100, "w": 1}, 100, "triton_gemm", opcodes=("dot",))
    program.launch("dw", {"p": 100, "dy": 100}, 1, "triton_gemm", opcodes=("dot",), phase=phase)
    remedy = next(missed.remedy for missed in program.rank() if missed.value == "g")
    assert remedy.startswith("multiply first") == is_told


def test_parts_that_are_computed_cannot_be_one_array_from_the_start() -> None:
    """As the halves of a rotary embedding, or the keys of random numbers."""
    program = Program().launch("a", {"x": 100}, 100, opcodes=("multiply",))
    program.launch("c", {"a": 100, "b": 100}, 200, opcodes=("concatenate",))
    assert not any(missed.remedy == text_of(texts.JOINED) for missed in program.rank())


def test_a_norm_before_a_product_is_not_of_the_rows_after_it() -> None:
    program = Program().launch("root", {"x": 8}, 1, opcodes=("rsqrt", "reduce", "subtract"), phase="backward")
    program.launch("p", {"root": 1, "w": 1}, 1, "triton_gemm", opcodes=("dot",), phase="backward")
    program.launch("a", {"p": 1, "y": 100}, 100, opcodes=("multiply",), phase="backward")
    program.launch("s", {"a": 100, "p": 1}, 1, "reduction", opcodes=("reduce", "subtract"), phase="backward")
    remedy = next(missed.remedy for missed in program.rank() if missed.value == "a")
    assert remedy == text_of(texts.ONE_KERNEL)


def test_the_steps_of_one_reduction_are_told_by_their_name() -> None:
    def remedy(first: str, second: str, read: int = 900) -> str:
        hlo = '%r = f32[8]{{0}} reduce(%a, %b), dimensions={{0}}, to_apply=%add, metadata={{op_name="{}"}}'
        program = Program().launch("a", {"x": read}, 50, "reduction", opcodes=("reduce",), hlo=hlo.format(first))
        program.launch("b", {"a": 50}, 1, "reduction", opcodes=("reduce",), hlo=hlo.format(second))
        return program.rank()[0].remedy

    assert remedy("f/reduce_sum", "f/reduce_sum") == text_of(texts.TWO_STEPS)
    assert remedy("f/reduce_sum", "g/reduce_sum") == text_of(texts.ONE_KERNEL)
    assert remedy("f/reduce_sum", "f/reduce_sum", read=100) == text_of(texts.ONE_KERNEL)  # no sums are handed


def test_what_a_product_is_only_converted_to_it_could_have_written() -> None:
    program = Program().launch("p", {"x": 50, "w": 10}, 50, "triton_gemm", opcodes=("dot",))
    assert (
        program.launch("c", {"p": 50}, 100, opcodes=("convert",)).rank()[0].remedy.startswith("have the product write")
    )


def test_of_what_is_sorted_a_small_part_is_taken() -> None:
    def remedy(read: int) -> str:
        program = Program().launch("s", {"x": 100}, 100, "sort", opcodes=("sort",))
        program.launch("y", {"s": 100}, 1, opcodes=("slice", "add"))
        program.launches[1] = replace(program.launches[1], bytes_read=read * MIB)
        return program.rank()[0].remedy

    assert remedy(1) == text_of(texts.TOP_K)
    assert remedy(100) == text_of(texts.ONE_KERNEL)


@pytest.mark.parametrize("read", [800, 1])
def test_an_array_that_is_made_updated_in_place_and_read_need_not_be_written_before(read: int) -> None:
    """As the gradient of a loss by take_along_axis. Zeros that a sum is made in are no such array."""
    program = Program().launch("d", {"x": read}, 800).launch("u", {"d": 1, "i": 1}, 800, "scatter")
    program.launch("y", {"u": 800}, 400, opcodes=("convert",))
    program.launches[1] = replace(program.launches[1], bytes_written=MIB)
    found = [missed for missed in program.rank() if missed.remedy.startswith("make the update a part")]
    assert len(found) == (read == 800)
    for missed in found:
        assert (missed.value, missed.producer, missed.consumers) == ("d", 0, (2,))
        assert missed.bytes_at_stake == 1600 * MIB
        assert "in place" in missed.reason


def test_what_an_iteration_hands_the_next_cannot_leave_the_loop() -> None:
    program = Program().launch("r", {"h": 10}, 10, computation="body", repeat=9)
    program.launch("h", {"r": 10}, 10, computation="body", repeat=9)
    between = Intermediate(name="h", shape="f32[10]", bytes=10 * MIB, producer=1, consumers=(0,), bytes_moved=180 * MIB)
    (missed,) = rank(program.launches, [between], program.decide(1, 0, categories.BOUNDARY).decisions, DEVICE)
    assert missed.remedy.startswith("unroll the loop")


def test_what_a_loop_copies_out_of_a_stack_is_to_be_kept_apart() -> None:
    program = Program().launch("w", {"stack": 10}, 10, "copy", opcodes=("dynamic-slice", "subtract"), repeat=9)
    (missed,) = program.launch("p", {"w": 10}, 10, "triton_gemm", opcodes=("dot",), repeat=9).rank()
    assert missed.remedy.startswith("keep the parts apart")


def test_a_one_hot_matrix_is_an_index() -> None:
    def remedy(read: int) -> str:
        program = Program().launch("hot", {"ids": read}, 800, opcodes=("iota", "compare", "select"))
        program.launch("p", {"hot": 800, "w": 80}, 8, "triton_gemm", opcodes=("dot",))
        return program.rank()[0].remedy

    assert remedy(1).startswith("take the rows by their indices")
    assert remedy(800) == text_of(texts.LINEAR_PROLOGUE)  # the lower triangle of an array


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


def test_products_with_a_shared_input_can_be_merged_by_an_option() -> None:
    program = (
        Program()
        .launch("h", {"x": 100}, 100, opcodes=("rsqrt", "reduce"))
        .launch("g", {"h": 100, "wg": 50}, 40, "triton_gemm", shape="bf16[128,64]")
        .launch("u", {"h": 100, "wu": 50}, 40, "cublaslt", shape="bf16[128,32]")
        .launch("d", {"h": 100, "g": 40}, 40, "triton_gemm", shape="bf16[7,9]")
    )
    (shared,) = (missed for missed in program.rank() if missed.category == categories.SHARED_INPUT)
    assert shared.consumers == (1, 2)
    assert shared.bytes_at_stake == 100 * MIB
    assert shared.remedy_kind == "option"
    assert shared.remedy.startswith("xla_gpu_dot_merger_threshold_mb=")


@pytest.mark.parametrize(("kind", "remedy"), [("copy", texts.UNCHANGED), ("loop", texts.MERGE_LOOPS)])
def test_constants_that_are_returned_are_copied(kind: Any, remedy: Any) -> None:
    """Adafactor keeps one zero in place of what a weight has no use for."""
    program = Program()
    for name in ("a", "b", "c"):
        program.launch(name, {"constant_26_0": 1}, 1, kind, opcodes=("copy",))
    (shared,) = program.rank(outputs=("a", "b", "c"))
    assert shared.remedy == text_of(remedy)


def test_gradients_of_a_product_sum_over_different_axes_of_what_they_share() -> None:
    """dx = dy wᵀ sums over the columns of dy, dw = xᵀ dy over its rows: no one product makes both."""
    program = (
        Program()
        .launch("dx", {"dy": 100, "w": 50}, 40, "triton_gemm", shape="bf16[4096,512]", flops=2 * 4096 * 512 * 512)
        .launch("dw", {"dy": 100, "x": 50}, 40, "triton_gemm", shape="bf16[512,512]", flops=2 * 4096 * 512 * 512)
    )
    assert all(missed.category != categories.SHARED_INPUT for missed in program.rank())


def test_products_merge_if_they_sum_over_the_same_axis_of_the_same_factor() -> None:
    def rank_two(first: str, second: str) -> list[str]:
        hlo = "%a = f32[8,8]{{1,0}} parameter(0)\n%b = f32[8,8]{{1,0}} parameter(1)\n"
        hlo += "%c = f32[8,8]{{1,0}} divide(%a, %t)\n%d = f32[8,8]{{1,0}} dot({dot}"
        program = Program().launch("h", {"x": 100}, 100)
        for name, dot in (("p", first), ("q", second)):
            reads = {"h": 100, f"w{name}": 50}
            passed = {"a": "h", "b": f"w{name}"}
            text = hlo.format(dot=dot)
            program.launch(name, reads, 40, "triton_gemm", shape="bf16[8,8]", flops=1024, hlo=text, passed=passed)
        return [missed.value for missed in program.rank() if missed.category == categories.SHARED_INPUT]

    rows = "%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}"
    columns = "%a, %b), lhs_contracting_dims={0}, rhs_contracting_dims={0}"
    other_side = "%b, %a), lhs_contracting_dims={1}, rhs_contracting_dims={1}"
    scaled = "%c, %b), lhs_contracting_dims={0}, rhs_contracting_dims={0}"
    assert rank_two(rows, rows) == rank_two(columns, scaled) == ["h"]
    assert rank_two(rows, scaled) == []  # both gradients of scores that a temperature divides
    assert rank_two(rows, columns) == rank_two(rows, other_side) == []


def test_products_of_other_rows_and_columns_cannot_be_merged() -> None:
    program = (
        Program()
        .launch("h", {"x": 100}, 100)
        .launch("g", {"h": 100, "w": 50}, 40, "triton_gemm", shape="bf16[128,64]")
        .launch("u", {"h": 100, "y": 50}, 40, "triton_gemm", shape="bf16[64,32]")
    )
    assert all(missed.category != categories.SHARED_INPUT for missed in program.rank())


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
        (
            ("concatenate", ("concatenate",)),
            ("cublaslt", ()),
            categories.LIBRARY_CALL,
            "rewrite",
            "keep the parts in one",
        ),
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
