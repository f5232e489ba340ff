"""Signs by which a remedy is chosen: programs that look alike and want something else."""

from __future__ import annotations

import pytest
from launch_programs import Program, softmax, text_of

from hlo_analysis.patterns.launch_patterns import fills, only_moves, strides_by_two
from hlo_analysis.remedies import texts

EVERY_OTHER = "%s = f32[8] slice(%x), slice={[0:4:1], [1:2048:2]}"


def test_attention_of_short_sequences_has_scores_hardly_larger_than_what_they_are_made_of() -> None:
    """As 197 patches with heads of 64 in float32."""
    program = (
        Program()
        .launch("s", {"q": 26, "k": 26}, 79, "triton_gemm", opcodes=("dot",))
        .launch("p", {"s": 79}, 79, "triton", **softmax("s"))
        .launch("o", {"p": 79, "v": 26}, 26, "triton_gemm", opcodes=("dot",))
    )
    assert all(missed.remedy.startswith("attention:") for missed in program.rank())


SUM = "%r = f32[8] reduce(%e, %zero), dimensions={1}, to_apply=%add"


def test_a_single_query_makes_its_scores_in_reductions() -> None:
    shifted = "%s = f32[8,8] parameter(0)\n%m = f32[8] parameter(1)\n%b = f32[8,8] broadcast(%m), dimensions={0}\n"
    shifted += "%d = f32[8,8] subtract(%s, %b)\n%e = f32[8,8] exponential(%d)"
    passed = {"s": "s", "m": "max"}
    program = (
        Program()
        .launch("s", {"q": 1, "keys": 500}, 8, "reduction", opcodes=("multiply", "reduce"))
        .launch("max", {"s": 8}, 1, "reduction", opcodes=("multiply", "reduce"))
        .launch("e", {"s": 8, "max": 1}, 8, opcodes=("exponential", "subtract"), hlo=shifted, passed=passed)
        .launch("sum", {"e": 8}, 1, "reduction", opcodes=("reduce",), hlo=SUM)
        .launch("p", {"e": 8, "sum": 1}, 8, opcodes=("divide",))
        .launch("o", {"p": 8, "values": 500}, 1, "reduction", opcodes=("multiply", "reduce"))
    )
    remedies = {missed.value: missed.remedy for missed in program.rank()}
    assert remedies["e"].startswith("attention:")
    assert not any(remedies.get(value, "").startswith("attention:") for value in ("max", "sum"))


def test_the_weights_of_a_router_are_no_scores() -> None:
    dot = "%r = f32[8,8] dot(%x, %w), lhs_contracting_dims={1}, rhs_contracting_dims={0}"
    program = (
        Program()
        .launch("r", {"x": 400, "w": 1}, 10, "triton_gemm", opcodes=("dot",), hlo=dot)
        .launch("p", {"r": 10}, 10, "triton", **softmax("r"))
        .launch("y", {"p": 10, "e": 400}, 400, "triton_gemm", opcodes=("dot",))
    )
    assert not any(missed.remedy.startswith("attention:") for missed in program.rank())


@pytest.mark.parametrize(
    ("hlo", "remedy"),
    [
        ("%b = f32[8] broadcast(%m)\n%d = f32[8] subtract(%x, %b)\n%e = f32[8] exponential(%d)", "softmax:"),
        (
            "%b = f32[8] broadcast(%m)\n%s = bf16[8] subtract(%x, %b)\n%d = f32[8] convert(%s)\n"
            "%e = f32[8] exponential(%d)",
            "softmax:",
        ),
        ("%d = f32[8] subtract(%x, %y)\n%e = f32[8] exponential(%d)", "write a kernel"),
        ("%d = f32[8] negate(%x)\n%e = f32[8] exponential(%d)", "write a kernel"),
    ],
    ids=["softmax", "cast", "softplus", "sigmoid"],
)
def test_a_softmax_takes_what_is_left_of_a_rows_largest_value(hlo: str, remedy: str) -> None:
    program = Program().launch("e", {"x": 100}, 100, opcodes=("exponential", "subtract", "broadcast"), hlo=hlo)
    (missed,) = program.launch("sum", {"e": 100}, 1, "reduction", opcodes=("reduce",)).rank()
    assert missed.remedy.startswith(remedy)


