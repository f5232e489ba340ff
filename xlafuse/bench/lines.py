"""Results as lines of text: one a shape, short enough for a log."""

from __future__ import annotations

import math

from xlafuse.bench.products import teraflops_per_second
from xlafuse.bench.results import Results, ShapeResult, geometric_mean
from xlafuse.bench.rows import grouped, rival_names, rows

_SHORT = {"bfloat16": "bf16", "float16": "f16", "float32": "f32"}
_PHASES = {"forward": "fwd", "backward": "bwd"}
_PROBLEM_LENGTH = 160
_BEST_VARIANTS = 3


def short_spec(spec: str) -> str:
    """A spec's name with short dtypes."""
    for long, short in _SHORT.items():
        spec = spec.replace(long, short)
    return spec


def clock_and_power(shape: ShapeResult) -> tuple[str, str]:
    """The clock in MHz, median and lowest, and the power in W, median and highest, while a shape was timed."""
    read = shape.activity.quantities if shape.activity else {}
    clock, power = read.get("sm_clock_mhz"), read.get("power_watts")
    return (
        f"{clock.median:.0f} ({clock.least:.0f})" if clock else "–",
        f"{power.median:.0f} ({power.most:.0f})" if power else "–",
    )


def title(shape: ShapeResult) -> str:
    """Its phase and spec, shortly."""
    return f"{_PHASES[shape.phase]} {short_spec(shape.spec)}"


def result_lines(shape: ShapeResult) -> list[str]:
    """A shape: µs, GB/s, share of the ceiling, times as fast as XLA and each peer; its best variants below.

    Of an operation that multiplies matrices TF/s.
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
    """What went wrong on a shape, a line each."""
    return [
        f"      {problem.kind}: {problem.candidate}: {' '.join(problem.message.split())[:_PROBLEM_LENGTH]}"
        for problem in shape.problems
    ]


def summary_lines(results: Results) -> list[str]:
    """Geometric means over the large shapes, by operation and phase, and what was left out."""
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
    lines += [f"left out: {note}" for run in results.runs for note in run.left_out]
    return lines
