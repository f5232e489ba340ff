"""Remedies that were followed: each names a program whose bytes and launches fell as the report had said."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from launch_programs import MIB, Program, softmax, text_of

from hlo_analysis.catalogue import Kernel
from hlo_analysis.decisions import categories
from hlo_analysis.patterns.launch_patterns import broadcasts, dequantizes
from hlo_analysis.remedies import loop_texts, texts
from xlafuse.catalogue import KERNELS


def reading(program: Program, read: int) -> Program:
    """The last launch reads so many MiB alone, as one that gathers, or takes integers."""
    program.launches[-1] = replace(program.launches[-1], bytes_read=read * MIB)
    return program


def _joined(parts: str, width: int, size: int = 100, contracted: int = 1) -> Program:
    """x and a vector for all rows, or for each graph, joined and multiplied: x has so many MiB, in rows of 256."""
    whole, joined = f"f32[102400,{width}]", size * width // 256
    hlo = f"""%x = f32[102400,256]{{1,0}} parameter(0)
  %y = f32[102400,256]{{1,0}} parameter(1)
  %g = f32[512,256]{{1,0}} parameter(2)
  %v = f32[256]{{0}} parameter(3)
  %row = f32[102400,256]{{1,0}} broadcast(%v), dimensions={{1}}
  %each = f32[102400,1,256]{{2,1,0}} gather(%g, %indices), offset_dims={{1,2}}
  %rows = f32[102400,256]{{1,0}} bitcast(%each)
  ROOT %c = {whole} concatenate({parts}), dimensions={{1}}"""
    program = Program().launch("c", {"x": size}, joined, "concatenate", opcodes=("concatenate", "broadcast"), hlo=hlo)
    product = f"""%joined = {whole} parameter(0)
  %weight = f32[512,256] parameter(1)
  ROOT %d = f32[102400,256] dot(%joined, %weight), lhs_contracting_dims={{{contracted}}}, rhs_contracting_dims={{0}}"""
    return program.launch("y", {"c": joined, "w": 1}, size, "triton_gemm", opcodes=("dot",), hlo=product)


@pytest.mark.parametrize(
    ("parts", "width", "is_split"),
    [
        (
            "%x, %row",
            512,
            True,
        ),  # 65536 rows of 256 + 256: 141 to 110 µs; with gradients 439 to 311
        ("%x, %rows", 512, True),  # a vector of each of 512 graphs: 141 to 116 µs; with gradients 465 to 347
        ("%x, %y", 512, False),  # nothing repeated: as many bytes, one launch more
        ("%x, %y, %y, %rows", 1024, True),  # a GraphNetwork of 65536 nodes: 953 to 920 µs; of 16384: 275 to 278
    ],
)
def test_a_weight_is_split_in_place_of_joining_what_is_repeated(parts: str, width: int, is_split: bool) -> None:
    (missed,) = _joined(parts, width).rank()
    assert (missed.remedy == texts.SPLIT_WEIGHT.text) == is_split
    if is_split:  # the result is written and read in place of each other part
        assert missed.bytes_at_stake == 2 * 100 * MIB


def test_a_product_that_does_not_sum_over_the_joined_axis_keeps_its_weight() -> None:
    (missed,) = _joined("%x, %rows", 512, contracted=0).rank()
    assert missed.remedy == text_of(texts.LINEAR_PROLOGUE)


def test_few_rows_are_better_joined() -> None:
    """Three launches more cost more than 4 MiB: 4000 rows of 128 and 128 features take 10.5 µs, split 11.8 to 14.4."""
    (missed,) = _joined("%x, %row", 512, size=2).rank()
    assert missed.remedy == text_of(texts.LINEAR_PROLOGUE)


def test_zeros_that_a_scatter_starts_from() -> None:
    program = Program().launch("zeros", {}, 100, opcodes=("broadcast",))
    program.launch("s", {"zeros": 100, "u": 100}, 100, "scatter", opcodes=("scatter",), op_name="jit(f)/scatter-add")
    assert program.rank()[0].remedy == text_of(texts.ADD_TO)


@pytest.mark.parametrize(("update", "remedy"), [("f32[4,8]", texts.ROWS_UPDATED), ("f32[4,1]", texts.ONE_KERNEL)])
def test_zeros_of_tables_are_not_needed_where_rows_are_updated(update: str, remedy: texts.Remedy) -> None:
    """An optimizer selects zeros, too, and reads those that the gradients of embeddings are added to."""
    hlo = f"""%z = f32[100,8] parameter(0)
    %i = s32[4,1] parameter(1)
    %u = {update} parameter(2)
    ROOT %s = f32[100,8] scatter(%z, %i, %u), update_window_dims={{1}}, to_apply=%add"""
    program = Program().launch("zeros", {}, 100, opcodes=("broadcast",))
    reads = {"zeros": 100, "i": 1, "u": 1}
    program.launch("s", reads, 1, "scatter", opcodes=("scatter",), hlo=hlo, phase="backward")
    program.launch("y", {"zeros": 100, "s": 100, "x": 100}, 100, opcodes=("select",))
    missed = next(missed for missed in program.rank() if missed.value == "zeros")
    assert missed.remedy == text_of(remedy)
    if remedy is texts.ROWS_UPDATED:  # neither the zeros nor the whole update is needed
        assert missed.bytes_at_stake == (100 + 400) * MIB


def test_the_gradient_of_set_numbers_its_updates_unless_they_are_unique() -> None:
    """Dispatch to experts: 36 launches to 33, 3297 to 2978 MB."""
    program = Program().launch("zeros", {}, 100, opcodes=("broadcast",))
    opcodes = ("scatter", "iota", "add")
    program.launch("ids", {"zeros": 100}, 100, "scatter", opcodes=opcodes, op_name="jit(f)/scatter", shape="u32[100]")
    program.launch("mask", {"ids": 100}, 10, opcodes=("compare", "gather"))
    assert {missed.remedy for missed in program.rank()} == {text_of(texts.UNIQUE)}


def test_a_sum_that_xla_splits_is_an_option_away() -> None:
    """The gradient of a layer over edges: 6018 to 4496 MB with whole sums."""
    dot = '%d = f32[4,8,8] dot(%a, %b), lhs_batch_dims={0}, metadata={op_name="f/dot"}'
    add = '%r = f32[8,8] reduce(%d, %z), dimensions={0}, metadata={op_name="f/dot"}'
    program = Program().launch("p", {"x": 100}, 101, opcodes=("pad",), op_name="jit(f)/pad")
    program.launch("d", {"p": 101, "y": 100}, 50, "triton_gemm", opcodes=("dot",), hlo=dot)
    program.launch("r", {"d": 50}, 10, "reduction", opcodes=("reduce",), hlo=add)
    remedies = {missed.value: missed.remedy for missed in program.rank()}
    assert remedies["p"] == text_of(texts.PARTS)
    assert remedies["d"] == text_of(texts.WHOLE_SUM)


def test_what_a_fusion_joins_for_a_convolution_is_no_skip_connection() -> None:
    """XLA joins the statistics of ResNet's batch norms."""
    program = Program().launch("u", {"a": 50, "b": 50}, 100, "concatenate", opcodes=("concatenate", "maximum"))
    hlo = '%c = bf16[8] custom-call(%a, %w), custom_call_target="__cudnn$convForward"'
    (missed,) = program.launch("c", {"u": 100}, 50, "cudnn", opcodes=("custom-call",), hlo=hlo).rank()
    assert missed.remedy == text_of(texts.OWN_KERNEL)


