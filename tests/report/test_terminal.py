from __future__ import annotations

import io
from dataclasses import replace

import pytest
from rich.console import Console

from hlo_analysis.diff import compare_analyses
from hlo_analysis.records import Comparison, Measured, Memory, SiteRecord, StrategyResult, Trial
from hlo_analysis.report import formats, render_html, render_notebook, render_terminal, sentences, verdict
from tests.report.example_steps import XLA_STEPS, Step
from tests.report.examples import analysis_of, with_times


def _printed(comparison: Comparison, width: int) -> str:
    console = Console(file=io.StringIO(), width=width, force_terminal=False)
    render_terminal(comparison, console)
    return console.file.getvalue()  # type: ignore[attr-defined]


@pytest.mark.parametrize("width", [80, 140])
def test_it_says_what_a_reader_must_know(comparison: Comparison, width: int):
    text = _printed(comparison, width)
    flat = " ".join(text.split())
    assert "On an H200, XLA makes 13 launches of this program; fusion saves 62% of the unfused HBM traffic" in flat
    assert "GEMM choice: replayed 6 of 6." in flat
    assert "Seconds to lower and compile, on this machine and with dumps: unfused 0.4 + 2.1" in flat
    assert "Numerics against float64: 4 of 4 within twice the baseline's error." in flat
    assert "xla_gemm_v2 has no analysis: XLA said: INTERNAL: no such thing" in flat
    assert "Registers and spills are unknown: ptxas was not asked." in flat
    assert "Use cuDNN attention" in flat
    assert max(map(len, text.splitlines())) <= width
    row = next(line for line in text.splitlines() if line.strip().startswith("xla_cudnn"))
    for cell in ("11", "3.32", "−72%", "90%", "4.49", "−22%", "6.44"):
        assert cell in row


def test_a_narrow_terminal_cuts_nothing_short(comparison: Comparison):
    text = _printed(comparison, 40)
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= 40
    assert "−72%" in text


def test_counted_and_estimated_stand_in_the_heads(comparison: Comparison):
    head = next(line for line in _printed(comparison, 140).splitlines() if line.strip().startswith("strategy"))
    assert head.split() == ["strategy", *["counted"] * 4, "estimated", "estimated", "counted"]


def test_waits_for_collectives_stand_beside_the_estimates(comparison: Comparison):
    first, *others = comparison.strategies
    assert first.analysis is not None
    launch, *rest = first.analysis.launches
    waiting = replace(first.analysis, launches=(replace(launch, kind="collective", exposed_us=1234.5), *rest))
    made = replace(comparison, strategies=(replace(first, analysis=waiting), *others))
    lines = [line.split() for line in _printed(made, 160).splitlines()]
    assert next(line for line in lines if line[:1] == ["unfused"])[-2] == "1.23"
    assert next(line for line in lines if line[:1] == ["pallas"])[-2] == "–"
    assert "Of it links, ms" in render_html(made)


def test_what_was_measured_stands_beside_the_estimates(comparison: Comparison):
    text = _printed(with_times(comparison), 160)
    head = next(line for line in text.splitlines() if line.strip().startswith("strategy"))
    assert head.split()[-3:] == ["counted", "measured", "measured"]
    assert "Measured on an NVIDIA H200 (bench, 2026-11-22): GPU time of all kernels, and wall clock of a call." in text
    assert "xla: 24 µs of gaps between its launches, 2.0 µs each, compiled in 2.0 s." in text
    assert "xla: the estimate of 2 of 13 launches is more than 2× off" in text


def test_markup_in_names_is_text(hostile: Comparison):
    name = "[bold red]name[/] [/]"
    first, second = hostile.strategies
    strategies = (replace(first, name=name), replace(second, error=name))
    renamed = replace(hostile, baseline=name, strategies=strategies)
    assert name in _printed(renamed, 200)


