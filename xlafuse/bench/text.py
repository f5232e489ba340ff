"""Formats results as lines for a terminal or a log."""

from __future__ import annotations

import math

from pallas_kernels import REGISTRY
from xlafuse.bench.block_tables import activity_words, block_overview, model_table
from xlafuse.bench.choice import default, is_behind, is_measured, ratio
from xlafuse.bench.results import Measured, Results, ShapeResult, geometric_mean, short_spec
from xlafuse.bench.rows import rate
from xlafuse.bench.tables import overview
from xlafuse.models import PRESETS

_PROBLEM_LENGTH = 160
_BEST_VARIANTS = 3


def result_lines(result: ShapeResult) -> list[str]:
    """Formats a result: what was measured, a line for each candidate and its speed-up over the first, and problems."""
    shown = [c for c in result.candidates if c.kind not in ("ceiling", "variant")]
    base = next((c for c in shown if c.name == "xla"), shown[0] if shown else None)
    shown += sorted(result.of_kind("variant"), key=lambda c: c.timing.median_us)[:_BEST_VARIANTS]
    notes = [f"best / None {ratio(result):.3f}{' !!' * is_behind(result)}"] if default(result) else []
    notes += [activity_words(result), "" if result.is_steady or not result.is_large else "not steady"]
    title = f" {result.phase} {result.op} {short_spec(result.spec)}"
    return [
        "; ".join([title, *filter(None, notes if shown else ["not measured"])]),
        *(_candidate_line(result, each, base) for each in shown if base is not None),
        *(
            f"      {problem.kind}: {problem.candidate}: {' '.join(problem.message.split())[:_PROBLEM_LENGTH]}"
            for problem in result.problems
        ),
    ]


def _candidate_line(result: ShapeResult, each: Measured, base: Measured) -> str:
    timing = each.timing
    by = "wall_us" if each.tokens_per_second else "median_us"  # a model is compared by its wall clock
    words = [f"{timing.median_us:10.2f} µs", f"×{getattr(base.timing, by) / getattr(timing, by):.3f}"]
    if each.tokens_per_second:
        words.append(f"{each.tokens_per_second:.0f} {result.unit}/s")
    elif result.bytes:
        words.append(rate(result, each.name))
    if result.ceiling:
        words.append(f"{100 * result.ceiling_share(each.name):.0f} % of the ceiling")
    if timing.kernels:
        words.append(f"{len(timing.kernels)} launches, wall {timing.wall_us:.1f} µs")
    if each.flops_share and math.isfinite(each.flops_share):
        words.append(f"MFU {100 * each.flops_share:.1f} %")
    if each.compile_seconds is not None:
        words.append(f"lower {each.lower_seconds or 0:.1f} + compile {each.compile_seconds:.1f} s")
    if each.peak_bytes:
        words.append(f"{each.peak_bytes / 1e9:.1f} GB")
    if each.error is not None and each.tokens_per_second:
        words.append(f"error {each.error:.2g}")
    return f"      {each.name:<21} {'  '.join(words)}"


def summary(results: Results) -> list[str]:
    """Formats the means or the table of a benchmark's results, and lists what was left out."""
    if any(default(shape) for shape in results.shapes):
        lines = choice_summary(results)
    elif all(shape.op in REGISTRY for shape in results.shapes):
        lines = [overview(results)]
    else:
        lines = [(block_overview if all(shape.op in PRESETS for shape in results.shapes) else model_table)(results)]
    return [*lines, *(f"left out: {note}" for run in results.runs for note in run.left_out)]


def choice_summary(results: Results) -> list[str]:
    """Formats the least ratio by operation and mode, each call that is behind, unmeasured calls, and the call count."""
    measured = [result for result in results.shapes if is_measured(result)]
    groups: dict[str, list[float]] = {}
    for result in measured:
        groups.setdefault(f"{result.op} {result.phase}", []).append(ratio(result))
    lines = [
        f"{name}: {len(found)} calls, best / None at least {min(found):.3f}, mean {geometric_mean(found):.3f}"
        for name, found in groups.items()
    ]
    behind = sorted(filter(is_behind, measured), key=ratio)
    others = (result for result in results.shapes if not is_measured(result))
    lines += [line for result in (*behind, *others) for line in result_lines(result)]
    ratios = [ratio(result) for result in measured]
    least = f", the least ratio {min(ratios):.3f}, their mean {geometric_mean(ratios):.3f}" if ratios else ""
    told = f"{len(behind)} more than 3 % and 0.5 µs behind the fastest"
    return [*lines, f"{len(measured)} of {len(results.shapes)} calls measured, {told}{least}"]