def test_what_is_spread_out_for_a_convolution_lay_nowhere_in_that_size() -> None:
    """cuDNN adds a bias of each image as an array of the images' size."""
    program = Program().launch("t", {"bias": 1}, 100, opcodes=("broadcast", "slice"))
    assert broadcasts(program.launches[0])
    hlo = '%c = bf16[8] custom-call(%a, %w), custom_call_target="__cudnn$convBiasActivationForward"'
    (missed,) = program.launch("c", {"t": 100, "x": 50}, 50, "cudnn", opcodes=("custom-call",), hlo=hlo).rank()
    assert missed.remedy == text_of(texts.OWN_KERNEL)


def test_integers_are_widened_as_a_product_loads_them() -> None:
    program = reading(
        Program().launch("w", {"q": 50, "scale": 1}, 100, opcodes=("convert", "multiply", "broadcast")), 51
    )
    (weight, scale) = program.launches[0].inputs
    for shape, remedy in (("s8[4096,4096]", texts.QUANTIZED), ("f8e4m3fn[4096,4096]", texts.LINEAR_PROLOGUE)):
        program.launches[0] = replace(program.launches[0], inputs=(replace(weight, shape=shape), scale))
        assert dequantizes(program.launches[0]) == (remedy is texts.QUANTIZED)
        other = Program()
        other.launches, other.values, other.readers = list(program.launches), dict(program.values), {"w": []}
        (missed,) = other.launch("y", {"w": 100, "x": 10}, 10, "triton_gemm", opcodes=("dot",)).rank()
        assert missed.remedy.startswith(text_of(remedy))


