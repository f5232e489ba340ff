"""What limits the kernels that miss a bar, with the hardware counter that shows it: a table of docs/results.md.

The counters come from `scripts/read_counters.py`, of another process than the times.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from xlafuse.bench.bars import SMALL_US
from xlafuse.bench.lines import clock_and_power, short_spec
from xlafuse.bench.results import Results, ResultsError, ShapeResult
from xlafuse.bench.rows import Row, grouped, rows
from xlafuse.bench.small import slow_small_calls, small_calls
from xlafuse.bench.verdicts import CopyVerdict, SpeedVerdict, copy_verdicts, speed_verdicts, unmeasured

SCHEMA_VERSION = 1
_STALLS = {
    "long_scoreboard": "loads",
    "short_scoreboard": "shared memory",
    "barrier": "barriers",
    "math_pipe_throttle": "a full arithmetic pipe",
    "mio_throttle": "the queue of shared-memory accesses",
    "lg_throttle": "the queue of global accesses",
    "wait": "fixed latencies",
    "gmma": "the tensor cores",
    "not_selected": "other warps' turn",
}


@dataclass(frozen=True, kw_only=True)
class Counters:
    """A file of `scripts/read_counters.py`. cases: each one's launches; read: when, and of which commit."""

    cases: Mapping[str, Sequence[Mapping[str, Any]]]
    read: str


NO_COUNTERS = Counters(cases={}, read="not read")
_MEMORY_BUSY, _ISSUE_BUSY, _PIPE_BUSY, _OTHERS_LARGE = 85.0, 65.0, 60.0, 0.08
_TENSOR_BUSY, _TENSOR_USED = 70.0, 5.0
_LOWERED, _NEAR_LIMIT_WATTS = 0.95, 630
"""Of the highest clock seen; nine tenths of an H200's limit."""


def load_counters(path: Path) -> Counters:
    """The launches of each case of a file of `scripts/read_counters.py`; none where there is no such file.

    Raises:
        ResultsError: another schema version.
    """
    if not path.is_file():
        return NO_COUNTERS
    data = json.loads(path.read_text(encoding="utf-8"))
    if data.get("schema_version") != SCHEMA_VERSION:
        raise ResultsError(f"{path} has schema version {data.get('schema_version')!r}, expected {SCHEMA_VERSION}")
    cases: dict[str, list[Mapping[str, Any]]] = {}
    for launch in data["launches"]:
        cases.setdefault(launch["case"], []).append(launch)
    commit = f", commit {data['commit']}" if data.get("commit") else ""
    return Counters(cases=cases, read=f"read {data['read_at'][:10]} {data['read_at'][11:16]} UTC{commit}")


def case_name(shape: ShapeResult) -> str:
    """The shape as `scripts/read_counters.py` names it."""
    return f"{shape.op}:{shape.phase}:{shape.spec}"


def missed(results: Results) -> list[str]:
    """The cases whose counters are worth reading: all that miss a bar within a copy's reach, and slow small calls."""
    table = rows(results)
    copies = (v for v in copy_verdicts(table) if v.misses_share or (v.misses_over_xla and not v.is_out_of_reach))
    late = [verdict.row.main for verdict in copies] + [row.main for row in slow_small_calls(table)]
    for verdict in speed_verdicts(table):
        if not verdict.is_met and not verdict.is_choice:
            late += verdict.shapes
    return list(dict.fromkeys(case_name(shape) for shape in late))


def summary(results: Results) -> str:
    """How many bars are met, and how many were not measured."""
    table = rows(results)
    speeds = [verdict for verdict in speed_verdicts(table) if verdict.least is not None]
    judged, small, absent = [*copy_verdicts(table), *speeds], small_calls(table), unmeasured(table)
    met = sum(verdict.is_met for verdict in judged)
    alone = sum(verdict.is_met and bool(verdict.absent) for verdict in speeds)
    return (
        f"Of {len(judged)} measured shapes with a bar {met} meet it"
        + (f", {alone} of them not yet timed beside all rivals of the bar" if alone else "")
        + (f"; {len(absent)} bars are not measured" if absent else "")
        + f"; of {len(small)} small calls {len(small) - len(slow_small_calls(table))} take at most {SMALL_US:.0f} µs "
        "longer than XLA's. A shape with several bars counts once for each."
    )


