"""What misses a bar, and what the counters say limits it."""

from __future__ import annotations

import json

import pytest
from test_bench_results import measured, results, shape

from xlafuse.bench import limits
from xlafuse.bench.bars import BARS, product_verdicts, slow_small_calls, verdicts
from xlafuse.bench.results import ResultsError
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


@pytest.mark.parametrize(
    ("copy", "xla", "ours", "misses_share", "misses_over_xla"),
    [(97.0, 150.0, 100.0, False, False), (96.4, 150.0, 100.0, True, False), (96.6, 139.6, 100.0, False, False),
     (97.0, 139.4, 100.0, False, True), (90.0, 110.0, 100.0, True, True)],
)  # fmt: skip
def test_norms_forward_need_97_percent_and_1_4(copy, xla, ours, misses_share, misses_over_xla):
    (verdict,) = verdicts(rows(results(timed(copy, xla, ours))))
    assert (verdict.misses_share, verdict.misses_over_xla) == (misses_share, misses_over_xla)
    assert verdict.is_met == (not misses_share and not misses_over_xla)
    assert verdict.most_over_xla == pytest.approx(xla / copy)


def test_bars_are_about_their_shapes_phases_and_dtypes():
    assert verdicts(rows(results(timed(1, 1, 1, spec="8192x4096-bfloat16-residual")))) == []
    (verdict,) = verdicts(rows(results(timed(88, 290, 100, phase="backward"))))
    assert (verdict.misses_share, verdict.misses_over_xla) == (False, True)
    wide = timed(96, 110, 100, spec="16384x4096-float32-gelu_tanh", op="bias_activation")
    (verdict,) = verdicts(rows(results(wide)))
    assert (verdict.asks_over_xla, verdict.is_met) == (False, True)
    assert {op for bar in BARS for op in bar.operations} >= {"softmax", "rope", "cross_entropy", "gated_activation"}


def test_small_calls_may_take_a_microsecond_longer():
    slow = timed(1.0, 2.0, 3.1, spec="64x4096-bfloat16", bytes=10**6)
    fine = timed(1.0, 2.0, 2.9, spec="1x4096-bfloat16", bytes=10**6)
    middling = timed(10.0, 20.0, 29.0, spec="8192x1024-bfloat16", bytes=10**6)
    decode = timed(1.0, 2.0, 3.5, spec="16x1x32+8x128-bfloat16-positions_a_batch", bytes=10**6, op="rope")
    found = slow_small_calls(rows(results(slow, fine, middling, decode)))
    assert {row.main.spec for row in found} == {slow.spec, decode.spec}
    text = limits.markdown(results(slow, fine), limits.NO_COUNTERS)
    assert "of 2 small calls 1 take at most 1 µs longer than XLA's" in text
    assert "| **+1.10 µs** | +1 µs |  | counters not read |" in text


def test_table_has_what_misses_with_its_counters(tmp_path):
    path = tmp_path / "counters.json"
    assert limits.load_counters(path) is limits.NO_COUNTERS
    read = {"schema_version": 1, "read_at": "2026-01-02T03:04Z", "commit": "abc"}
    path.write_text(json.dumps({**read, "launches": [{**LAUNCH, "us": 5.0}, LAUNCH]}))
    kept = results(timed(90.0, 200.0, 100.0), timed(97.0, 120.0, 100.0, spec="16384x4096-float32"))
    in_reach = timed(97.0, 138.0, 100.0, spec="32768x4096-bfloat16")
    assert limits.missed(kept) == [LAUNCH["case"]]
    assert limits.missed(results(in_reach)) == ["rms_norm:forward:32768x4096-bfloat16"]
    text = limits.markdown(kept, limits.load_counters(path))
    assert "Of 2 measured shapes with a bar 0 meet it" in text
    why = "latency: warps wait for barriers (barrier 4.0), 20 % of them fit (168 registers); DRAM 70 %"
    assert "Counters read 2026-01-02 03:04 UTC, commit abc." in text
    assert f"| 8192x8192-bf16 | **0.90** | 0.97 | 2.00 | 1.4 | 2.22 | {why} |" in text
    assert "| 0.97 | 0.97 | **1.20** | 1.4 | 1.24 | not even the copy has the bar's × XLA |" in text
    path.write_text('{"schema_version": 9}')
    with pytest.raises(ResultsError, match="schema version 9, expected 1"):
        limits.load_counters(path)
    met = results(timed(97.0, 150.0, 100.0))
    assert limits.markdown(met, limits.NO_COUNTERS) == limits.summary(met)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"dram_percent": 88.0, "issue_percent": 90.0}, "memory: DRAM 88 %"),
        ({"issue_percent": 80.0, "pipe_fma_percent": 50.0}, "instruction issue: 80 % (fma pipe 50 %); DRAM 70 %"),
        ({"pipe_xu_percent": 75.0}, "xu pipe: 75 %; DRAM 70 %"),
        ({"stall_lg_throttle": 9.0}, "latency: warps wait for the queue of global accesses (lg_throttle 9.0)"),
    ],
)
def test_the_busiest_unit_is_the_limit(changes, words):
    assert limits.limit([{**LAUNCH, **changes}]).startswith(words)


def test_other_launches_are_named_where_they_take_long():
    assert limits.limit([LAUNCH, {**LAUNCH, "us": 20.0}]).startswith("1 other launches, 20 µs; latency")
    assert limits.limit([LAUNCH, {**LAUNCH, "us": 2.0}]).startswith("latency")


def test_products_are_held_to_the_fastest_rival():
    """Liger, faster than XLA here, is the one that counts; the bar is 1.00."""
    slow = shape("8192-4096-4096-bfloat16", op="linear", bytes=168 * 2**20, us=343.6)
    fast = shape("8192-4096-4096-bfloat16", op="linear", bytes=168 * 2**20, us=250.0)
    (verdict,) = product_verdicts(rows(results(slow)))
    assert (verdict.best_rival, verdict.is_met) == ("liger", False)
    assert product_verdicts(rows(results(fast)))[0].is_met
    text = limits.markdown(results(slow), limits.NO_COUNTERS)
    assert "| `linear` | forward | 8192-4096-4096-bf16 | 800 | 0.87 | 1.00 | Liger |" in text
    assert limits.summary(results(fast)).startswith("Of 1 measured shapes with a bar 1 meet it")
