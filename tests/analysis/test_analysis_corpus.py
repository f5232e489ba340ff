"""What must hold for the analysis of every program, and what each program of the corpus shows."""

from __future__ import annotations

import io
import shutil
from dataclasses import replace

import pytest
from rich.console import Console

from hlo_analysis import Analysis, Capture, Comparison, DumpError, analyze, from_json, to_json
from hlo_analysis.explain import edges_of
from hlo_analysis.hlo import parse_module
from hlo_analysis.program.dataflow import Dataflow
from hlo_analysis.program.launch_sites import find_launches
from hlo_analysis.program.thunks import WAITS, parse_thunk_sequence
from hlo_analysis.records import Memory, StrategyResult
from hlo_analysis.report import render_html, render_terminal
from hlo_analysis.report.edges import edge_story
from xlafuse.catalogue import KERNELS

pytestmark = pytest.mark.slow  # the corpus takes a minute to compile and to analyze

CONTAINERS = ("kSequential", "kWhile", "kConditional", "kAsyncStart", "kDynamicSliceFusion")

# Kinds of the launches, each once, in alphabetical order.
KINDS = {
    "collectives": ["collective", "loop", "triton_gemm"],
    "column_sums": ["reduction"],
    "concatenate": ["concatenate", "transpose"],
    "conditional": ["loop", "triton_gemm"],
    "convolution": ["cudnn", "loop", "transpose"],
    "copies": ["copy", "loop"],
    "cublas_batch": ["cublaslt"],
    "cublas_bias_gelu": ["cublaslt"],
    "cudnn_attention": ["cudnn"],
    "fft": ["other"],
    "gather_scatter": ["copy", "loop", "scatter"],
    "int4": ["loop"],
    "int8_product": ["triton_gemm"],
    "linear_algebra": ["copy", "cublas", "custom_call", "transpose", "triton_gemm"],
    "many_results": ["reduction"],
    "mosaic": ["loop", "mosaic"],
    "nested_loops": ["copy", "loop", "triton_gemm"],
    "read_slice": ["loop"],
    "scan": ["copy", "loop", "reduction", "triton_gemm"],
    "softmax": ["triton"],
    "sort": ["copy", "sort"],
    "sort_passes": ["copy", "sort"],
    "top_k": ["sort"],
    "update_slice": ["copy", "loop"],
}


def test_the_corpus_is_whole(analyses):
    assert len(analyses) >= 28
    assert set(KINDS) <= set(analyses)


def test_every_launching_thunk_is_one_launch(corpus, analyses):
    for name, capture in corpus.items():
        lines = capture.require("thunk_sequence").splitlines()
        kinds = [word for line in lines for word in line.split() if word.startswith("k") and word[1].isupper()]
        # Thunks that launch, counted from the text alone: a line (or two on a line) each.
        thunks = sum(line.count(": k") for line in lines)
        silent = sum(kinds.count(kind) for kind in (*CONTAINERS, *WAITS))
        assert len(analyses[name].launches) == thunks - silent, name
        forest = parse_thunk_sequence(capture.require("thunk_sequence"))
        ids = [thunk.id for root in forest for thunk in root.walk() if thunk.launches]
        assert [launch.thunk_id for launch in analyses[name].launches] == ids, name


def test_every_entry_instruction_launches_or_has_a_reason(corpus, analyses):
    for name, capture in corpus.items():
        module = parse_module(capture.require("final_hlo"))
        entry = {instruction for instruction in module.entry.instructions if "#" not in instruction}
        launched = {launch.name for launch in analyses[name].launches} & entry
        silent = dict(analyses[name].silent)
        assert launched | set(silent) == entry, name
        assert not launched & set(silent), name
        assert "not in the thunk list" not in silent.values(), name