@pytest.mark.parametrize(
    ("given", "made", "is_taken"),
    [
        ("bf16[128,128]{1,0}", "f32[128,128] dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}", True),
        ("bf16[128,100]{1,0}", "f32[128,128] dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={1}", False),
        ("s8[128,128]{1,0}", "s32[128,128] dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}", False),
        (
            "bf16[8,128,128]{2,1,0}",
            "bf16[8,128,128] dot(%a, %b), lhs_batch_dims={0}, rhs_batch_dims={0}, lhs_contracting_dims={2}, "
            "rhs_contracting_dims={1}",
            False,
        ),
    ],
)
def test_a_product_of_ours_takes_a_single_matrix_of_sixteen_bits(given: str, made: str, is_taken: bool) -> None:
    hlo = f"%a = {given} parameter(0)\n%b = {given} parameter(1)\n%d = {made}"
    program = Program().launch("d", {"x": 100, "w": 100}, 100, "triton_gemm", opcodes=("dot",), hlo=hlo)
    (missed,) = program.launch("y", {"d": 100}, 100, opcodes=("tanh",)).rank(catalogue=KERNELS)
    assert missed.remedy.startswith("linear: " if is_taken else "write a kernel, e.g. in Pallas (linear does not take")
    assert missed.remedy.endswith(texts.LINEAR_EPILOGUE.text)


def test_what_is_reduced_of_a_product_is_no_epilogue() -> None:
    """The nearest of a codebook; parts of a split sum are told before."""
    program = Program().launch("d", {"x": 10, "c": 10}, 100, "triton_gemm", opcodes=("dot",))
    (missed,) = program.launch("i", {"d": 100}, 1, "reduction", opcodes=("subtract", "reduce")).rank()
    assert missed.remedy == text_of(texts.REDUCED_PRODUCT)


@pytest.mark.parametrize("kind", ["sort", None])
def test_logits_of_which_the_largest_are_taken_or_that_are_returned_are_of_no_loss(kind: Any) -> None:
    """A step of a beam search."""
    program = Program().launch("l", {"h": 10, "w": 50}, 100, "triton_gemm", opcodes=("dot",))
    program.launch("s", {"l": 100}, 1, "reduction", opcodes=("exponential", "reduce", "log"))
    program.launch("p", {"l": 100, "s": 1}, 100, opcodes=("exponential", "reduce", "subtract"))
    if kind:
        program.launch("t", {"p": 100}, 1, kind, opcodes=("custom-call",))
    missed = next(found for found in program.rank() if found.value == "l")
    assert missed.remedy == text_of(texts.REDUCED_PRODUCT)


def test_the_state_of_a_loop_is_copied_for_who_reads_the_old_one() -> None:
    """Keys that travel round a ring of devices: 2324 to 2233 us when the loop is unrolled by two."""
    program = Program().launch("copy", {"k": 100}, 100, "copy", opcodes=("copy",), repeat=8)
    program.launch("s", {"copy": 100, "q": 100}, 100, opcodes=("add",), repeat=8)
    program.launch("next", {"copy": 100}, 100, "collective", opcodes=("collective-permute",), repeat=8)
    source = replace(program.launches[0].inputs[0], name="next", producer=2)
    program.launches[0] = replace(program.launches[0], inputs=(source,))
    program.decide(0, 1, categories.INSERTED).decide(0, 2, categories.INSERTED)
    missed = next(found for found in program.rank() if found.value == "copy")
    assert missed.remedy == text_of(loop_texts.STATE)


@pytest.mark.parametrize(
    ("phase", "opcodes", "remedy"),
    [
        ("forward", ("add", "multiply", "reduce"), texts.RESIDUAL_NORM),
        ("forward", ("multiply", "reduce"), texts.RMS_NORM),
        ("backward", ("add", "multiply", "reduce"), texts.RMS_NORM),
    ],
)
def test_a_product_that_a_norm_of_several_launches_reads(phase: Any, opcodes: tuple[str, ...], remedy: Any) -> None:
    """As XLA makes one for which the backward pass wants the sums."""
    program = Program().launch("d", {"x": 10, "w": 10}, 100, "triton_gemm", opcodes=("dot",), phase=phase)
    program.launch("sum", {"d": 100}, 1, "reduction", opcodes=opcodes, phase=phase)
    program.launch("scale", {"sum": 1}, 1, opcodes=("rsqrt",), phase=phase)
    program.launch("y", {"d": 100, "scale": 1}, 100, opcodes=("multiply",), phase=phase)
    missed = next(found for found in program.rank() if found.value == "d")
    assert missed.remedy.startswith(text_of(remedy))


def test_rows_of_a_product_that_are_added_elsewhere_are_no_plain_epilogue() -> None:
    program = Program().launch("d", {"x": 10, "w": 10}, 100, "triton_gemm", opcodes=("dot",))
    (missed,) = program.launch("s", {"d": 100, "zeros": 10}, 10, "scatter", opcodes=("scatter",)).rank()
    assert missed.remedy == text_of(texts.EPILOGUE)