def test_levels_of_an_associative_scan_want_a_kernel_that_scans() -> None:
    program = Program().launch("a", {"x": 100}, 50, opcodes=("slice", "multiply"), hlo=EVERY_OTHER)
    (missed,) = program.launch("b", {"a": 50}, 25, opcodes=("slice", "multiply"), hlo=EVERY_OTHER).rank()
    assert "lax.associative_scan" in missed.remedy


@pytest.mark.parametrize(
    ("hlo", "taken"),
    [
        (EVERY_OTHER, True),
        ("%p = f32[9,9] pad(%x, %z), padding=0_0x0_0_1", True),
        ("%s = f32[2,1] slice(%x), slice={[0:2:1], [1:2:1]}", False),
        ("%s = f32[2,1] slice(%x), slice={[0:2], [1:2]}", False),
        ("%p = f32[9,9] pad(%x, %z), padding=0_1x1_1", False),
    ],
)
def test_every_other(hlo: str, taken: bool) -> None:
    assert strides_by_two(Program().launch("a", {}, 1, hlo=hlo).launches[0]) == taken


def test_zeros_to_add_to_are_no_move_and_could_be_an_array_that_is_there() -> None:
    program = Program().launch("zeros", {}, 100, opcodes=("broadcast", "copy"))
    program.launch("y", {"zeros": 100, "u": 100}, 100, "scatter", opcodes=("scatter",))
    assert fills(program.launches[0])
    assert not only_moves(program.launches[0])
    (missed,) = program.rank()
    assert missed.remedy.startswith("add into an array that exists anyway")


def test_a_loops_product_of_a_part_and_of_what_does_not_change_leaves_the_loop() -> None:
    def remedy(weight: str) -> str:
        program = Program().launch("w", {"h": 1}, 1, repeat=9, computation="body")
        program.launch("part", {"stack": 10}, 10, "copy", opcodes=("dynamic-slice",), repeat=9, computation="body")
        reads = {"part": 10, weight: 1}
        program.launch("p", reads, 10, "triton_gemm", opcodes=("dot",), repeat=9, computation="body")
        return next(missed.remedy for missed in program.rank() if missed.value == "part")

    assert remedy("wx").startswith("take the product out of the loop")
    assert remedy("w").startswith("keep the parts apart")


def test_groups_of_rows_want_a_grouped_product() -> None:
    program = Program().launch("rows", {"x": 10}, 80, opcodes=("compare", "iota", "select"))
    (missed,) = program.launch(
        "y", {"rows": 80, "w": 80}, 10, "triton_gemm", opcodes=("dot",), op_name="f/ragged_dot_general"
    ).rank()
    assert missed.kernel == "grouped_linear"


def test_two_products_in_a_row_are_no_epilogue() -> None:
    program = Program().launch("o", {"p": 10, "v": 10}, 10, "triton_gemm", opcodes=("dot",))
    (missed,) = program.launch("y", {"o": 10, "w": 10}, 10, "loop", opcodes=("dot",)).rank()
    assert missed.remedy == text_of(texts.ONE_KERNEL)


def test_the_gates_of_a_recurrent_cell_are_no_gated_product() -> None:
    program = Program().launch("zx", {"x": 10, "wx": 10}, 40, "triton_gemm", opcodes=("dot",))
    program.launch("zh", {"h": 10, "wh": 10}, 40, "triton_gemm", opcodes=("dot",))
    program.launch("c", {"zx": 40, "zh": 40, "s": 10}, 10, opcodes=("slice", "exponential", "tanh", "multiply"))
    assert not any(missed.remedy.startswith("gated_linear:") for missed in program.rank())


