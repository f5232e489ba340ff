"""Formats results of the kernel, block and choice benchmarks as lines for a terminal or a log."""

from __future__ import annotations

import math

from xlafuse.bench.block import BASELINE, activity_words, rate
from xlafuse.bench.choice import BAR, best, default, is_behind, is_measured, ratio
from xlafuse.bench.results import Results, ShapeResult, geometric_mean, short_spec
from xlafuse.bench.rows import grouped, rival_names, rows, teraflops_per_second
from xlafuse.bench.settings import MODES

_PHASES = {"forward": "fwd", "backward": "bwd"}
_PROBLEM_LENGTH = 160
_BEST_VARIANTS = 3


def title(shape: ShapeResult) -> str:
    """Formats phase and spec, shortened."""
    return f"{_PHASES[shape.phase]} {short_spec(shape.spec)}"


def kernel_lines(shape: ShapeResult) -> list[str]:
    """Formats a shape: µs, GB/s, share of the ceiling, speed-ups over XLA and the peers, and its best variants.

    Matrix products have TF/s instead of GB/s.
    """
    name = shape.chosen
    if name is None:
        return [f" {title(shape):<36} not measured"]
    rivals = [c.name for c in (*shape.of_kind("implementation"), *shape.of_kind("peer")) if c.name != name]
    ratios = "  ".join(f"{rival} {shape.speed_up(name, rival):.2f}" for rival in rivals)
    unsteady = "" if shape.is_steady or not shape.is_large else "  (not steady)"
    products = teraflops_per_second(shape, name)
    speed = f"{shape.gigabytes_per_second(name):5.0f} GB/s" if products is None else f"{products:5.0f} TF/s"
    lines = [
        f" {title(shape):<36} {name} {shape.microseconds(name):8.2f} µs {speed} "
        f"{100 * shape.ceiling_share(name):4.0f} %  {ratios}{unsteady}"
    ]
    variants = sorted(shape.of_kind("variant"), key=lambda c: c.timing.median_us)
    for variant in variants[:_BEST_VARIANTS]:
        lines.append(
            f"      {variant.name}: {variant.timing.median_us:.2f} µs, {shape.speed_up(variant.name, name):.3f} of it"
        )
    return lines


def problem_lines(shape: ShapeResult) -> list[str]:
    """Formats the problems of a shape, one a line."""
    return [
        f"      {problem.kind}: {problem.candidate}: {' '.join(problem.message.split())[:_PROBLEM_LENGTH]}"
        for problem in shape.problems
    ]


def kernel_summary(results: Results) -> list[str]:
    """Formats geometric means over the large shapes, by operation and phase, and lists what was left out."""
    lines = []
    for op, phase, group in grouped(rows(results)):
        large = [row for row in group if row.main.is_large and row.ours]
        if not large:
            continue
        share = geometric_mean([row.main.ceiling_share(row.ours) for row in large])
        means = {
            rival: geometric_mean([row.speed_up(rival) for row in large]) for rival in ("xla", *rival_names(large))
        }
        ratios = "  ".join(f"{rival} {mean:.2f}" for rival, mean in means.items() if not math.isnan(mean))
        lines.append(f"{op} {phase}: {100 * share:.0f} % of the ceiling  {ratios}  ({len(large)} shapes)")
    lines += left_out(results)
    return lines


def block_lines(result: ShapeResult) -> list[str]:
    """Formats a case: the baseline's µs and TF/s, the speed-ups of the others, and wall-clock times below."""
    title = f" {result.phase} {result.op} {result.spec}"
    if not any(c.name == BASELINE for c in result.candidates):
        return [f"{title:<32} not measured"]
    others = [c for c in result.candidates if c.name != BASELINE]
    ratios = "  ".join(f"{c.name} {result.speed_up(c.name, BASELINE):.3f}" for c in others)
    walls = "  ".join(f"{c.name} {c.timing.wall_us:.0f}" for c in result.candidates)
    activity = activity_words(result)
    unsteady = "" if result.is_steady else "  (not steady)"
    first = (
        f"{title:<32} {BASELINE} {result.microseconds(BASELINE):9.1f} µs {rate(result, BASELINE)}  {ratios}{unsteady}"
    )
    return [first, f"      wall µs: {walls}{activity and f'; {activity}'}"]


def block_summary(results: Results) -> list[str]:
    """Formats geometric means over the cases of each mode, and lists what was left out."""
    lines = []
    for mode in MODES:
        cases = [case for case in results.shapes if case.phase == mode]
        names = dict.fromkeys(c.name for case in cases for c in case.candidates if c.name != BASELINE)
        means = {name: geometric_mean([case.speed_up(name, BASELINE) for case in cases]) for name in names}
        ratios = "  ".join(f"{name} {mean:.3f}" for name, mean in means.items() if not math.isnan(mean))
        if cases:
            lines.append(f"{mode}, times as fast as {BASELINE}: {ratios}  ({len(cases)} shapes)")
    return lines + left_out(results)


def choice_lines(result: ShapeResult) -> list[str]:
    """Formats a call: the ratio, then what None took and each implementation with µs and number of kernels."""
    ours, theirs = default(result), best(result)
    title = f"{result.phase} {result.op} {short_spec(result.spec)}"
    if ours is None or theirs is None:
        return [f" not measured: {title}"]
    named = sorted(result.of_kind("implementation"), key=lambda c: c.timing.median_us)
    times = ", ".join(f"{c.name} {c.timing.median_us:.2f} µs ({len(c.timing.kernels)})" for c in (ours, *named))
    # In that case the ratio shows only how two runs of one implementation differ.
    same = " (the same)" if ours.name.endswith(f" {theirs.name}") else ""
    unsteady = "" if result.is_steady or not result.is_large else " (not steady)"
    return [f" {ratio(result):.3f}{' !!' if ratio(result) < BAR else ''} {title}", f"      {times}{same}{unsteady}"]


def choice_summary(results: Results) -> list[str]:
    """Formats the least ratio by operation and mode, each call below the bar, unmeasured calls, and the call count."""
    measured = [result for result in results.shapes if is_measured(result)]
    groups: dict[str, list[float]] = {}
    for result in measured:
        groups.setdefault(f"{result.op} {result.phase}", []).append(ratio(result))
    lines = [
        f"{name}: {len(found)} calls, best / None at least {min(found):.3f}, mean {geometric_mean(found):.3f}"
        for name, found in groups.items()
    ]
    below = sorted((result for result in measured if ratio(result) < BAR), key=ratio)
    lines += [line for result in below for line in choice_lines(result)]
    for result in results.shapes:
        if not is_measured(result):
            lines += [*choice_lines(result), *problem_lines(result)]
    lines += left_out(results)
    least = f", the least ratio {min(map(ratio, measured)):.3f}" if measured else ""
    lines.append(f"{len(measured)} of {len(results.shapes)} calls measured, {len(below)} below {BAR}{least}")
    behind = sum(map(is_behind, measured))
    mean = f"; geometric mean of the ratios {geometric_mean([*map(ratio, measured)]):.3f}" if measured else ""
    return [*lines, f"{behind} more than 3 % and 0.5 µs behind the fastest{mean}"]


def left_out(results: Results) -> list[str]:
    """Lists what was not begun, or ended its process."""
    return [f"left out: {note}" for run in results.runs for note in run.left_out]