def test_mixed_gemm_choices_name_their_strategies(comparison: Comparison):
    first, *rest = comparison.strategies
    assert first.analysis is not None
    changed = replace(first.analysis, provenance=replace(first.analysis.provenance, gemm_choice="default"))
    text = _printed(replace(comparison, strategies=(replace(first, analysis=changed), *rest)), 200)
    assert "GEMM choice: default (no autotuning) (unfused); replayed 6 of 6 (xla, xla_cudnn, pallas)." in text


def test_failed_numerics_are_not_hidden(comparison: Comparison):
    strategies = [
        replace(s, numerics=replace(s.numerics, passed=False)) if s.name == "pallas" and s.numerics else s
        for s in comparison.strategies
    ]
    assert "FAILED: pallas" in _printed(replace(comparison, strategies=tuple(strategies)), 200)


def test_verdict_names_the_fastest_strategy_and_by_which_times(comparison: Comparison):
    said = verdict(comparison)
    assert said.startswith("6.95 → 5.40 ms (estimated, −22%) with xla_cudnn.")
    assert said.endswith("Fastest of 4 strategies (estimated): xla_cudnn, in 11 launches, −72% HBM traffic.")
    called = [replace(each, call=f"jax.jit({each.name})") for each in comparison.strategies]
    assert "(estimated, −22%) with `jax.jit(xla_cudnn)`" in verdict(replace(comparison, strategies=tuple(called)))
    best = replace(comparison, baseline="xla_cudnn")
    assert "On an H200, xla_cudnn makes 11 launches" in verdict(best)
    assert verdict(best).endswith("None of the other 3 strategies is faster (estimated).")


def test_measured_times_decide_only_if_every_strategy_has_one(comparison: Comparison):
    def timed(times: dict[str, float]) -> Comparison:
        strategies = []
        for each in comparison.strategies:
            if each.analysis and each.name in times:
                measured = Measured(device="NVIDIA H200", source="test", calls=1, kernel_us=times[each.name])
                each = replace(each, analysis=replace(each.analysis, measured=measured))
            strategies.append(each)
        return replace(comparison, strategies=tuple(strategies))

    everywhere = {"unfused": 9e3, "xla": 8e3, "xla_cudnn": 7e3, "pallas": 4e3}
    assert verdict(timed(everywhere)).startswith("8.00 → 4.00 ms (measured, −50%) with pallas")
    said = verdict(timed({"xla": 8e3, "pallas": 4e3}))
    assert said.startswith("6.95 → 5.40 ms (estimated, −22%) with xla_cudnn")
    assert "Fastest of 4 strategies (estimated, since not every strategy was measured): xla_cudnn" in said


def test_products_inside_opaque_kernels_make_the_roofline_a_lower_bound(comparison: Comparison):
    strategies = [
        replace(s, analysis=replace(s.analysis, traffic=replace(s.analysis.traffic, flops=10)))
        if s.name == "pallas" and s.analysis
        else s
        for s in comparison.strategies
    ]
    hidden = replace(comparison, strategies=tuple(strategies))
    assert "The roofline time of pallas is a lower bound" in verdict(hidden)
    assert formats.enumerated(["a", "b", "c"]) == "a, b and c"

    def bounds(shown: Comparison) -> list[int]:
        rows = {line.split()[0]: line for line in _printed(shown, 140).splitlines() if line.strip()}
        return [rows[name].count("≥") for name in ("unfused", "xla_cudnn", "pallas")]

    assert bounds(comparison) == [0, 0, 0]
    assert bounds(hidden) == [0, 0, 2]


def test_one_other_program_that_is_not_faster_is_named(comparison: Comparison):
    base, best = comparison["xla"], comparison["xla_cudnn"]
    two = replace(comparison, unfused=None, strategies=(base, best), baseline="xla_cudnn")
    assert verdict(two).endswith("xla is not faster (estimated).")
    same = replace(two, strategies=(replace(base, analysis=best.analysis), best))
    assert verdict(same).endswith("xla is not faster (estimated).")


