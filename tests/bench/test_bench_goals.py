"""Which goals are missed, and what the counters say limits those kernels."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from test_bench_results import day, measured, results, shape

from pallas_kernels import get_op
from xlafuse.bench.counters import NO_COUNTERS, Counters, limit, load_counters
from xlafuse.bench.environment import Activity, Spread
from xlafuse.bench.goal_tables import goal_summary, goal_tables, missed_cases
from xlafuse.bench.goals import GOALS, Verdict, small_goals, unmeasured, verdicts
from xlafuse.bench.results import Problem, Results, ResultsError, merge
from xlafuse.bench.rows import rows

LAUNCH = {
    "case": "rms_norm:forward:8192x8192-bfloat16",
    "us": 100.0,
    "dram_percent": 70.0,
    "issue_percent": 30.0,
    "warps_percent": 20.0,
    "registers": 168.0,
    **{f"pipe_{pipe}_percent": 10.0 for pipe in ("alu", "fma", "xu", "lsu")},
    "stall_long_scoreboard": 3.0,
    "stall_barrier": 4.0,
}


def timed(copy, xla, ours, spec="8192x8192-bfloat16", **more):
    candidates = (
        measured("copy", "ceiling", copy),
        measured("xla", "implementation", xla),
        measured("mosaic", "implementation", ours),
    )
    return shape(spec, candidates=candidates, **more)


def judged(*shapes: Any, to: str | None = None) -> list[Verdict]:
    return [v for v in verdicts(rows(results(*shapes))) if to is None or v.goal.to == to]


@pytest.mark.parametrize(
    ("copy", "xla", "ours", "met"),
    [(97.0, 150.0, 100.0, [True, True]), (96.4, 150.0, 100.0, [False, True]), (96.6, 139.6, 100.0, [True, True]),
     (97.0, 139.4, 100.0, [True, False]), (90.0, 110.0, 100.0, [False, False])],
)  # fmt: skip
def test_norms_forward_need_97_percent_of_the_copy_and_1_4_over_xla(copy, xla, ours, met):
    of_copy, of_xla = judged(timed(copy, xla, ours))
    assert [of_copy.goal.to, of_xla.goal.to] == ["copy", "xla"]
    assert [of_copy.is_met, of_xla.is_met] == met
    assert of_xla.copy_ratio == pytest.approx(xla / copy)


def test_goals_are_about_their_shapes_phases_and_dtypes():
    assert judged(timed(1, 1, 1, spec="8192x4096-bfloat16-residual")) == []
    assert [v.is_met for v in judged(timed(88, 290, 100, phase="backward"))] == [True, False]
    wide = timed(96, 110, 100, spec="16384x4096-float32-gelu_tanh", op="bias_activation")
    assert [(v.goal.to, v.is_met) for v in judged(wide)] == [("copy", True)]


@pytest.mark.parametrize("goal", GOALS, ids=lambda goal: f"{goal.operations[0]}-{'-'.join(goal.phases)}-{goal.to}")
def test_every_shape_of_a_goal_is_timed(goal):
    """A pattern that no spec of the registry has would be a goal that nothing is held to."""
    assert all(get_op(name).tagged("bench") for name in goal.operations)
    for pattern in goal.shapes:
        assert any(replace(goal, shapes=(pattern,)).covers(*call) for call in goal.calls()), pattern


def test_small_calls_may_take_a_microsecond_longer():
    fine = timed(1.0, 2.0, 2.9, spec="1x4096-bfloat16-residual", bytes=10**6)
    middling = timed(10.0, 20.0, 29.0, spec="8192x1024-bfloat16", bytes=10**6)
    decode = timed(1.0, 2.0, 3.5, spec="16x1x32+8x128-bfloat16-positions_a_batch", bytes=10**6, op="rope")
    names = {name for goal in small_goals() for name in goal.shapes}
    assert {fine.spec, decode.spec} <= names
    found = judged(fine, middling, decode, to="small")
    assert {v.shapes[0].spec: v.is_met for v in found} == {fine.spec: True, decode.spec: False}
    text = goal_tables(results(fine, decode), NO_COUNTERS)
    assert "Of 2 measured goals 1 are met" in text
    assert "| **0.86** | 1.00 | XLA with 1 µs more |" in text


def test_table_has_what_misses_with_its_counters(tmp_path):
    path = tmp_path / "counters.json"
    assert load_counters(path) is NO_COUNTERS
    read = {"schema_version": 1, "read_at": "2026-01-02T03:04Z", "commit": "abc"}
    path.write_text(json.dumps({**read, "launches": [{**LAUNCH, "us": 5.0}, LAUNCH]}))
    kept = results(timed(90.0, 200.0, 100.0), timed(97.0, 120.0, 100.0, spec="16384x4096-float32-residual"))
    in_reach = timed(97.0, 138.0, 100.0, spec="32768x4096-bfloat16")
    assert missed_cases(kept) == [LAUNCH["case"]]
    assert missed_cases(results(in_reach)) == ["rms_norm:forward:32768x4096-bfloat16"]
    text = goal_tables(kept, load_counters(path))
    assert "Of 4 measured goals 2 are met" in text
    why = "latency: warps wait for barriers (barrier 4.0), 20 % of them fit (168 registers); DRAM 70 %"
    assert "Counters read 2026-01-02 03:04 UTC, commit abc." in text
    assert f"| 8192x8192-bf16 | **0.90** | 0.97 | copy | – | – | – | {why} |" in text
    assert "| **1.20** | 1.40 | XLA | – | – | – | not even the copy reaches it (1.24) |" in text
    path.write_text('{"schema_version": 9}')
    with pytest.raises(ResultsError, match="schema version 9, expected 1"):
        load_counters(path)
    met = results(timed(97.0, 150.0, 100.0))
    assert "what limits it" not in goal_tables(met, NO_COUNTERS)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"dram_percent": 88.0, "issue_percent": 90.0}, "memory: DRAM 88 %"),
        ({"issue_percent": 80.0, "pipe_fma_percent": 50.0}, "instruction issue: 80 % (fma pipe 50 %); DRAM 70 %"),
        ({"pipe_xu_percent": 75.0}, "xu pipe: 75 %; DRAM 70 %"),
        ({"pipe_tensor_percent": 91.0, "issue_percent": 80.0}, "tensor cores: 91 %; DRAM 70 %"),
        ({"pipe_tensor_percent": 40.0, "pipe_xu_percent": 75.0}, "xu pipe: 75 %; DRAM 70 %, tensor cores 40 %"),
        ({"stall_lg_throttle": 9.0}, "latency: warps wait for the queue of global accesses (lg_throttle 9.0)"),
    ],
)
def test_the_busiest_unit_is_the_limit(changes, words):
    assert limit([{**LAUNCH, **changes}]).startswith(words)


def test_other_launches_are_named_where_they_take_long():
    assert limit([LAUNCH, {**LAUNCH, "us": 20.0}]).startswith("1 other launches, 20 µs; latency")
    assert limit([LAUNCH, {**LAUNCH, "us": 2.0}]).startswith("latency")


def speeds(*shapes: Any, started: str = "1") -> list[Verdict]:
    return verdicts(rows(results(*shapes, started=started)))


def attention(
    spec: str, phase: str = "forward", *, ours: float = 100.0, variants: dict[str, float] | None = None, **us
):
    candidates = [measured("copy", "ceiling", 1.0), measured("mosaic", "implementation", ours)]
    candidates += [measured(name, "implementation" if name == "xla" else "peer", value) for name, value in us.items()]
    candidates += [measured(f"variant: {name}", "variant", value) for name, value in (variants or {}).items()]
    return shape(spec, op="attention", phase=phase, candidates=tuple(candidates))


CAUSAL = "4x4096x4096x32x8x128-bfloat16-causal"


def test_products_are_held_to_the_fastest_rival():
    """Liger, faster than XLA here, is the one that counts; the bar is 1.00."""
    slow = shape("8192-4096-4096-bfloat16", op="linear", bytes=168 * 2**20, us=343.6)
    fast = shape("8192-4096-4096-bfloat16", op="linear", bytes=168 * 2**20, us=250.0)
    busy = Activity(samples=3, quantities={"sm_clock_mhz": Spread(least=1500.0, median=1700.0, most=1980.0),
                                           "power_watts": Spread(least=120.0, median=650.0, most=698.0)})  # fmt: skip
    (verdict,) = speeds(slow)
    assert (verdict.than, verdict.absent, verdict.is_met) == ("Liger", ("torch.compile",), False)
    assert speeds(fast)[0].is_met
    kept = results(replace(slow, activity=busy))
    text = goal_tables(kept, NO_COUNTERS)
    why = "power limit: the clock fell to 1500 of 1980 MHz at up to 698 W; counters not read"
    cells = f"**0.87** | 1.00 | Liger | 800 | 1700 (1500) | 650 (698) | {why}"
    assert f"| `linear` | forward | 8192-4096-4096-bf16 | {cells} |" in text
    assert "| torch.compile | `linear` | forward | 8192-4096-4096-bf16 (missed) |" in text
    case = "linear:forward:8192-4096-4096-bfloat16"
    launch = {**LAUNCH, "case": case, "us": 340.0, "sm_cycles": 340.0 * 1600, "pipe_tensor_percent": 96.0}
    read = goal_tables(kept, Counters(cases={case: [launch]}, read="today"))
    assert "power: a clock of 1600 of 1980 MHz within the launch; power limit: the clock fell to 1500" in read
    assert missed_cases(kept) == ["linear:forward:8192-4096-4096-bfloat16"]
    assert goal_summary(results(fast)).startswith(
        "Of 1 measured goals 1 are met, 1 of them not yet timed beside all rivals of the goal; "
    )


def test_a_rival_of_any_run_counts_with_ours_of_that_run():
    """torch.compile took turns with an older kernel of ours, and was ahead of it."""
    old = shape("8192-4096-4096-bfloat16", op="linear", us=100.0, candidates=(
        measured("copy", "ceiling", 1.0), measured("mosaic", "implementation", 100.0),
        measured("torch_compile", "peer", 98.0)))  # fmt: skip
    new = shape("8192-4096-4096-bfloat16", op="linear", us=90.0)
    merged = merge([results(old, started=day(1)), results(new, started=day(2))])
    (verdict,) = verdicts(rows(merged))
    assert (verdict.than, verdict.ratio, verdict.absent) == ("torch.compile, run 1", 0.98, ())


def test_both_passes_are_added_up_within_a_visit():
    """cuDNN is behind forward and ahead backward; PyTorch was timed forward alone, and does not count."""
    forward = attention(CAUSAL, ours=100.0, cudnn=120.0, torch_eager=90.0)
    backward = attention(CAUSAL, "backward", ours=200.0, cudnn=189.0)

    def both(*parts: Results) -> list[Verdict]:
        return [v for v in verdicts(rows(merge(parts))) if v.phase == "forward + backward"]

    (verdict,) = both(results(forward, backward))
    assert (verdict.than, verdict.ratio, verdict.goal.least, verdict.is_met) == ("cuDNN", 309 / 300, 1.03, True)
    assert verdict.absent == ("PyTorch", "jla")
    assert verdict.teraflops > 0
    early, later, next_day = (f"2026-01-0{day}T00:{minute}:00+00:00" for day, minute in ((1, 10), (1, 40), (2, 10)))
    one_visit = (results(forward, started=early), results(backward, started=later))
    assert [found.ratio for found in both(*one_visit)] == [309 / 300]
    two_visits = (one_visit[0], results(backward, started=next_day))
    assert both(*two_visits) == []
    absent = [a for a in unmeasured(rows(merge(two_visits))) if a[2:] == ("forward + backward", CAUSAL)]
    assert [goal.words for goal, *_ in absent] == ["1.03 × the fastest rival"]


def test_dropout_is_held_to_its_own_speed_without():
    dropped = f"{CAUSAL}-dropout_0.1"
    kept = results(
        *(attention(CAUSAL, phase, ours=80.0) for phase in ("forward", "backward")),
        *(attention(dropped, phase, ours=100.0) for phase in ("forward", "backward")),
    )
    found = [v for v in verdicts(rows(kept)) if v.than == "itself without dropout"]
    assert [(v.phase, v.ratio, v.goal.least, v.is_met) for v in found] == [
        ("forward", 0.8, 0.85, False),
        ("backward", 0.8, None, True),
    ]
    text = goal_tables(kept, NO_COUNTERS)
    assert "Without a goal: `attention` backward on 4x4096x4096x32x8x128-bf16-causal-dropout_0.1 has 0.80" in text
    assert "| **0.80** | 0.85 | itself without dropout |" in text


def test_the_choice_is_held_to_the_fastest_implementation_and_configuration():
    def choice(**us):
        return [v for v in speeds(attention(CAUSAL, ours=100.0, xla=900.0, **us)) if v.goal.to == "choice"]

    (verdict,) = choice(cudnn=98.0, jla=50.0)
    assert (verdict.than, verdict.ratio, verdict.is_met) == ("cuDNN", 0.98, True)
    (verdict,) = choice(cudnn=120.0, variants={"two kernels": 97.0})
    assert (verdict.than, verdict.is_met) == ("two kernels", False)
    assert choice()[0].absent == ("cuDNN",)
    for error, absent in (("NotImplementedError: no such length", ()), ("ImportError: no cuDNN", ("cuDNN",))):
        problem = Problem(candidate="cudnn", message=error, kind="unsupported")
        (verdict,) = judged(replace(attention(CAUSAL, ours=100.0, xla=900.0), problems=(problem,)), to="choice")
        assert verdict.absent == absent
    assert missed_cases(results(attention(CAUSAL, variants={"a": 9.0}, cudnn=900.0, jla=900.0))) == []


def test_the_choice_is_what_a_call_without_a_name_takes():
    """XLA for one token that sees itself, also of the gradient, however long the kernels take."""
    token = attention("1x1x1x32x8x128-bfloat16-causal", "backward", ours=25.0, xla=3.0)
    (verdict,) = [v for v in speeds(token) if v.goal.to == "choice"]
    assert (verdict.ours, verdict.is_met) == ("xla", True)


def test_named_rivals_alone_count():
    """Of int8 weights: XLA's product with 16-bit ones, whatever XLA makes of the integers."""
    candidates = (measured("copy", "ceiling", 5.0), measured("xla", "implementation", 9.0),
                  measured("mosaic", "implementation", 10.0), measured("xla_bf16", "peer", 17.0))  # fmt: skip
    timed_all = shape("16-4096-4096-bfloat16-int8", op="quantized_linear", candidates=candidates)
    (verdict,) = judged(timed_all, to="xla_bf16")
    assert (verdict.than, verdict.ratio, verdict.is_met) == ("XLA, bf16 weights", 1.7, True)
    assert judged(replace(timed_all, candidates=candidates[:3]), to="xla_bf16") == []


def test_goals_that_nothing_was_measured_for_are_listed():
    absent = unmeasured([])
    assert len(absent) == len(set(absent)) > 150
    asked = {tuple(call): goal.words for goal, *call in absent}
    head = "4096-4096-128256-bfloat16-reduction_mean"
    assert asked["linear_cross_entropy", "backward", head] == "1.03 × XLA"
    assert asked["rms_norm", "forward", "1x4096-bfloat16-residual"] == "1.00 × XLA with 1 µs more"
    measured_one = results(timed(97.0, 150.0, 100.0))
    assert len(unmeasured(rows(measured_one))) == len(absent) - 2
    text = goal_tables(measured_one, NO_COUNTERS)
    assert f"; {len(absent) - 2} goals are not measured. " in text
    assert "| `linear_cross_entropy` | backward | 1.03 × XLA | 4096-4096-128256-bf16-reduction_mean |" in text
