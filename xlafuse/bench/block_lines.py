"""Results of the block benchmark as lines of text and as tables."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from xlafuse.bench import block
from xlafuse.bench.results import Measured, Results, ShapeResult, geometric_mean
from xlafuse.models import get_preset

_NAMES = {
    "torch_compile": "torch.compile",
    "torch_max_autotune": "torch.compile, autotuned",
    "torch_eager": "PyTorch",
}
_FLOPS_PER_BYTE = 200
"""Of an H200: what it does of the one while it moves the other, nearly."""
_MODES = {"forward": "forward", "grad": "forward + backward"}


def result_lines(result: ShapeResult) -> list[str]:
    """A case: the baseline's µs and TF/s, then how many times as fast each of the others is; wall clock below."""
    title = f" {result.phase} {result.op} {result.spec}"
    if not any(c.name == block.BASELINE for c in result.candidates):
        return [f"{title:<32} not measured"]
    others = [c for c in result.candidates if c.name != block.BASELINE]
    ratios = "  ".join(f"{c.name} {_times(result, c):.3f}" for c in others)
    walls = "  ".join(f"{c.name} {c.timing.wall_us:.0f}" for c in result.candidates)
    activity = _activity(result)
    unsteady = "" if result.is_steady else "  (not steady)"
    first = (
        f"{title:<32} {block.BASELINE} {result.microseconds(block.BASELINE):9.1f} µs "
        f"{rate(result, block.BASELINE)}  {ratios}{unsteady}"
    )
    return [first, f"      wall µs: {walls}{activity and f'; {activity}'}"]


def summary_lines(results: Results) -> list[str]:
    """Geometric means over the cases of each mode, and what was left out."""
    lines = []
    for mode in block.MODES:
        cases = [case for case in results.shapes if case.phase == mode]
        names = dict.fromkeys(c.name for case in cases for c in case.candidates if c.name != block.BASELINE)
        means = {name: geometric_mean([case.speed_up(name, block.BASELINE) for case in cases]) for name in names}
        ratios = "  ".join(f"{name} {mean:.3f}" for name, mean in means.items() if not math.isnan(mean))
        if cases:
            lines.append(f"{mode}, times as fast as {block.BASELINE}: {ratios}  ({len(cases)} shapes)")
    return lines + [f"left out: {note}" for run in results.runs for note in run.left_out]


def overview(results: Results) -> str:
    """README's table: a row a case, a column a strategy or library, kernel times; the fastest is bold."""
    cases, names = _cases(results), _columns(results)
    lines = _head(names)
    for case in cases:
        fastest = min((c.timing.median_us for c in case.candidates), default=math.nan)
        times = [case.microseconds(name) for name in names]
        cells = ["–" if math.isnan(us) else f"**{_shown(us)}**" if us == fastest else _shown(us) for us in times]
        lines.append(_line([*_title(case), *cells]))
    return "\n\n".join((_caption(results), "\n".join(lines)))


def details(results: Results) -> str:
    """For docs/results.md: wall clock, rate, launches, clock and power, and what was not measured."""
    names = _columns(results)
    lines = _head(names, "clock, power")
    for case in _cases(results):
        found = {c.name: c.timing for c in case.candidates}
        cells = [
            f"{_shown(found[name].wall_us)}, {rate(case, name)}, {len(found[name].kernels)}" if name in found else "–"
            for name in names
        ]
        lines.append(_line([*_title(case), *cells, _activity(case)]))
    problems = [
        f"- {case.phase} {case.op} {case.spec}, {problem.candidate}: {' '.join(problem.message.split())[:160]}"
        for case in _cases(results)
        for problem in case.problems
    ]
    caption = "Wall clock of a call in µs, rate by kernel time, number of launches; clock and power meanwhile."
    return "\n\n".join((caption, "\n".join(lines), *(("Not measured:", "\n".join(problems)) if problems else ())))


def _cases(results: Results) -> list[ShapeResult]:
    def order(case: ShapeResult) -> tuple[str, int, int]:
        return case.op, list(_MODES).index(case.phase), -math.prod(block.batch_and_length(case.spec))

    return sorted(results.shapes, key=order)


def _columns(results: Results) -> list[str]:
    """The strategies, then the libraries, in the order in which they were asked for."""
    found = {c.name: c.kind == "peer" for case in results.shapes for c in case.candidates}
    return sorted(found, key=lambda name: found[name])


def _head(names: Sequence[str], *more: str) -> list[str]:
    header = ["block", "batch × length", "", *(_NAMES.get(name, f"`{name}`") for name in names), *more]
    return [_line(header), _line(["---", "---", "---", *["---:"] * len(names), *["---"] * len(more)])]


def _title(case: ShapeResult) -> list[str]:
    return [case.op, case.spec.replace("x", " × "), _MODES[case.phase]]


def _caption(results: Results) -> str:
    runs = [run for run in results.runs if run.shapes]
    device = ", ".join(dict.fromkeys(run.environment.device_kind for run in runs))
    days = ", ".join(dict.fromkeys(run.started[:10] for run in runs))
    commits = ", ".join(dict.fromkeys(run.environment.commit for run in runs if run.environment.commit))
    return (
        f"{device}, {days}{f', commit {commits}' if commits else ''}. µs of all kernels of a call (CUPTI), median; in "
        "a row all took turns in one run. One token a sequence is a decoding step without its cache."
    )


def rate(result: ShapeResult, name: str) -> str:
    """Over a candidate's kernel time: of many tokens the TF/s of the matrix products, of few the GB/s of all arrays."""
    done = block.flops(get_preset(result.op), block.batch_and_length(result.spec), result.phase)
    if done < _FLOPS_PER_BYTE * result.bytes:
        return f"{result.gigabytes_per_second(name):.0f} GB/s"
    return f"{done / result.microseconds(name) / 1e6:.0f} TF/s"


def _times(result: ShapeResult, candidate: Measured) -> float:
    return result.speed_up(candidate.name, block.BASELINE)


def _activity(result: ShapeResult) -> str:
    """Clocks and power while all candidates took turns; nothing where nvidia-smi said nothing."""
    if result.activity is None or not result.activity.samples:
        return ""
    found = result.activity.quantities
    parts = []
    if clock := found.get("sm_clock_mhz"):
        parts.append(f"{clock.least:.0f}–{clock.most:.0f} MHz")
    if power := found.get("power_watts"):
        parts.append(f"{power.least:.0f}–{power.most:.0f} W")
    return ", ".join(parts)


def _shown(us: float) -> str:
    return f"{us:.0f}" if us >= 1000 else f"{us:.1f}"


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"
