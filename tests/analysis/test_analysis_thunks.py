"""The two thunk dumps: nesting, kernels, names, and text that is not one."""

from __future__ import annotations

import pytest

from hlo_analysis import DumpError
from hlo_analysis.program.thunks import parse_thunk_metadata, parse_thunk_sequence

NESTED = """\
001: kCopy  [source       | next=003 (2)] kCopy
003: kWhile [prev=002 (1) | sink        ]   \n
condition:
    004: kCustomKernel [source | sink] loop_compare_fusion_1 grid: [1, 1, 1] threads: [1, 1, 1]  shared_memory: 0 bytes
  body:
    005: kCopy         [source       | next=007 (2)] kCopy
    007: kWhile        [prev=005 (2) | sink        ]       \n
condition:
        008: kCustomKernel [source | sink] inner_compare grid: [1, 1, 1] threads: [1, 1, 1]  shared_memory: 0 bytes
      body:
        010: kCustomKernel [source | sink] gemm grid: [1024, 2, 1] threads: [64, 1, 1]  shared_memory: 1024 bytes
    012: kCopy         [prev=007 (2) | sink        ] kCopy
013: kConditional  [prev=003 (1) | sink        ]   \n
  branch_0:
    014: kCopy [source | sink] kCopy
  branch_1:
    015: kSequential   [source       | next=018 (1)]   016: kCopy            [source       | next=017 (1)] kCopy
      017: kTriangularSolve [prev=016 (1) | sink        ] (no description)
020: kAsyncStart   [source       | next=022 (4)] stream=computation_stream[0], async_id=20
    021: kDynamicSliceFusion [source | sink] params=1, results=1
        023: kCopy [source | sink] kCopy
022: kAsyncDone    [source       | sink        ] async_id=20
"""


def outline(thunks, depth=0):
    return [
        line
        for thunk in thunks
        for line in ((depth, thunk.region, thunk.id, thunk.kind), *outline(thunk.children, depth + 1))
    ]


def test_nesting_follows_regions_and_indent():
    assert outline(parse_thunk_sequence(NESTED)) == [
        (0, "", 1, "kCopy"),
        (0, "", 3, "kWhile"),
        (1, "condition", 4, "kCustomKernel"),
        (1, "body", 5, "kCopy"),
        (1, "body", 7, "kWhile"),
        (2, "condition", 8, "kCustomKernel"),
        (2, "body", 10, "kCustomKernel"),
        (1, "body", 12, "kCopy"),
        (0, "", 13, "kConditional"),
        (1, "branch_0", 14, "kCopy"),
        (1, "branch_1", 15, "kSequential"),
        (2, "", 16, "kCopy"),
        (2, "", 17, "kTriangularSolve"),
        (0, "", 20, "kAsyncStart"),
        (1, "", 21, "kDynamicSliceFusion"),
        (2, "", 23, "kCopy"),
        (0, "", 22, "kAsyncDone"),
    ]


def test_only_leaves_that_work_launch():
    launching = [t.id for root in parse_thunk_sequence(NESTED) for t in root.walk() if t.launches]
    assert launching == [1, 4, 5, 8, 10, 12, 14, 16, 17, 23]


def test_a_program_without_launches():
    assert parse_thunk_sequence("No thunks.") == ()


def test_branches_without_launches():
    """XLA ends the line of an empty region with no line break."""
    text = """\
001: kConditional  [source | next=008 (1)]   \n
  branch_0:
    No thunks.  branch_1:
    002: kConditional  [source | sink]   \n
      false_branch:
        No thunks.      true_branch:
        003: kCopy [source | sink] kCopy
  branch_2:
    No thunks.008: kCopy [prev=001 (1) | sink] kCopy
"""
    assert outline(parse_thunk_sequence(text)) == [
        (0, "", 1, "kConditional"),
        (1, "branch_1", 2, "kConditional"),
        (2, "true_branch", 3, "kCopy"),
        (0, "", 8, "kCopy"),
    ]


def test_kernel_dimensions():
    (gemm,) = [t for root in parse_thunk_sequence(NESTED) for t in root.walk() if t.id == 10]
    assert (gemm.kernel, gemm.grid, gemm.block, gemm.shared_memory_bytes) == ("gemm", (1024, 2, 1), (64, 1, 1), 1024)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("001: kCopy [source | sink] kCopy\n002: kCust", "line 2: expected"),
        ("  body:\n    001: kCopy [source | sink] kCopy", "region 'body' stands outside"),
        ("HloModule jit_f", "line 1: expected"),
    ],
)
def test_other_text_is_refused(text, words):
    with pytest.raises(DumpError, match=words):
        parse_thunk_sequence(text)


def test_metadata_joins_ids_to_names():
    text = """\
thunk_metadata {
  thunk_info {
    profile_annotation: "command_buffer_1"
  }
  thunk_kind: "kCommandBuffer"
}
thunk_metadata {
  thunk_info {
    thunk_id: 8
  }
  thunk_kind: "kSequential"
}
thunk_metadata {
  thunk_info {
    profile_annotation: "gemm_fusion_dot.4"
    thunk_id: 5
  }
  thunk_kind: "kCustomKernel"
}
"""
    assert parse_thunk_metadata(text) == {5: "gemm_fusion_dot.4"}