def test_a_product_of_which_most_readers_scatter_adds_where_rows_belong() -> None:
    program = Program().launch("d", {"x": 10, "w": 10}, 100, "triton_gemm", opcodes=("dot",))
    program.launch("s", {"d": 100, "zeros": 10}, 10, "scatter", opcodes=("scatter",))
    (missed,) = program.launch("y", {"d": 100}, 100).rank()
    assert missed.remedy == text_of(texts.EPILOGUE)


@pytest.mark.parametrize(("rows", "is_taken"), [("%d", True), ("%other", False)])
def test_rows_of_another_array_are_not_taken_of_the_product(rows: str, is_taken: bool) -> None:
    program = Program().launch("d", {"x": 10, "w": 10}, 100, "triton_gemm", opcodes=("dot",))
    hlo = f"%g = f32[8] gather({rows}, %indices)\n%e = f32[8] add(%g, %d)"
    (missed,) = program.launch("e", {"d": 100, "other": 100}, 100, opcodes=("gather", "add"), hlo=hlo).rank()
    assert (missed.remedy == text_of(texts.EPILOGUE)) == is_taken


def test_where_no_kernel_serves_the_text_says_why() -> None:
    refusing = Kernel(name="gate", pattern="gated_linear", package="p", unsupported=lambda launches: "too large")
    for catalogue, why in (([refusing], "gate does not take this: too large"), ([], "no kernel of the catalogue does")):
        named = texts.GATED_LINEAR.named(catalogue, ())
        assert named.text.startswith("write a kernel, e.g. in Pallas")
        assert why in named.text
        assert named.kernel is None
        assert texts.ATTENTION.named(catalogue, ()) is texts.ATTENTION  # everyone has one


def test_a_loss_whose_product_no_kernel_takes_has_the_kernel_of_the_loss_alone() -> None:
    whole = Kernel(name="whole", pattern="linear_cross_entropy", package="p", unsupported=lambda launches: "odd")
    named = texts.LINEAR_CROSS_ENTROPY.named([whole, Kernel(name="loss", pattern="cross_entropy", package="p")], ())
    assert named.kernel == "loss"
    assert named.text == f"loss: {texts.LOG_SOFTMAX.text}; whole does not take this: odd"
    assert texts.LINEAR_CROSS_ENTROPY.named([whole], ()).text.startswith(
        "write a kernel, e.g. in Pallas (whole does not"
    )


def test_rows_of_a_product_that_are_taken_by_index_are_no_epilogue() -> None:
    program = Program().launch("d", {"x": 10, "w": 10}, 100, "triton_gemm", opcodes=("dot",))
    (missed,) = program.launch("e", {"d": 100}, 200, "concatenate", opcodes=("gather", "concatenate")).rank()
    assert missed.remedy == text_of(texts.EPILOGUE)


def test_what_attention_adds_up_in_a_loop_stays_in_its_kernel() -> None:
    program = Program().launch("s", {"q": 10, "k": 10}, 800, "triton_gemm", shape="f32[8,64,64]")
    program.launch("p", {"s": 800}, 400, "triton", **softmax("s"))
    program.launch("o", {"p": 400, "v": 10}, 100, "triton_gemm").launch("sum", {"o": 100}, 100, opcodes=("multiply",))
    assert next(missed for missed in program.rank() if missed.value == "o").remedy == text_of(texts.ATTENTION)


@pytest.mark.parametrize(
    ("made", "read", "remedy"),
    [
        (("dot", "add"), ("rsqrt", "reduce", "multiply"), texts.RESIDUAL_NORM),
        (("dot", "add"), ("rsqrt", "reduce", "subtract"), texts.REDUCED_PRODUCT),  # of a LayerNorm
        (("dot",), ("rsqrt", "reduce", "multiply"), texts.REDUCED_PRODUCT),  # no residual
    ],
)
def test_a_products_sum_with_the_residual_leaves_its_mean_squares(made: Any, read: Any, remedy: Any) -> None:
    program = Program().launch("d", {"x": 10, "w": 10, "r": 100}, 100, "triton_gemm", opcodes=made)
    (missed,) = program.launch("n", {"d": 100}, 100, "triton", opcodes=read).rank()
    assert missed.remedy.startswith(text_of(remedy))


def test_gradients_of_parts_are_not_kept_in_one_array() -> None:
    program = Program().launch("q", {"x": 50}, 50, phase="backward").launch("k", {"x": 50}, 50, phase="backward")
    program.launch("j", {"q": 50, "k": 50}, 100, "concatenate", opcodes=("concatenate",), phase="backward")
    program.launch("dw", {"j": 100, "x": 50}, 10, "triton_gemm", opcodes=("dot",), phase="backward")
    remedies = {missed.value: missed.remedy for missed in program.rank()}
    assert (remedies["j"], remedies["q"]) == (text_of(texts.LINEAR_PROLOGUE), text_of(texts.ONE_KERNEL))