def test_every_instruction_of_a_loop_or_branch_launches_or_is_silent(corpus, analyses):
    for name, capture in corpus.items():
        module = parse_module(capture.require("final_hlo"))
        homes = {
            instruction: computation.name
            for computation in module.computations.values()
            for instruction in computation.instructions
        }
        flow = Dataflow(module)
        for launch in analyses[name].launches:
            assert flow.home(homes[launch.name]) == launch.computation, (name, launch.name)
            assert "async" not in launch.computation


def test_fused_traffic_is_at_most_unfused(analyses):
    for name, analysis in analyses.items():
        for launch in analysis.launches:
            moved = launch.bytes_read + launch.bytes_written
            assert moved <= launch.unfused_bytes, (name, launch.name)
        assert analysis.traffic.saved_bytes >= 0
        assert analysis.traffic.intermediate_bytes <= analysis.traffic.bytes, name


def test_producers_are_launches_that_write_the_value(analyses):
    for name, analysis in analyses.items():
        written = {value.name for launch in analysis.launches for value in launch.outputs}
        for launch in analysis.launches:
            for value in launch.inputs:
                assert (value.producer is not None) == (value.name in written), (name, value)
                if value.producer is not None:
                    assert value.name in {out.name for out in analysis.launches[value.producer].outputs}
        for value in analysis.intermediates:
            assert value.name in {out.name for out in analysis.launches[value.producer].outputs}
            assert value.consumers, (name, value)


def test_a_launch_is_among_the_readers_of_each_of_its_inputs(analyses):
    for name, analysis in analyses.items():
        readers = {value.name: value.consumers for value in analysis.intermediates}
        for launch in analysis.launches:
            for value in launch.inputs:
                assert value.producer is None or launch.index in readers[value.name], (name, launch.name, value.name)


def test_every_program_has_every_view(corpus):
    for name, capture in corpus.items():
        analysis = analyze(capture, label=name, catalogue=KERNELS)
        only = StrategyResult(name=name, description="", analysis=analysis)
        comparison = Comparison(title=name, baseline=name, strategies=(only,))
        render_terminal(comparison, Console(file=io.StringIO(), width=80))
        assert name in render_html(comparison)
        assert from_json(Analysis, to_json(analysis)) == analysis, name
        assert all(edge_story(analysis, edge) for edge in edges_of(analysis)), name


def test_totals_are_sums_over_launches(analyses):
    for analysis in analyses.values():
        runs = [launch for launch in analysis.launches for _ in range(launch.repeat)]
        assert analysis.traffic.bytes == sum(launch.bytes_read + launch.bytes_written for launch in runs)
        assert analysis.traffic.flops == sum(launch.flops for launch in runs)
        assert analysis.launch_count == len(runs)
        assert analysis.roofline_us == pytest.approx(sum(launch.roofline_us for launch in runs))


@pytest.mark.parametrize("name", KINDS)
def test_kinds(analyses, name):
    assert sorted({launch.kind for launch in analyses[name].launches}) == KINDS[name]


def launches(analysis, kind):
    return [launch for launch in analysis.launches if launch.kind == kind]


def test_loops_repeat(analyses):
    nested = {launch.name: launch for launch in analyses["nested_loops"].launches}
    (product,) = launches(analyses["nested_loops"], "triton_gemm")
    assert product.repeat == 12
    # A loop whose trip count is known never evaluates its condition.
    assert sorted(launch.repeat for launch in nested.values() if "compare" in launch.name) == [0, 0]
    (scanned,) = launches(analyses["scan"], "triton_gemm")
    assert scanned.repeat == 5
    assert analyses["scan"].provenance.notes == analyses["softmax"].provenance.notes
    assert any("trip count is not known" in note for note in analyses["while_dynamic"].provenance.notes)
    assert any("every branch is counted" in note for note in analyses["conditional"].provenance.notes)


def test_a_carried_value_comes_from_the_previous_iteration(analyses):
    analysis = analyses["while_dynamic"]
    (body,) = [launch for launch in analysis.launches if launch.name.startswith("loop_multiply")]
    assert [value.producer for value in body.inputs] == [body.index]


