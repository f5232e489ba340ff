"""The table of calls that are slower than a rival or far below the ceiling, with the limit read from counters."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from test_bench_results import day, measured, results, shape

from xlafuse.bench.counters import NO_COUNTERS, Counters, limit, load_counters
from xlafuse.bench.environment import Activity, Spread
from xlafuse.bench.results import ResultsError, merge
from xlafuse.bench.rows import rows
from xlafuse.bench.shortfalls import cases_behind, shortfall_table, shortfalls

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


def timed(ceiling, ours, spec="8192x8192-bfloat16", **us):
    candidates = [measured("copy", "ceiling", ceiling), measured("mosaic", "implementation", ours)]
    candidates += [measured(name, "implementation" if name == "xla" else "peer", value) for name, value in us.items()]
    return shape(spec, candidates=tuple(candidates))


def found(*runs):
    """What falls short in the runs' merged results: (over what, our speed)."""
    merged = merge([results(*shapes, started=day(i)) for i, shapes in enumerate(runs, start=1)])
    return [(each.than, round(each.ratio, 2)) for each in shortfalls(rows(merged))]


@pytest.mark.parametrize(
    ("call", "short"),
    [
        (timed(97.0, 100.0, xla=150.0, liger=99.0), []),
        (timed(97.0, 100.0, xla=95.0, liger=93.0), [("Liger", 0.93)]),
        (timed(80.0, 100.0, xla=95.0), [("XLA", 0.95)]),
        (timed(80.0, 100.0, xla=150.0), [("the ceiling", 0.8)]),
        (timed(5.0, 2.0, xla=1.7), []),  # 0.3 µs are noise
    ],
)
def test_a_call_falls_short_of_its_fastest_rival_or_of_the_ceiling(call, short):
    assert found([call]) == short


def test_small_calls_and_products_have_no_ceiling():
    small = replace(timed(1.0, 2.0, xla=3.0), bytes=1000)
    product = shape("8192-4096-4096-bfloat16", op="linear", bytes=168 * 2**20, us=290.0)
    assert found([small, product]) == []


def test_a_rival_counts_with_our_time_of_its_own_run():
    """torch.compile took turns with a slower kernel of ours, of another run."""
    old, new = timed(97.0, 110.0, xla=150.0, torch_compile=105.0), timed(97.0, 98.0, xla=150.0)
    assert found([old], [new]) == [("torch.compile", 0.95)]


def test_table_has_what_falls_short_with_its_counters(tmp_path):
    path = tmp_path / "counters.json"
    assert load_counters(path) is NO_COUNTERS
    read = {"schema_version": 1, "read_at": "2026-01-02T03:04Z", "commit": "abc"}
    path.write_text(json.dumps({**read, "launches": [{**LAUNCH, "us": 5.0}, LAUNCH]}))
    kept = results(timed(80.0, 100.0, xla=200.0), timed(97.0, 100.0, spec="16384x4096-float32-residual", xla=120.0))
    assert cases_behind(kept) == [LAUNCH["case"]]
    text = shortfall_table(kept, load_counters(path))
    assert "In 1 of 2 measured calls" in text
    why = "latency: warps wait for barriers (barrier 4.0), 20 % of them fit (168 registers); DRAM 70 %"
    assert f"| `rms_norm` | forward | 8192x8192-bf16 | 0.80 | the ceiling | – | – | – | {why} |" in text
    assert "Counters read 2026-01-02 03:04 UTC, commit abc." in text
    path.write_text('{"schema_version": 9}')
    with pytest.raises(ResultsError, match="schema version 9, expected 1"):
        load_counters(path)
    assert "|" not in shortfall_table(results(timed(97.0, 100.0, xla=150.0)), NO_COUNTERS)


def test_table_says_where_power_is_the_limit():
    slow = shape("8192-4096-4096-bfloat16", op="linear", bytes=168 * 2**20, us=343.6)
    busy = Activity(samples=3, quantities={"sm_clock_mhz": Spread(least=1500.0, median=1700.0, most=1980.0),
                                           "power_watts": Spread(least=120.0, median=650.0, most=698.0)})  # fmt: skip
    kept = results(replace(slow, activity=busy))
    power = "power limit: the clock fell to 1500 of 1980 MHz at up to 698 W"
    why = f"`implementation=None` takes XLA here; {power}; counters not read"
    cells = f"0.87 | Liger | 800 | 1700 (1500) | 650 (698) | {why}"
    assert f"| `linear` | forward | 8192-4096-4096-bf16 | {cells} |" in shortfall_table(kept, NO_COUNTERS)
    (case,) = cases_behind(kept)
    launch = {**LAUNCH, "case": case, "us": 340.0, "sm_cycles": 340.0 * 1600, "pipe_tensor_percent": 96.0}
    text = shortfall_table(kept, Counters(cases={case: [launch]}, read="today"))
    assert "power: a clock of 1600 of 1980 MHz within the launch; power limit: the clock fell to 1500" in text


def test_table_says_where_a_call_without_a_name_takes_another_implementation():
    """XLA for one token that sees itself."""
    token = shape("1x1x1x32x8x128-bfloat16-causal", op="attention", bytes=10**5, candidates=(
        measured("copy", "ceiling", 1.0), measured("xla", "implementation", 3.0),
        measured("mosaic", "implementation", 25.0)))  # fmt: skip
    assert "| 0.12 | XLA | 0 | – | – | `implementation=None` takes XLA here; " in shortfall_table(
        results(token), NO_COUNTERS
    )


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