def test_memory_that_nothing_was_said_of_is_no_zero(comparison: Comparison):
    base = comparison["xla"]
    assert base.analysis is not None
    silent = replace(base, analysis=replace(base.analysis, memory=Memory()))
    text = _printed(replace(comparison, unfused=None, strategies=(silent,)), 140)
    row = next(line for line in text.splitlines() if line.strip().startswith("xla"))
    assert row.split()[-1] == "–"


def test_what_to_do_names_place_launches_cause_and_the_worst_case(comparison: Comparison):
    text = _printed(with_times(comparison), 140)
    head, launches, cause = text[text.index("269 µs (") - 3 :].splitlines()[:3]
    assert head.startswith("3. 269 µs (3.8 %) above need measured  no known remedy")
    assert "block.py:114" in head
    assert launches.strip() == "1 launch: #5 softmax_fusion (triton)"
    assert cause.strip() == "why     A scatter adds 8192 rows into 2 1.50 ms at worst."


def test_where_the_time_goes_adds_up(comparison: Comparison):
    text = _printed(comparison, 140)
    rows = text[text.index("Where the time of xla goes") :].splitlines()[2:]
    shares = [int(row.split("%")[0].split()[-1]) for row in rows[: rows.index("")]]
    assert sum(shares) == pytest.approx(100, abs=3)
    assert len(shares) == 9, "the first 8 groups and the others"


def test_of_many_remedies_the_first_are_printed_and_all_counted(comparison: Comparison):
    base = comparison["xla"]
    assert base.analysis is not None
    hotspots = base.analysis.hotspots[:3] * 3
    hotspots = tuple(replace(each, kernel=f"k{place}", options=()) for place, each in enumerate(hotspots))
    many = replace(base, analysis=replace(base.analysis, hotspots=hotspots))
    text = _printed(replace(comparison, unfused=None, strategies=(many,)), 140)
    assert "the first 5 of 9 remedies" in text
    assert text.count("why  ") == 5


def test_a_program_without_hotspots_says_that_nothing_is_to_do(comparison: Comparison):
    base = comparison["xla"]
    assert base.analysis is not None
    quiet = replace(base, analysis=replace(base.analysis, hotspots=()))
    alone = replace(comparison, unfused=None, strategies=(quiet,))
    assert "What to do" not in _printed(alone, 140)
    assert verdict(alone).startswith("6.95 ms (estimated), and no remedy is known that makes it less.")


def test_the_first_remedy_is_the_answer_where_no_strategy_is_faster(comparison: Comparison):
    base = comparison["xla"]
    assert base.analysis is not None
    (item, *_) = base.analysis.hotspots
    item = replace(item, kernel="attention", source="m.py:7", options=())

    def said(trial: Trial | None) -> str:
        tried = replace(base, analysis=replace(base.analysis, hotspots=(replace(item, trial=trial),)))
        return verdict(replace(comparison, unfused=None, strategies=(tried,)))

    helps = Trial(change="attention by xlafuse.fuse", saved_us=1e3, helps=True)
    assert said(helps).startswith("6.95 → 5.95 ms (estimated, −14%) with attention at m.py:7.")
    assert "can go with attention at m.py:7, not tried." in said(None)
    assert "no remedy is known" in said(replace(helps, helps=False))


def _with_trial(comparison: Comparison, trial: Trial) -> str:
    base = comparison["xla"]
    assert base.analysis is not None
    hotspots = tuple(replace(each, trial=trial) for each in base.analysis.hotspots[:1])
    shown = replace(base, analysis=replace(base.analysis, hotspots=hotspots))
    return _printed(replace(comparison, unfused=None, strategies=(shown,)), 200)