def markdown(results: Results, counters: Counters) -> str:
    """How many bars are met, a table of those that are not, and a list of those that were not measured."""
    table = [row for _, _, group in grouped(rows(results)) for row in group]
    slow = slow_small_calls(table)
    late = [verdict for verdict in copy_verdicts(table) if not verdict.is_met]
    speeds = speed_verdicts(table)
    late_speeds = [verdict for verdict in speeds if not verdict.is_met]
    parts = [summary(results)]
    if late or slow:
        header = ["operation", "", "shape", "of the copy", "bar", "× XLA", "bar", "copy × XLA", "what limits it"]
        lines = [header, ["---", "---", "---", *["---:"] * 5, "---"]]
        lines += [_late_cells(verdict, counters) for verdict in late]
        lines += [_slow_cells(row, counters) for row in slow]
        note = (
            "Misses are set in bold. Shares here are of the plain copy alone; copy × XLA is what a kernel as fast as "
            "that copy would have. DRAM, issue slots and pipes in percent of their peak, by Nsight Compute (a copy "
            "reaches 88 % of DRAM's); stalls in warps that wait for each instruction issued. Counters "
            f"{counters.read}."
        )
        parts += [_rendered(lines), note]
    if late_speeds:
        header = ["ratio of speeds", "", "shape", "TF/s", "ratio", "bar", "to", "MHz", "W", "what limits it"]
        lines = [header, ["---", "---", "---", *["---:"] * 3, "---", "---:", "---:", "---"]]
        parts.append(_rendered([*lines, *(_late_speed_cells(verdict, counters) for verdict in late_speeds)]))
        parts.append(
            "MHz: median and lowest; W: median and highest, as in the table of matrix products. A rival of another run "
            "took turns with ours as it was then."
        )
        if any("sm_cycles" in launch for launches in counters.cases.values() for launch in launches):
            parts[-1] += (
                " The clock within a launch is its cycles by its time: the GPU lowers it within 20 µs of multiplying "
                "random numbers, in cuBLAS's kernels as in these, which a sample of nvidia-smi is too long to show "
                "(see `pallas_kernels/primitives/gemm/TUNING.md`)."
            )
    parts += [_told(verdict) for verdict in speeds if verdict.least is None]
    parts += _beside_not_all(speeds)
    parts += _not_measured(table)
    return "\n\n".join(parts)


def _told(verdict: SpeedVerdict) -> str:
    shape = verdict.shapes[0]
    return (
        f"Without a bar: `{shape.op}` {verdict.phase} on {short_spec(shape.spec)} has {verdict.ratio:.2f} of the speed "
        f"of {verdict.than}."
    )


def _beside_not_all(speeds: Iterable[SpeedVerdict]) -> list[str]:
    """Bars whose rivals were not all timed beside ours, by what is absent."""
    cells: dict[tuple[str, str, str], list[str]] = {}
    for verdict in speeds:
        if verdict.absent:
            shape = verdict.shapes[0]
            told = f"{short_spec(shape.spec)} ({'met so far' if verdict.is_met else 'missed'})"
            found = cells.setdefault((", ".join(verdict.absent), shape.op, verdict.phase), [])
            found += [told] if told not in found else []
    if not cells:
        return []
    header = [["not timed beside", "operation", "", "shapes"], ["---"] * 4]
    lines = [[absent, f"`{op}`", phase, ", ".join(specs)] for (absent, op, phase), specs in cells.items()]
    return [_rendered([*header, *lines])]


def _not_measured(table: Iterable[Row]) -> list[str]:
    """The bars on shapes that no run has, by operation, phase and bar."""
    cells: dict[tuple[str, str, str], list[str]] = {}
    for absent in unmeasured(table):
        cells.setdefault((absent.op, absent.phase, absent.asked), []).append(short_spec(absent.spec))
    if not cells:
        return []
    header = [["not measured", "", "bar", "shapes"], ["---"] * 4]
    lines = [[f"`{op}`", phase, asked, ", ".join(specs)] for (op, phase, asked), specs in cells.items()]
    return [_rendered([*header, *lines])]


