"""Reads the hardware counters of kernels and names what limits them.

`scripts/read_counters.py` reads the counters with Nsight Compute. It runs in another process than the timing.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from xlafuse.bench.results import ResultsError, ShapeResult

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
    """Contents of a file of `scripts/read_counters.py`.

    cases: the launches of each case.
    read: the date and the commit of the run.
    """

    cases: Mapping[str, Sequence[Mapping[str, Any]]]
    read: str


NO_COUNTERS = Counters(cases={}, read="not read")
_MEMORY_BUSY, _ISSUE_BUSY, _PIPE_BUSY, _OTHERS_LARGE = 85.0, 65.0, 60.0, 0.08
_TENSOR_BUSY, _TENSOR_USED = 70.0, 5.0
_LOWERED, _NEAR_LIMIT_WATTS = 0.95, 630
"""Thresholds: a share of the highest clock seen, and nine tenths of an H200's power limit."""


def load_counters(path: Path) -> Counters:
    """Loads a file of `scripts/read_counters.py`; without the file, the result has no cases.

    Raises:
        ResultsError: the file has another schema version.
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
    """Returns the shape's name in the files of `scripts/read_counters.py`."""
    return f"{shape.op}:{shape.phase}:{shape.spec}"


def own_clock(shape: ShapeResult, counters: Counters) -> str:
    """Says if the clock dropped within the longest launch, which nvidia-smi's long samples do not show."""
    clock = shape.activity.quantities.get("sm_clock_mhz") if shape.activity else None
    longest = max(counters.cases.get(case_name(shape), ()), key=lambda launch: launch["us"], default={})
    if not clock or not longest.get("sm_cycles"):
        return ""
    within = longest["sm_cycles"] / longest["us"]
    if within >= _LOWERED * clock.most:
        return ""
    return f"power: a clock of {within:.0f} of {clock.most:.0f} MHz within the launch"


def lowered_clock(shape: ShapeResult) -> str:
    """Says if the GPU lowered its clock while the shape was timed, and if it was near the power limit.

    nvidia-smi averages power over a second that includes the pauses between turns. A value far below the limit
    therefore proves nothing.
    """
    read = shape.activity.quantities if shape.activity else {}
    clock, power = read.get("sm_clock_mhz"), read.get("power_watts")
    if not clock or not power or clock.least >= _LOWERED * clock.most:
        return ""
    words = f"the clock fell to {clock.least:.0f} of {clock.most:.0f} MHz at up to {power.most:.0f} W"
    return f"power limit: {words}" if power.most >= _NEAR_LIMIT_WATTS else words


def limit(launches: Iterable[Mapping[str, Any]]) -> str:
    """Names the limit that the counters of a case's launches show.

    The longest launch decides. If memory, the tensor cores, instruction issue or a pipe is busy most of the time, that
    is the limit. Otherwise the limit is latency, given with the number of warps available to hide it and what they
    waited for. Other launches come first in the text if they take a good part of the time.
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
