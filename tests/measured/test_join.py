"""Kernels of a profile to launches: by name, by order, and by the instruction where the profile knows it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from jax.profiler import ProfileData
from profiles import launch, profile, program, xspace

from hlo_analysis.errors import DumpError
from hlo_analysis.measured import (
    KernelEvent,
    Profile,
    ProfileMismatchError,
    join,
    read_profile,
    trace_events,
    with_measured,
)
from hlo_analysis.schema import from_json, to_json

MLP = program(
    launch(0, "norm.1"), launch(1, "custom-call.2", "cublaslt"), launch(2, "gelu", "triton"), launch(3, "dot", "cublas")
)
CALL = ["norm_1", "nvjet_a", "gelu", "nvjet_b"]


def medians(measured):
    return {time.launch: time.median_us for time in measured.launches}


def test_the_median_of_each_launch_and_of_the_gaps():
    measured = join(MLP, profile(CALL * 3, [1, 10, 2, 20, 3, 12, 4, 22, 2, 11, 3, 21], gap=0.5))
    assert medians(measured) == {0: 2, 1: 11, 2: 3, 3: 21}
    assert (measured.calls, measured.kernel_us, measured.gap_us) == (3, 37, 1.5)
    analysis = with_measured(MLP, measured)
    assert [each.measured_us for each in analysis.launches] == [2, 11, 3, 21]
    assert from_json(type(analysis), to_json(analysis)) == analysis


def test_calls_that_are_cut_off_do_not_count():
    measured = join(MLP, profile([*CALL[2:], *CALL, *CALL, *CALL[:3]]))
    assert measured.calls == 2


def test_equal_fusions_share_a_kernel():
    analysis = program(launch(0, "add.1"), launch(1, "mul"), replace(launch(2, "add.2"), kernel="add_1"))
    assert medians(join(analysis, profile(["add_1", "mul", "add_1"], [1, 2, 3]))) == {0: 1, 1: 2, 2: 3}


def test_a_library_call_of_several_kernels():
    names = ["norm_1", "Memset", "nvjet_a", "splitKreduce_kernel", "gelu", "convert", "cudnn"]
    assert medians(join(MLP, profile(names * 2))) == {0: 5, 1: 15, 2: 5, 3: 10}
    together = program(launch(0, "a"), launch(1, "dot.1", "cublas"), launch(2, "dot.2", "cublas"), launch(3, "b"))
    assert medians(join(together, profile(["a", "gemm", "gemm", "b"], [1, 2, 3, 4]))) == {0: 1, 1: 2, 2: 3, 3: 4}
    cleared = profile(["a", "Memset 0", "gemm", "Memset 0", "prepare", "backward", "b"])
    assert medians(join(together, cleared)) == {0: 5, 1: 10, 2: 15, 3: 5}
    # Three kernels of two calls cannot be told apart, unless the profile has their instructions.
    assert medians(join(together, profile(["a", "gemm", "more", "gemm", "b"]))) == {0: 5, 1: None, 2: None, 3: 5}
    named = profile(["a@a", "gemm@dot.1", "more@dot.2", "gemm@dot.2", "b@b"])
    assert medians(join(together, named)) == {0: 5, 1: 5, 2: 10, 3: 5}


def test_copies_that_the_profile_names_run_beside_the_kernels():
    saved = program(launch(0, "a"), launch(1, "save.1", "copy"), launch(2, "b"), launch(3, "save.2", "copy"))
    late = profile(["a", "b", "MemcpyD2D@save.1", "MemcpyD2D@save.2"] * 2, [1, 2, 3, 4, 1, 2, 5, 6])
    measured = join(saved, late)
    assert medians(measured) == {0: 1, 1: 4, 2: 2, 3: 5}
    assert (measured.calls, measured.kernel_us) == (2, 12)


def test_loops_run_their_body_again_and_again():
    body = [launch(1, "attend", repeat=3, body="layer"), launch(2, "dot", "cublas", repeat=3, body="layer")]
    inner = launch(3, "step", repeat=6, body="inner")
    other = launch(4, "back", repeat=3, body="gradient")
    analysis = program(launch(0, "begin"), *body, inner, other, launch(5, "end"))
    layer = ["attend", "gemm", "step", "step"]
    measured = join(analysis, profile(["begin", *layer * 3, *["back"] * 3, "end"] * 2))
    assert [time.samples for time in measured.launches] == [2, 6, 6, 12, 6, 2]
    assert len(json.loads(trace_events(with_measured(analysis, measured)))["traceEvents"]) == 1 + 1 + 12 + 3 + 1


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (["norm_1", "nvjet", "tanh", "nvjet"], r"has launch 2, gelu .*shows tanh"),
        (["norm_1", "gelu", "nvjet"], r"has launch 1, custom-call.2 \(cublaslt\), the profile shows gelu"),
        (["norm_1", "nvjet"], "ends before launch 2, gelu"),
        (["other"] * 9, r"has launch 0, norm.1 \(norm_1\), the profile shows other"),
    ],
)
def test_a_profile_of_another_program_says_where_it_differs_first(names, words):
    with pytest.raises(ProfileMismatchError, match=words):
        join(MLP, profile(names))


def test_measured_of_another_program():
    measured = join(MLP, profile(CALL))
    other = replace(MLP, launches=(*MLP.launches[:2], launch(2, "tanh"), MLP.launches[3]))
    with pytest.raises(ProfileMismatchError, match=r"launch 2 is tanh \(tanh\) here, and there gelu \(gelu\)"):
        with_measured(other, measured)
    with pytest.raises(ProfileMismatchError, match="it has 3 launches, and the measured one 4"):
        with_measured(replace(MLP, launches=MLP.launches[:3]), measured)


def test_only_the_kernels_of_the_program_count():
    own = profile(f"{name}@{op.name}" for name, op in zip(CALL, MLP.launches, strict=True)).events
    foreign = tuple(replace(event, name="norm_1", module="jit_other") for event in own)
    host = tuple(replace(event, name="MemcpyH2D", operation="", module="") for event in own)
    measured = join(MLP, replace(profile(CALL), events=(*host, *foreign, *own, *own)))
    assert measured.calls == 2


def with_sums(times: Sequence[float], sums: float) -> Profile:
    """Two calls of MLP on a GPU, in each of which a sum over GPUs starts with the third kernel."""
    events = profile(CALL * 2, times).events
    beside = [
        KernelEvent(name="ncclDevKernel_AllReduce", start_us=e.start_us - 0.5, duration_us=sums) for e in events[2::4]
    ]
    return Profile(device="NVIDIA H200", events=tuple(sorted((*events, *beside), key=lambda e: e.start_us)))


def test_several_gpus_have_the_times_of_the_slowest_and_links_those_of_the_last_to_come():
    summed = replace(MLP, launches=(*MLP.launches, launch(4, "all-reduce.1", "collective")))
    fast, slow = with_sums([1, 10, 2, 20], sums=19), with_sums([1, 12, 2, 24], sums=4)
    measured = join(summed, fast, profile(["other"] * 9), slow)
    assert medians(measured) == {0: 1, 1: 12, 2: 2, 3: 24, 4: 4}
    # The sum is alone half a microsecond before gelu and half a one between gelu and the product behind it.
    assert (measured.kernel_us, measured.gap_us) == (1 + 12 + 2 + 24 + 1.5, 1.5)
    assert [each.measured_us for each in with_measured(summed, measured).launches] == [1, 12, 2, 24, 4]


def test_kernels_of_collectives_that_do_not_fit_have_no_times():
    measured = join(replace(MLP, launches=(*MLP.launches, launch(4, "sum", "collective"))), profile(CALL * 2))
    assert medians(measured) == {0: 5, 1: 5, 2: 5, 3: 5, 4: None}
    assert measured.notes == (
        "The profile shows 0 kernels of collectives in 2 calls of 1: their times are not known, and not in the total.",
    )


def test_reads_what_jax_profiler_writes(tmp_path: Path):
    events = profile([f"{name}@op" for name in CALL * 2], [4.25]).events
    data = ProfileData.text_proto_to_serialized_xspace(xspace(events[:4], events))
    folder = tmp_path / "plugins" / "profile" / "2026"
    folder.mkdir(parents=True)
    (folder / "vm.xplane.pb").write_bytes(data)
    found, fewer = read_profile(tmp_path)
    assert len(fewer.events) == 4
    assert found.device == "NVIDIA H200"
    assert [(e.name, e.operation, e.module) for e in found.events] == [(e.name, "op", "jit_f") for e in events]
    assert join(MLP, found).kernel_us == pytest.approx(4 * 4.25, abs=0.01)

    (folder / "vm.xplane.pb").write_bytes(data[:-20])
    with pytest.raises(DumpError, match="cut off"):
        read_profile(tmp_path)
    (folder / "vm.xplane.pb").write_bytes(ProfileData.text_proto_to_serialized_xspace("planes { name: '/host:CPU' }"))
    with pytest.raises(DumpError, match="no kernel of a GPU"):
        read_profile(tmp_path)
    with pytest.raises(DumpError, match=r"holds no \*.xplane.pb"):
        read_profile(tmp_path / "plugins" / "nothing")


def test_kernels_that_overlap_leave_no_gap():
    assert join(MLP, profile(CALL, [5, 6], gap=-1.0)).gap_us == 0
    assert join(MLP, profile(CALL, gap=0.25)).gap_us == 0.75


def test_a_profile_of_an_h200_in_a_command_buffer():
    """Of llama3-8b's forward pass at 1x512 under `best`: the GPU's part of what jax.profiler wrote."""
    (recorded,) = read_profile(Path(__file__).parent / "data" / "h200-1x512-best.xplane.pb")
    names = ["qkv_projection", "attention", "linear", "rms_norm", "gated_linear", "linear"]
    kernels = [f"{name}_mosaic_gpu_kernel" for name in ("rms_norm", *names)]
    block = program(launch(0, "loop_select_fusion"), *(launch(i, each, "mosaic") for i, each in enumerate(kernels, 1)))
    measured = join(block, recorded)
    assert (measured.device, measured.calls) == ("NVIDIA H200", 10)
    assert measured.kernel_us == pytest.approx(380.8, abs=0.1)
    assert medians(measured)[6] == pytest.approx(187, abs=1)
