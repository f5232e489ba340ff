"""Folders with HLO written by hand: what launches hand each other in loops and in place, and what is not known."""

from __future__ import annotations

from pathlib import Path

import pytest

from hlo_analysis import HloParseError, analyze
from hlo_analysis.capture import Capture
from hlo_analysis.catalogue import Kernel
from hlo_analysis.report.sentences import gemm_choice

LOOP = """HloModule jit_f, is_scheduled=true

%next (p: f32[1024]) -> f32[1024] {
  %p = f32[1024]{0} parameter(0)
  ROOT %t = f32[1024]{0} tanh(%p)
}

%body (c: (f32[1024])) -> (f32[1024]) {
  %c = (f32[1024]{0}) parameter(0)
  %x = f32[1024]{0} get-tuple-element(%c), index=0
  %tanh_fusion = f32[1024]{0} fusion(%x), kind=kLoop, calls=%next
  ROOT %r = (f32[1024]{0}) tuple(%tanh_fusion)
}

%until (c: (f32[1024])) -> pred[] {
  %c = (f32[1024]{0}) parameter(0)
  ROOT %go = pred[] constant(true)
}

ENTRY %main (a: f32[1024]) -> f32[1024] {
  %a = f32[1024]{0} parameter(0)
  %start = (f32[1024]{0}) tuple(%a)
  %loop = (f32[1024]{0}) while(%start), condition=%until, body=%body, backend_config={"known_trip_count":{"n":"8"}}
  ROOT %end = f32[1024]{0} get-tuple-element(%loop), index=0
}
"""

CACHE = """HloModule jit_f, is_scheduled=true, input_output_alias={ {0}: (0, {}, may-alias) }

%write (p: f32[64,128], k: f32[1,128], i: s32[]) -> f32[64,128] {
  %p = f32[64,128]{1,0} parameter(0)
  %k = f32[1,128]{1,0} parameter(1)
  %i = s32[] parameter(2)
  %zero = s32[] constant(0)
  ROOT %u = f32[64,128]{1,0} dynamic-update-slice(%p, %k, %i, %zero)
}

%read (p: f32[64,128]) -> f32[64,128] {
  %p = f32[64,128]{1,0} parameter(0)
  ROOT %n = f32[64,128]{1,0} negate(%p)
}

ENTRY %main (cache: f32[64,128], k: f32[1,128], i: s32[]) -> (f32[64,128], f32[64,128]) {
  %cache = f32[64,128]{1,0} parameter(0)
  %k = f32[1,128]{1,0} parameter(1)
  %i = s32[] parameter(2)
  %update_fusion = f32[64,128]{1,0} fusion(BASE, %k, %i), kind=kLoop, calls=%write
  %negate_fusion = f32[64,128]{1,0} fusion(%update_fusion), kind=kLoop, calls=%read
  ROOT %both = (f32[64,128]{1,0}, f32[64,128]{1,0}) tuple(%update_fusion, %negate_fusion)
}
"""


def between(folder: Path, text: str) -> dict[str, int]:
    (folder / "module_0001.jit_f.sm_9.0a_gpu_after_optimizations.txt").write_text(text)
    return {value.name: value.bytes_moved for value in analyze(Capture.load(folder)).intermediates}


def test_a_loops_launch_hands_its_next_run_what_it_wrote(tmp_path):
    assert between(tmp_path, LOOP) == {"tanh_fusion": 8 * 2 * 4096}


def test_of_an_argument_updated_in_place_the_update_is_handed_on(tmp_path):
    assert between(tmp_path, CACHE.replace("BASE", "%cache")) == {"update_fusion": 2 * 512}


def test_of_a_copy_updated_in_place_all_is_handed_on(tmp_path):
    copied = CACHE.replace("BASE", "%copy").replace(
        "  %update_fusion", "  %copy = f32[64,128]{1,0} copy(%cache)\n  %update_fusion"
    )
    whole = 64 * 128 * 4
    assert between(tmp_path, copied) == {"copy": whole, "update_fusion": 512 + whole}


def test_what_the_program_returns_is_written_anyway(tmp_path):
    """Of the cache, which is returned, only the read by the second launch can be saved."""
    between(
        tmp_path,
        CACHE.replace("BASE", "%copy").replace("  %update", "  %copy = f32[64,128]{1,0} copy(%cache)\n  %update"),
    )
    analysis = analyze(Capture.load(tmp_path))
    whole, row = 64 * 128 * 4, 128 * 4
    assert {value.name: value.avoidable_bytes for value in analysis.intermediates} == {
        "copy": whole,
        "update_fusion": whole,
    }
    assert analysis.traffic.intermediate_bytes == 2 * whole
    assert sum(value.bytes_moved for value in analysis.intermediates) == 2 * whole + row


def test_of_a_loops_result_the_last_write_is_needed(tmp_path):
    between(tmp_path, LOOP)
    (value,) = analyze(Capture.load(tmp_path)).intermediates
    assert value.avoidable_bytes == (8 + 7) * 4096


def test_of_a_folder_with_hlo_alone_the_choice_of_products_is_not_known(tmp_path):
    between(tmp_path, LOOP)
    assert gemm_choice(Capture.load(tmp_path).provenance) == "not known"


def test_hlo_that_was_cut_off_is_told_with_its_folder(tmp_path):
    with pytest.raises(HloParseError, match=f"line .* {tmp_path}; was the dump cut off"):
        between(tmp_path, LOOP[:400])


FRAMES = """HloModule jit_f

FileNames
1 "/home/me/train.py"
2 "FILE"

FunctionNames
1 "step"
2 "kernel"

FileLocations
1 {file_name_id=1 function_name_id=1 line=7 end_line=7 column=1 end_column=9}
2 {file_name_id=2 function_name_id=2 line=53 end_line=53 column=1 end_column=9}

StackFrames
1 {file_location_id=1 parent_frame_id=1}
2 {file_location_id=2 parent_frame_id=2}

ENTRY %main (a: f32[8]) -> f32[8] {
  %a = f32[8]{0} parameter(0)
  ROOT %n = f32[8]{0} negate(%a), metadata={op_name="jit(f)/neg" stack_frame_id=2}
}
"""


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("/home/me/layers.py", "layers.py:53"),
        ("/home/me/.venv/lib/site-packages/optax/base.py", "train.py:7"),
        ("/home/me/clone/kernels/settings.py", "train.py:7"),  # a package of the catalogue, not installed
    ],
)
def test_a_launch_is_told_by_the_users_own_line(tmp_path: Path, file: str, source: str) -> None:
    (tmp_path / "module_0001.jit_f.sm_9.0_gpu_after_optimizations.txt").write_text(FRAMES.replace("FILE", file))
    kernel = Kernel(name="k", pattern="linear", package="kernels")
    (launch,) = analyze(Capture.load(tmp_path), catalogue=[kernel]).launches
    assert launch.source == source


def test_a_path_is_told_how_to_be_read(tmp_path):
    with pytest.raises(TypeError, match=r"Capture\.load\(path\) reads it; got PosixPath"):
        analyze(tmp_path)