def test_a_remedy_that_was_tried_has_its_effect_and_one_without_is_no_advice(comparison: Comparison):
    remedy = comparison["xla"].analysis.missed[0].remedy  # type: ignore[union-attr]
    saved = {"saved_launches": 2, "saved_bytes": 67_000_000, "saved_us": 18.2}
    text = _with_trial(comparison, Trial(change="softmax by xlafuse.fuse", helps=True, **saved))
    assert "tried   softmax by xlafuse.fuse: 2 launches and 67.0 MB fewer, 18 µs less (estimated)" in text
    assert remedy in text
    lost = {"saved_launches": -1, "saved_bytes": 0, "saved_us": -3.0}
    text = _with_trial(comparison, Trial(change="compiler option A=1", **lost))
    assert "tried   compiler option A=1: no gain (1 launch more, 3.0 µs more (estimated))" in text
    assert remedy not in text
    text = _with_trial(comparison, Trial(change="compiler option A=1"))
    assert "no gain (the program stays the same)" in text
    text = _with_trial(comparison, Trial(change="softmax by xlafuse.fuse", error="m.py:3: scale comes after the cast"))
    assert "tried   softmax by xlafuse.fuse: m.py:3: scale comes after the cast" in text
    assert remedy in text  # it can still be followed by hand


def test_sites_are_listed_with_what_was_refused(comparison: Comparison):
    taken = SiteRecord(operation="rms_norm", source="m.py:3", outcome="taken", implementation="mosaic")
    refused = [
        SiteRecord(operation="softmax", source=f"m.py:{line}", outcome="refused", reason="[red]axes differ")
        for line in range(10, 17)
    ]
    left = SiteRecord(operation="linear", source="m.py:5", outcome="left to XLA")
    base = replace(comparison["xla"], sites=(taken, taken, *refused))
    text = _printed(replace(comparison, unfused=None, strategies=(base,)), 140)
    assert "Sites of xla: 2 taken, 7 refused" in text
    assert "+ m.py:3: rms_norm by mosaic (2 times)" in text
    assert "- m.py:10: no softmax: [red]axes differ" in text
    assert "m.py:15" not in text
    assert "and 2 more refused" in text
    assert "Sites of" not in _printed(comparison, 140)
    base = replace(base, sites=(left, left, *base.sites))
    text = _printed(replace(comparison, unfused=None, strategies=(base,)), 140)
    assert "Sites of xla: 2 taken, 2 left to XLA, 7 refused" in text
    assert "= m.py:5: linear left to XLA (2 times)" in text


def test_verdict_of_one_launch_with_nothing_between():
    step = Step(name="add", kind="loop", scope="", shape="f32[4]", size=16, reads=("x",))
    result = StrategyResult(name="xla", description="", analysis=analysis_of((step,), "xla"))
    said = verdict(compare_analyses("add", [result], "xla"))
    assert said.endswith("On an H200, XLA makes 1 launch of this program; no value goes through HBM between launches.")


@pytest.mark.parametrize(
    ("scope", "source", "place"),
    [
        ("", "model.py:7", ", all of it from model.py:7."),
        ("", None, "still goes through HBM between launches."),
        ("model/layers/0", None, ", all of it from layers 0."),
        ("12", None, ", all of it from scope 12."),
        ("mlp/.", None, ", all of it from mlp."),
    ],
)
def test_the_verdict_says_where_most_traffic_comes_from(scope: str, source: str | None, place: str):
    analysis = analysis_of(XLA_STEPS, "xla")
    launches = (replace(launch, scope=scope, scopes=(), source=source) for launch in analysis.launches)
    result = StrategyResult(name="xla", description="", analysis=replace(analysis, launches=tuple(launches)))
    assert verdict(compare_analyses("f", [result], "xla")).endswith(place)


def test_numbered_scopes_count_as_one_and_have_a_name():
    analysis = analysis_of(XLA_STEPS, "xla")
    numbered = (replace(launch, scope=str(launch.index), scopes=(), source=None) for launch in analysis.launches)
    result = StrategyResult(name="xla", description="", analysis=replace(analysis, launches=tuple(numbered)))
    assert verdict(compare_analyses("f", [result], "xla")).endswith(", all of it from numbered scopes.")