def test_scan_reads_and_writes_one_slice_an_iteration(analyses):
    row = 256 * 64 * 4
    (update,) = [launch for launch in analyses["scan_outputs"].launches if "update_slice" in launch.name]
    # The carried row, the input's row, and the loop counter; the stacked result is written a row at a time.
    assert (update.repeat, update.bytes_read, update.bytes_written) == (32, 2 * row + 4, row)
    assert [value.bytes for value in update.outputs] == [32 * row]


def test_update_in_place_writes_the_update_alone(analyses):
    copy, update = analyses["update_slice"].launches
    assert copy.bytes_read == copy.bytes_written == 16 * 1024 * 128 * 4
    assert (update.bytes_read, update.bytes_written) == (1024 * 128 * 4 + 4, 1024 * 128 * 4)
    (read,) = analyses["read_slice"].launches
    assert (read.bytes_read, read.bytes_written) == (1024 * 128 * 4 + 4, 1024 * 128 * 4)


def test_gather_and_scatter_touch_the_rows_alone(analyses):
    rows = 64 * 128 * 4
    (gather,) = launches(analyses["gather_scatter"], "loop")
    assert (gather.bytes_read, gather.bytes_written) == (rows + 64 * 4, rows)
    (scatter,) = launches(analyses["gather_scatter"], "scatter")
    # It adds, so it reads the rows that it replaces, the updates and the indices.
    assert (scatter.bytes_read, scatter.bytes_written) == (2 * rows + 64 * 4, rows)


def test_library_scratch_is_no_traffic(analyses):
    (product,) = analyses["cublas_bias_gelu"].launches
    assert product.bytes_read == 2 * (512 * 1024 + 1024 * 2048 + 2048)
    assert [value.shape for value in product.outputs] == ["bf16[512,2048]"]
    assert product.flops == 2 * 512 * 1024 * 2048
    # Unfused, bias and GELU would each read and write the result once more.
    assert product.unfused_bytes - product.bytes_read - product.bytes_written == 2 * 2 * (2 * 512 * 2048)
    (batch,) = analyses["cublas_batch"].launches
    assert batch.flops == 2 * 8 * 512 * 1024 * 64


