"""XLA's words: the compiler's log, and the category of every reason that the XLA of jaxlib 0.11.2 can give."""

from __future__ import annotations

import pytest

from hlo_analysis.decisions import CATEGORIES, categories
from hlo_analysis.decisions.log import GEMM_PASS, Refusal, read_log
from hlo_analysis.decisions.roles import origin_of_kernel
from hlo_analysis.hlo import parse_module

LOG = """\
I1120 09:57:14.1  9272 gemm_fusion.cc:1858] %dot.7 = bf16[8,16]{1,0} dot(%bitcast.13, %u), lhs_contracting_dims={1}
I1120 09:57:14.2  9272 gemm_fusion.cc:249] Not fusing %convert.29 = bf16[8,4]{1,0} convert(%mul.1), \
metadata={op_name="jit(f)/norm/convert"} to the output due to the decision: Not obviously profitable to fuse as input.
I1120 09:57:14.3  9272 gemm_fusion.cc:184] Fusing %dot.7 = bf16[8,16]{1,0} dot(%bitcast.13, %u)
I1120 09:57:14.4  9272 gemm_fusion.cc:279] Not fusing %mul.139 = bf16[8,16]{1,0} multiply(%mul.0, %bitcast.15) \
to the input due to the decision: Has multiple inputs - not properly analyzed yet.
I1120 09:57:14.5  9272 gemm_fusion.cc:1858] %dot.12 = bf16[8,16]{1,0} dot(%bitcast.1, %d)
I1120 09:57:14.6  9272 gemm_fusion.cc:1660] Not fusing operand: %bitcast.121 = bf16[8,4]{1,0} bitcast(%transpose.27) \
due to decision: Bailing out on reshape %bitcast.121
I1120 09:57:14.7  9272 gemm_fusion.cc:1812] Not fusing user: Dimension has non-contiguous section.
I1120 09:57:14.7  9272 gemm_fusion.cc:1983] Not fusing user: %mul.5 = bf16[8,16]{1,0} multiply(%fusion, %u), \
metadata={op_name="jit(f)/mul"} due to profitability decision: Has multiple inputs - not properly analyzed yet.
I1120 09:57:14.7  9272 gemm_fusion.cc:1826] Not fusing operand: %negate.2 = bf16[8,4]{1,0} negate(%p) \
due to tileability decision: Fusion is not tileable.
I1120 09:57:14.8  9272 softmax_rewriter_triton.cc:658] Cannot match the diamond pattern for instruction \
%x.1 = f32[8]{0} parameter(0). Reason: Root is not elementwise binary.
I1120 09:57:14.8  9272 softmax_rewriter_triton.cc:658] Cannot match the diamond pattern for instruction \
%divide = f32[8,4]{1,0} divide(%e, %b). Reason: More than one use of broadcast or reduce.
I1120 09:57:15.0  9272 multi_output_fusion.cc:274] Looking at producer fusion.4 and its consumer fusion.5
I1120 09:57:15.0  9272 multi_output_fusion.cc:403] Fuse siblings fusion.63 and fusion.64
I1120 09:57:15.1  9272 multi_output_fusion.cc:510] Fuse producer fusion.129 into its consumer fusion.105
a line of another kind] Not fusing %nothing due to the decision: noise
"""


def test_log() -> None:
    assert read_log(LOG) == (
        Refusal(
            pass_name=GEMM_PASS,
            role="prologue",
            instruction="convert.29",
            product="dot.7",
            reason="Not obviously profitable to fuse as input.",
            op_name="jit(f)/norm/convert",
        ),
        Refusal(
            pass_name=GEMM_PASS,
            role="epilogue",
            instruction="mul.139",
            product="dot.7",
            reason="Has multiple inputs - not properly analyzed yet.",
        ),
        Refusal(
            pass_name=GEMM_PASS,
            role="prologue",
            instruction="transpose.27",
            product="dot.12",
            reason="Bailing out on reshape %bitcast.121",
        ),
        Refusal(
            pass_name=GEMM_PASS,
            role="epilogue",
            instruction="",
            product="dot.12",
            reason="Dimension has non-contiguous section.",
        ),
        Refusal(
            pass_name=GEMM_PASS,
            role="epilogue",
            instruction="mul.5",
            product="dot.12",
            reason="Has multiple inputs - not properly analyzed yet.",
            op_name="jit(f)/mul",
        ),
        Refusal(
            pass_name=GEMM_PASS,
            role="prologue",
            instruction="negate.2",
            product="dot.12",
            reason="Fusion is not tileable.",
        ),
        Refusal(
            pass_name="triton-softmax-rewriter",
            role="root",
            instruction="divide",
            product=None,
            reason="More than one use of broadcast or reduce.",
        ),
    )


def test_an_empty_log_and_one_of_other_lines() -> None:
    assert read_log("") == read_log("\n\x00 what ] ever\n] \n") == ()