def test_intermediates_by_scope_add_up():
    analysis = analysis_of(XLA_STEPS, "xla")
    scopes = sentences.intermediates_by_scope(analysis)
    assert sum(scopes.values()) == analysis.traffic.intermediate_bytes
    assert next(iter(scopes)) == "block/attention"


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (formats.format_bytes(0), "0 B"),
        (formats.format_bytes(999), "999 B"),
        (formats.format_bytes(1234567), "1.2 MB"),
        (formats.format_bytes(123456789), "123 MB"),
        (formats.format_bytes(-2.5e9), "-2.5 GB"),
        (formats.format_us(0.5), "0.5 µs"),
        (formats.format_us(850), "850 µs"),
        (formats.format_us(5534), "5.53 ms"),
        (formats.format_us(1.2e6), "1.20 s"),
        (formats.format_flops(0), "0 FLOP"),
        (formats.format_flops(4.1e12), "4.1 TFLOP"),
        (formats.format_change(88, 100), "−12%"),
        (formats.format_change(103, 100), "+3.0%"),
        (formats.format_change(100.01, 100), "≈"),
        (formats.format_change(5, 5), "="),
        (formats.format_change(5, 0), ""),
        (formats.plural(1, "launch"), "1 launch"),
        (formats.plural(2, "launch"), "2 launches"),
        (formats.plural(2, "edge"), "2 edges"),
    ],
)
def test_numbers_as_people_read_them(made: str, said: str):
    assert made == said


def test_small_programs_get_small_units():
    from hlo_analysis.diff import compare_analyses
    from hlo_analysis.records import StrategyResult

    analysis = analysis_of(XLA_STEPS[:1], "f")  # 67.1 MB read, 16 µs
    text = _printed(compare_analyses("f", [StrategyResult(name="f", description="", analysis=analysis)], "f"), 140)
    assert "XLA makes 1 launch" in text
    assert "HBM MB" in text
    assert "roofline µs" in text
    row = next(line for line in text.splitlines() if line.strip().startswith("f *"))
    assert row.split()[-5:] == ["reduction", "67.14", "15.99", "18.29", "6.44"]


def test_savings_of_all_strategies_have_one_baseline(comparison: Comparison):
    unfused = comparison["unfused"].analysis
    assert unfused is not None
    for result in comparison.strategies:
        moved = result.analysis and result.analysis.traffic.bytes
        saved = None if moved is None else unfused.traffic.bytes - moved
        assert comparison.saved_bytes(result.name) == saved
    text = _printed(comparison, 140)
    rows = {line.split()[0]: line for line in text.splitlines() if line.strip()}
    assert [rows[name].count(share) for name, share in (("unfused", " 0%"), ("xla", " 62%"), ("pallas", " 62%"))] == [
        1
    ] * 3
    assert "of the HBM traffic of unfused" in text


def test_without_an_unfused_strategy_nothing_is_said_of_savings(comparison: Comparison):
    kept = tuple(result for result in comparison.strategies if result.name != "unfused")
    without = replace(comparison, strategies=kept, rows=(), unfused=None)
    for text in (_printed(without, 140), render_html(without).split("<script")[0], render_notebook(without)):
        assert "saved" not in text.lower().replace('class="saved"', "")
        assert "fusion saves" not in text


def test_records_are_shown_in_a_line_or_two(comparison: Comparison):
    analysis = comparison["xla"].analysis
    assert analysis is not None
    for record, said in (
        (analysis, "Analysis('xla' on h200: 13 launches"),
        (analysis.launches[5], "Launch(#5 "),
        (comparison, "xla_gemm_v2 (no analysis)"),
    ):
        assert said in repr(record)
        assert len(repr(record)) < 240