def _rendered(lines: Iterable[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _late_speed_cells(verdict: SpeedVerdict, counters: Counters) -> list[str]:
    shape = verdict.shapes[-1]
    why = [] if verdict.is_choice else [f"{s.phase}: {_words(s, counters)}" for s in verdict.shapes]
    if len(why) == 1:
        why = [_words(shape, counters)]
    if not verdict.is_choice:
        why = [words for words in (_own_clock(shape, counters), _lowered_clock(shape)) if words] + why
    return [
        f"`{shape.op}`",
        verdict.phase,
        short_spec(shape.spec),
        f"{verdict.teraflops:.0f}" if math.isfinite(verdict.teraflops) else "–",
        _marked(f"{verdict.ratio:.2f}", not verdict.is_met),
        f"{verdict.least:.2f}",
        verdict.than,
        *clock_and_power(shape),
        "; ".join(why) or "the choice",
    ]


def _own_clock(shape: ShapeResult, counters: Counters) -> str:
    """Words where the clock is low within the longest launch: nvidia-smi's samples are too long to show that."""
    clock = shape.activity.quantities.get("sm_clock_mhz") if shape.activity else None
    longest = max(counters.cases.get(case_name(shape), ()), key=lambda launch: launch["us"], default={})
    if not clock or not longest.get("sm_cycles"):
        return ""
    within = longest["sm_cycles"] / longest["us"]
    if within >= _LOWERED * clock.most:
        return ""
    return f"power: a clock of {within:.0f} of {clock.most:.0f} MHz within the launch"


def _lowered_clock(shape: ShapeResult) -> str:
    """Words where the GPU lowered its clock while the shape was timed; the power limit is named where it was near.

    nvidia-smi's power is a mean over a second, pauses between turns in it: far below the limit it shows nothing.
    """
    read = shape.activity.quantities if shape.activity else {}
    clock, power = read.get("sm_clock_mhz"), read.get("power_watts")
    if not clock or not power or clock.least >= _LOWERED * clock.most:
        return ""
    words = f"the clock fell to {clock.least:.0f} of {clock.most:.0f} MHz at up to {power.most:.0f} W"
    return f"power limit: {words}" if power.most >= _NEAR_LIMIT_WATTS else words


def _late_cells(verdict: CopyVerdict, counters: Counters) -> list[str]:
    row, bar = verdict.row, verdict.bar
    why = [_words(row.main, counters)] if verdict.misses_share or not verdict.is_out_of_reach else []
    return [
        f"`{row.main.op}`",
        row.main.phase,
        short_spec(row.main.spec),
        _marked(f"{verdict.share:.2f}", verdict.misses_share),
        f"{bar.share:.2f}",
        _marked(f"{verdict.over_xla:.2f}", verdict.misses_over_xla),
        f"{bar.over_xla:.1f}" if bar.over_xla and verdict.asks_over_xla else "–",
        f"{verdict.most_over_xla:.2f}",
        "; ".join([*(["not even the copy has the bar's × XLA"] if verdict.is_out_of_reach else []), *why]),
    ]


def _slow_cells(row: Row, counters: Counters) -> list[str]:
    difference = row.main.microseconds(row.ours) - row.main.microseconds("xla")
    cells = [f"`{row.main.op}`", row.main.phase, short_spec(row.main.spec), "", "", f"**{difference:+.2f} µs**"]
    return [*cells, f"+{SMALL_US:.0f} µs", "", _words(row.main, counters)]


def _marked(text: str, is_missed: bool) -> str:
    return f"**{text}**" if is_missed else text


def _words(shape: ShapeResult, counters: Counters) -> str:
    launches = counters.cases.get(case_name(shape))
    return limit(launches) if launches else "counters not read"


def limit(launches: Iterable[Mapping[str, Any]]) -> str:
    """What the counters of a case's launches point to.

    The longest launch decides: memory, the tensor cores, instruction issue or a pipe where one of them is busy most of
    the time, else latency, with the warps that were there to hide it and what they waited for. Other launches are named
    first where they take a good part of the time.
    """
    longest, *others = sorted(launches, key=lambda launch: -launch["us"])
    rest = sum(launch["us"] for launch in others)
    parts = [f"{len(others)} other launches, {rest:.0f} µs"] if rest > _OTHERS_LARGE * (rest + longest["us"]) else []
    pipe, busy = max(
        ((name, longest.get(f"pipe_{name}_percent") or 0) for name in ("alu", "fma", "xu", "lsu")), key=lambda p: p[1]
    )
    memory, tensor = f"DRAM {longest['dram_percent']:.0f} %", longest.get("pipe_tensor_percent") or 0.0
    if _TENSOR_USED <= tensor < _TENSOR_BUSY:
        memory += f", tensor cores {tensor:.0f} %"
    if longest["dram_percent"] >= _MEMORY_BUSY:
        parts.append(f"memory: {memory}")
    elif tensor >= _TENSOR_BUSY:
        parts.append(f"tensor cores: {tensor:.0f} %; {memory}")
    elif longest["issue_percent"] >= _ISSUE_BUSY:
        parts.append(f"instruction issue: {longest['issue_percent']:.0f} % ({pipe} pipe {busy:.0f} %); {memory}")
    elif busy >= _PIPE_BUSY:
        parts.append(f"{pipe} pipe: {busy:.0f} %; {memory}")
    else:
        stalls = {name: longest.get(f"stall_{name}") or 0.0 for name in _STALLS if name != "not_selected"}
        longest_stall = max(stalls, key=lambda name: stalls[name])
        parts.append(
            f"latency: warps wait for {_STALLS[longest_stall]} ({longest_stall} {stalls[longest_stall]:.1f}), "
            f"{longest['warps_percent']:.0f} % of them fit ({longest['registers']:.0f} registers); {memory}"
        )
    return "; ".join(parts)
