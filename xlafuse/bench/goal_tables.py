"""Tables of docs/results.md: which goals are missed and what limits those kernels, and which are not measured."""

from __future__ import annotations

import math
from collections.abc import Iterable

from xlafuse.bench.counters import Counters, case_name, limit, lowered_clock, own_clock
from xlafuse.bench.goals import Goal, Verdict, unmeasured, verdicts
from xlafuse.bench.results import Results, ShapeResult, markdown_table, short_spec
from xlafuse.bench.rows import rows
from xlafuse.bench.tables import clock_and_power


def missed_cases(results: Results) -> list[str]:
    """The cases whose counters are worth reading: all that miss a goal which a kernel could reach."""
    late = [v for v in verdicts(rows(results)) if not v.is_met and not v.is_out_of_reach and v.goal.to != "choice"]
    return list(dict.fromkeys(case_name(shape) for verdict in late for shape in verdict.shapes))


def goal_summary(results: Results) -> str:
    """How many goals are met, and how many were not measured."""
    table = rows(results)
    judged, absent = [v for v in verdicts(table) if v.goal.least is not None], unmeasured(table)
    alone = sum(verdict.is_met and bool(verdict.absent) for verdict in judged)
    return (
        f"Of {len(judged)} measured goals {sum(verdict.is_met for verdict in judged)} are met"
        + (f", {alone} of them not yet timed beside all rivals of the goal" if alone else "")
        + (f"; {len(absent)} goals are not measured" if absent else "")
        + ". A shape with several goals counts once for each."
    )


def goal_tables(results: Results, counters: Counters) -> str:
    """How many goals are met, the table of those that are not, and those that were not measured."""
    table = rows(results)
    judged = verdicts(table)
    parts = [goal_summary(results)]
    if late := [verdict for verdict in judged if not verdict.is_met]:
        header = ["operation", "", "shape", "ratio", "goal", "to", "TF/s", "MHz", "W", "what limits it"]
        parts.append(markdown_table(header, [_cells(verdict, counters) for verdict in late], "lllrrlrrrl"))
        parts.append(
            "Ratios are of speeds. The copy is a plain copy of as many bytes. MHz: median and lowest; W: median and "
            "highest. DRAM, issue slots and pipes in percent of their peak, by Nsight Compute (a copy reaches 88 % of "
            f"DRAM's); stalls in warps that wait for each instruction issued. Counters {counters.read}."
        )
        if any("sm_cycles" in launch for launches in counters.cases.values() for launch in launches):
            parts[-1] += (
                " The clock within a launch is its cycles by its time: the GPU lowers it within 20 µs of multiplying "
                "random numbers, in cuBLAS's kernels as in these. A sample of nvidia-smi is too long to show that "
                "(see `pallas_kernels/primitives/gemm/TUNING.md`)."
            )
    parts += [_reported(verdict) for verdict in judged if verdict.goal.least is None]
    parts += _beside_not_all(judged)
    parts += _not_measured(unmeasured(table))
    return "\n\n".join(parts)


def _cells(verdict: Verdict, counters: Counters) -> list[str]:
    shape = verdict.shapes[-1]
    return [
        f"`{shape.op}`",
        verdict.phase,
        short_spec(shape.spec),
        f"**{verdict.ratio:.2f}**",
        f"{verdict.goal.least:.2f}",
        verdict.than,
        f"{verdict.teraflops:.0f}" if math.isfinite(verdict.teraflops) else "–",
        *clock_and_power(shape),
        _why(verdict, shape, counters),
    ]


def _why(verdict: Verdict, shape: ShapeResult, counters: Counters) -> str:
    if verdict.goal.to == "choice":
        return "the choice"
    if verdict.is_out_of_reach:
        return f"not even the copy reaches it ({verdict.copy_ratio:.2f})"
    limits = []
    for each in verdict.shapes:
        launches = counters.cases.get(case_name(each))
        words = limit(launches) if launches else "counters not read"
        limits.append(words if len(verdict.shapes) == 1 else f"{each.phase}: {words}")
    clocks = [] if verdict.goal.to == "copy" else [own_clock(shape, counters), lowered_clock(shape)]
    return "; ".join([words for words in clocks if words] + limits)


def _reported(verdict: Verdict) -> str:
    shape = verdict.shapes[0]
    return (
        f"Without a goal: `{shape.op}` {verdict.phase} on {short_spec(shape.spec)} has {verdict.ratio:.2f} of the "
        f"speed of {verdict.than}."
    )


def _beside_not_all(judged: Iterable[Verdict]) -> list[str]:
    """Goals whose rivals were not all timed beside ours, by what is absent."""
    cells: dict[tuple[str, str, str], dict[str, None]] = {}
    for verdict in judged:
        if verdict.absent:
            shape = verdict.shapes[0]
            spec = f"{short_spec(shape.spec)} ({'met so far' if verdict.is_met else 'missed'})"
            cells.setdefault((", ".join(verdict.absent), f"`{shape.op}`", verdict.phase), {})[spec] = None
    lines = [[*key, ", ".join(specs)] for key, specs in cells.items()]
    return [markdown_table(["not timed beside", "operation", "", "shapes"], lines, "llll")] if lines else []


def _not_measured(absent: Iterable[tuple[Goal, str, str, str]]) -> list[str]:
    """The goals on shapes that no run has, by operation, phase and goal."""
    cells: dict[tuple[str, str, str], list[str]] = {}
    for goal, op, phase, spec in absent:
        cells.setdefault((f"`{op}`", phase, goal.words), []).append(short_spec(spec))
    lines = [[*key, ", ".join(specs)] for key, specs in cells.items()]
    return [markdown_table(["not measured", "", "goal", "shapes"], lines, "llll")] if lines else []