def test_cudnn_attention(analyses):
    forward, backward = analyses["cudnn_attention"].launches
    assert (forward.phase, backward.phase) == ("forward", "backward")
    pair = 2 * 2 * 8 * (512 * 513 // 2) * 64  # one product, causal: the scores below the diagonal and on it
    assert (forward.flops, backward.flops) == (2 * pair, 5 * pair)
    query, key, rows = 2 * 512 * 8 * 64 * 2, 2 * 512 * 2 * 64 * 2, 2 * 8 * 512 * 4
    assert forward.bytes_read == query + 2 * key
    assert forward.bytes_written == query + rows
    assert backward.bytes_written == query + 2 * key


def test_convolution_flops(analyses):
    (convolution,) = launches(analyses["convolution"], "cudnn")
    assert convolution.flops == 2 * (8 * 64 * 112 * 112) * (3 * 7 * 7)


def test_a_sort_takes_several_launches_of_one_instruction(analyses):
    copy, *passes = analyses["sort_passes"].launches
    assert {launch.name for launch in passes} == {copy.name}
    assert len(passes) > 2
    # Keys and positions, in place.
    assert {(launch.bytes_read, launch.bytes_written) for launch in passes} == {(8 << 16, 8 << 16)}
    assert (copy.bytes_read, copy.bytes_written) == (4 << 16, 4 << 16)
    assert analyses["sort_passes"].intermediates == ()


def test_asynchronous_collectives_are_launches(analyses):
    names = [launch.name.split(".")[0] for launch in launches(analyses["collectives"], "collective")]
    assert sorted(names) == ["all_gather", "all_to_all", "ppermute", "psum", "reduce_scatter"]
    reasons = dict(analyses["collectives"].silent)
    assert "waits for an asynchronous launch" in reasons.values()


def test_int4_is_packed(analyses):
    (launch,) = analyses["int4"].launches
    assert (launch.bytes_read, launch.bytes_written) == (1024 * 1024 // 2, 1024 * 1024 * 2)


def test_unknown_kernels_count_their_operands_and_results(analyses):
    (kernel,) = launches(analyses["mosaic"], "mosaic")
    assert (kernel.bytes_read, kernel.bytes_written, kernel.flops) == (128 * 128 * 4, 128 * 128 * 4, 0)
    assert kernel.unfused_bytes == 2 * 128 * 128 * 4
    assert any("inside Mosaic GPU kernels is not known" in note for note in analyses["mosaic"].provenance.notes)
    # Its module is not for reading.
    assert kernel.kernel is not None
    assert kernel.kernel.endswith("_mosaic_gpu_kernel")
    assert len(kernel.hlo) < 5000
    assert kernel.hlo.startswith("%mpmd_map") or "mosaic_gpu" in kernel.hlo


def test_mlp_gradient(analyses):
    analysis = analyses["mlp_gradient"]
    products = [launch for launch in analysis.launches if launch.kind in ("triton_gemm", "cublaslt")]
    # Two products forward, four backward, each of 1024 x 256 x 896.
    assert [round(launch.flops / (2 * 1024 * 256 * 896), 1) for launch in products] == [1.0] * 6
    assert {(launch.scope, launch.phase) for launch in analysis.launches} >= {("mlp", "forward"), ("mlp", "backward")}
    assert all(launch.source and launch.source.startswith("corpus.py:") for launch in analysis.launches)
    # XLA's own estimate stands beside ours where it has a usable one.
    loops = [launch for launch in analysis.launches if launch.kind in ("loop", "reduction", "triton")]
    assert loops and all(launch.xla_estimate_us and launch.xla_estimate_us < 1e4 for launch in loops)
    assert all(launch.xla_estimate_us is None for launch in analysis.launches if launch.kind == "triton_gemm")
    assert analysis.memory.argument_bytes == 2 * (2 * 512 * 256 + 256 + 2 * 256 * 896)


def test_without_a_thunk_list_launches_are_read_off_the_module(corpus):
    module = parse_module(corpus["nested_loops"].require("final_hlo"))
    listed = find_launches(
        module, corpus["nested_loops"].require("thunk_sequence"), corpus["nested_loops"].require("thunk_metadata")
    )
    guessed = find_launches(module, None, None)
    assert {(site.instruction.name, site.repeat) for site in guessed.sites} == {
        (site.instruction.name, site.repeat) for site in listed.sites
    }
    assert "no thunk list" in guessed.notes[0]


def test_a_capture_that_stopped_before_machine_code(corpus):
    whole = corpus["mlp_gradient"]
    late = ("final_hlo", "thunk_sequence", "thunk_metadata", "buffer_assignment")
    files = {key: name for key, name in whole.manifest.files.items() if key not in late}
    stopped = Capture(whole.path, replace(whole.manifest, files=files, memory=Memory()))
    analysis = analyze(stopped)
    # The products that config assignment splits over k are one launch here.
    assert len(analysis.launches) >= 10
    assert {"triton_gemm", "loop", "reduction"} <= {launch.kind for launch in analysis.launches}
    assert any("no final module" in note for note in analysis.provenance.notes)
    assert any("no thunk list" in note for note in analysis.provenance.notes)
    nothing = Capture(whole.path, replace(whole.manifest, files={}))
    with pytest.raises(DumpError, match="no HLO text to analyse"):
        analyze(nothing)


def test_a_thunk_list_that_was_cut_off(corpus, tmp_path):
    whole = corpus["mlp_gradient"]
    shutil.copytree(whole.path, tmp_path / "cut")
    sequence = tmp_path / "cut" / whole.manifest.files["thunk_sequence"]
    sequence.write_text("".join(sequence.read_text().splitlines(keepends=True)[:3]))
    with pytest.raises(DumpError, match="cut off"):
        analyze(Capture.load(tmp_path / "cut"))