def test_sums_of_columns_that_are_summed_again_are_those_of_groups() -> None:
    columns = "%x = f32[8,64,128]{2,1,0} parameter(0)\n%r = f32[8,128] reduce(%x, %z), dimensions={1}, to_apply=%add"
    rows = "%x = f32[8,32,4]{2,1,0} parameter(0)\n%r = f32[8,32] reduce(%x, %z), dimensions={2}, to_apply=%add"

    def remedy(second: str) -> str:
        program = Program().launch("y", {"x": 100}, 100, "cudnn")
        program.launch("s", {"y": 100}, 1, "reduction", opcodes=("reduce",), hlo=columns)
        program.launch("t", {"s": 1}, 1, "reduction", opcodes=("reduce",), hlo=second)
        program.launch("m", {"t": 1}, 1, opcodes=("rsqrt",))
        program.launch("n", {"y": 100, "m": 1}, 100, opcodes=("subtract", "multiply"))
        return next(missed.remedy for missed in program.rank() if missed.value == "y")

    assert remedy(rows) == text_of(texts.GROUP_NORM)
    assert remedy(columns).startswith("batch_norm:")


def test_parts_of_a_split_sum_are_not_those_of_a_softmax() -> None:
    """The gates of a recurrent cell: parts of a product are added up, a sigmoid follows, then a product."""
    dot = '%d = f32[4,64,64] dot(%a, %b), lhs_batch_dims={0}, metadata={op_name="f/dot"}'
    add = '%r = f32[64,64] reduce(%d, %z), dimensions={0}, metadata={op_name="f/dot"}'
    program = Program().launch("g", {"h": 10, "w": 10}, 100, "triton_gemm", opcodes=("dot",), hlo=dot)
    program.launch("c", {"g": 100}, 90, opcodes=("exponential", "reduce"), hlo=add)
    program.launch("y", {"c": 90, "v": 10}, 10, "triton_gemm", opcodes=("dot",))
    assert not any(missed.remedy.startswith("attention:") for missed in program.rank())


@pytest.mark.parametrize(
    ("steps", "is_score"),
    [
        ("%k = f32[8,8] multiply(%p, %keep)\n%y = bf16[8,8] convert(%k)", True),  # dropout
        ("%y = f32[8,8] subtract(%p, %labels)", False),  # the gradient of a loss that is computed again
        ("%one = f32[8,8] subtract(%p, %ones)\n%y = f32[8,8] select(%is_label, %one, %p)", False),
    ],
)
def test_probabilities_are_scaled_and_not_added_to_anything(steps: str, is_score: bool) -> None:
    program = Program().launch("s", {"q": 10, "k": 10}, 100, "triton_gemm", opcodes=("dot",))
    hlo = softmax("s")["hlo"].replace("ROOT ", "") + f"\n{steps}"
    program.launch("p", {"s": 100, "other": 100}, 100, **{**softmax("s"), "hlo": hlo})
    program.launch("y", {"p": 100, "v": 10}, 10, "triton_gemm", opcodes=("dot",))
    assert program.rank()[0].remedy.startswith("attention:") == is_score


@pytest.mark.parametrize(
    "exponential",
    [
        "%n = f32[8,8] negate(%d)\n%e = f32[8,8] exponential(%n)",  # a sigmoid of what is normalized
        "%x = f32[8,8] add(%d, %bias)\n%e = f32[8,8] exponential(%x)",
        "%e = f32[8,8] exponential(%s)",  # the decay of a state
    ],
)
def test_other_exponentials_are_no_softmax(exponential: str) -> None:
    program = Program().launch("s", {"x": 10, "w": 10}, 100, "triton_gemm", opcodes=("dot",))
    hlo = softmax("s")["hlo"].replace("%e = f32[8,8] exponential(%d)", exponential)
    program.launch("p", {"s": 100, "other": 100}, 100, **{**softmax("s"), "hlo": hlo})
    program.launch("y", {"p": 100, "v": 10}, 10, "triton_gemm", opcodes=("dot",))
    assert not any(missed.remedy.startswith("attention:") for missed in program.rank())


def test_what_a_scan_in_levels_hands_on_is_its_last_level() -> None:
    levels = {"hlo": EVERY_OTHER, "opcodes": ("slice", "add")}
    program = Program().launch("first", {"x": 100}, 100, **levels).launch("last", {"first": 100}, 100, **levels)
    program.launch("cut", {"x": 100}, 50, **levels)  # no level: nothing that takes every other stands before it
    program.launch("y", {"last": 100, "cut": 50}, 100, opcodes=("multiply",))
    found = {missed.value: missed.remedy for missed in program.rank()}
    assert found["first"] == found["last"] == text_of(texts.SCAN)
    assert found["cut"] != text_of(texts.SCAN)
