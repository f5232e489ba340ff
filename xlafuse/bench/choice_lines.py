"""Results of the choice's benchmark as lines of text."""

from __future__ import annotations

from xlafuse.bench.choice import BAR, best, default, is_measured, ratio
from xlafuse.bench.lines import problem_lines, short_spec
from xlafuse.bench.results import Results, ShapeResult, geometric_mean


def result_lines(result: ShapeResult) -> list[str]:
    """A call: the ratio, then what None took and each implementation with µs and number of kernels."""
    ours, theirs = default(result), best(result)
    title = f"{result.phase} {result.op} {short_spec(result.spec)}"
    if ours is None or theirs is None:
        return [f" not measured: {title}"]
    named = sorted(result.of_kind("implementation"), key=lambda c: c.timing.median_us)
    times = ", ".join(f"{c.name} {c.timing.median_us:.2f} µs ({len(c.timing.kernels)})" for c in (ours, *named))
    # Then only what differs between two runs of one implementation makes the ratio.
    same = " (the same)" if ours.name.endswith(f" {theirs.name}") else ""
    unsteady = "" if result.is_steady or not result.is_large else " (not steady)"
    return [f" {ratio(result):.3f}{' !!' if ratio(result) < BAR else ''} {title}", f"      {times}{same}{unsteady}"]


def summary_lines(results: Results) -> list[str]:
    """The least ratio by operation and mode, each call below the bar, what was not measured, and how many calls."""
    measured = [result for result in results.shapes if is_measured(result)]
    groups: dict[str, list[float]] = {}
    for result in measured:
        groups.setdefault(f"{result.op} {result.phase}", []).append(ratio(result))
    lines = [
        f"{name}: {len(found)} calls, best / None at least {min(found):.3f}, mean {geometric_mean(found):.3f}"
        for name, found in groups.items()
    ]
    below = sorted((result for result in measured if ratio(result) < BAR), key=ratio)
    lines += [line for result in below for line in result_lines(result)]
    for result in results.shapes:
        if not is_measured(result):
            lines += [*result_lines(result), *problem_lines(result)]
    lines += [f"left out: {note}" for run in results.runs for note in run.left_out]
    least = f", the least ratio {min(map(ratio, measured)):.3f}" if measured else ""
    return [*lines, f"{len(measured)} of {len(results.shapes)} calls measured, {len(below)} below {BAR}{least}"]