@pytest.mark.parametrize(
    ("reason", "category"),
    [
        ("not fusing because there are only bitcast users", categories.BITCAST_USERS),
        ("not fusing into a single bitcast as consumer", categories.BITCAST_USERS),
        ("not fusing into the output of the root instruction", categories.OUTPUT),
        ("No users to fuse", categories.OUTPUT),
        ("the producer is not fusible", categories.PRODUCER),
        ("the consumer is not fusible", categories.CONSUMER),
        ("User is not fusible", categories.CONSUMER),
        ("both the producer and the consumer contain a reduce", categories.TWO_REDUCTIONS),
        ("Do not fuse transpose into a significant reduction", categories.TILING),
        ("fusion into output of a reduce fusion would create a loop fusion", categories.AFTER_REDUCTION),
        ("the fusion would result in an overly large code duplication", categories.DUPLICATION),
        (
            "Not fusing power with multiple users because it may result in expensive op duplication.",
            categories.DUPLICATION,
        ),
        ("Number of operands and output buffers is larger than allowed budget per fusion", categories.TOO_LARGE),
        ("shared memory usage would be over the budget of 49152B", categories.TOO_LARGE),
        ("over 8 unnested reductions in fusion", categories.TOO_LARGE),
        ("will generate too large IR", categories.TOO_LARGE),
        ("will execute slower if fused", categories.SLOWER),
        ("triton heroless fusion is not enabled", categories.SWITCHED_OFF),
        ("Skipping fusing outputs at low fusion levels.", categories.SWITCHED_OFF),
        ("different loop shapes", categories.DIFFERENT_SHAPES),
        ("slices are non-overlapping", categories.DIFFERENT_SHAPES),
        ("tiled transpose would become untiled", categories.DIFFERENT_SHAPES),
        (
            "sibling multi-output fusion of a column reduction with an element-wise root",
            categories.DIFFERENT_SHAPES,
        ),
        ("multi-output fusion of a transpose and a reduction", categories.DIFFERENT_SHAPES),
        ("Producer is a multi-output fusion", categories.MULTIPLE_OUTPUTS),
        ("consumer not eligible as multi-output fusion root.", categories.MULTIPLE_OUTPUTS),
        ("not an array", categories.MULTIPLE_OUTPUTS),
        ("In-place operations are present", categories.IN_PLACE),
        ("do not fuse into the output of scatter", categories.IN_PLACE),
        ("can't fuse multiple DUSs", categories.IN_PLACE),
        ("unrecognized inplace update non-elementwise output pair", categories.IN_PLACE),
        ("Non-elementwise ops in consumer lead to inplace conflict after fusion.", categories.IN_PLACE),
        ("fusion.3 would introduce a cycle when fused", categories.CYCLE),
        ("Not obviously profitable to fuse as input.", categories.MATRIX_PRODUCT),
        ("Has multiple inputs - not properly analyzed yet.", categories.MATRIX_PRODUCT),
        ("Transpose within a dimension.", categories.TILING),
        ("Unsupported split of a dimension.", categories.TILING),
        ("Concatenations on split non-contracting dimensions are unsupported.", categories.TILING),
        ("Not fusing concatenate along contracting dimension.", categories.TILING),
        ("Fusion can not be tiled with SymbolicTileAnalysis: Failed to compute symbolic tile", categories.TILING),
        ("Contracting dimension has non-contiguous section.", categories.TILING),
        ("Unsupported reduction computation by Triton.", categories.TILING),
        ("producer is physically transposing", categories.TILING),
        (
            "The reductions in the diamond must reduce 1 dimension and that dimension must be the last dimension of "
            "the operand.",
            categories.TILING,
        ),
        ("a sentence of some later version", categories.OTHER_RULE),
        ("", categories.OTHER_RULE),
    ],
)
def test_category_of_a_reason(reason: str, category: str) -> None:
    assert categories.classify(reason) == category


def test_every_category_is_explained_in_a_sentence() -> None:
    names = {value for name, value in vars(categories).items() if name.isupper() and isinstance(value, str)}
    assert names == set(CATEGORIES)
    for name, sentence in CATEGORIES.items():
        assert len(name) <= 32
        assert sentence.endswith(".")
        assert sentence[0].isupper()


def test_no_fragment_is_hidden_behind_an_earlier_one() -> None:
    fragments = categories._FRAGMENTS
    for position, (fragment, _) in enumerate(fragments):
        assert fragment == fragment.lower()
        assert not any(earlier in fragment for earlier, _ in fragments[:position]), fragment


@pytest.mark.parametrize(
    ("target", "words"),
    [("__gpu$TopK", "a finished kernel of XLA's own"), ("mosaic_gpu_v2", "a kernel from outside XLA")],
)
def test_what_a_custom_call_is_said_to_be(target: str, words: str) -> None:
    call = f'ROOT %c = f32[8]{{0}} custom-call(%x), custom_call_target="{target}"'
    text = f"HloModule m\n\nENTRY %e {{\n  %x = f32[8]{{0}} parameter(0)\n  {call}\n}}\n"
    assert origin_of_kernel(parse_module(text).entry.instructions["c"]) == words
