"""README's results table, made from a file of results, and its place between two markers."""

from __future__ import annotations

import math
from collections.abc import Iterable

from xlafuse.bench.lines import short_spec
from xlafuse.bench.results import Results, ResultsError, Run, geometric_mean
from xlafuse.bench.rows import Row, grouped, rival_names, rows

BEGIN, END = "<!-- results:begin -->", "<!-- results:end -->"
_RIVALS = {
    "torch_compile": "torch.compile",
    "torch_max_autotune": "torch.compile, autotuned",
    "torch_eager": "PyTorch",
    "liger": "Liger",
    "triton": "jax-triton",
}
_PACKAGES = ("jax", "torch", "triton", "liger-kernel", "jax-triton")


def markdown(results: Results) -> str:
    """The tables: means over the shapes past the cache, and folded away all shapes, small ones with times alone."""
    table = [row for row in rows(results) if row.ours]
    large = [row for row in table if row.main.is_large]
    small = [row for row in table if not row.main.is_large]
    parts = [_caption(results)]
    if large:
        parts.append(_means_table(large))
    parts.append("<details><summary>Every shape</summary>")
    parts.append(_runs(results))
    if large:
        parts.append(_large_table(large))
    if small:
        parts.append(_small_table(small))
    return "\n\n".join((*parts, "</details>"))


def _caption(results: Results) -> str:
    runs = [run for run in results.runs if run.shapes]
    device = ", ".join(dict.fromkeys(run.environment.device_kind for run in runs))
    days = sorted({run.started[:10] for run in runs})
    by_events = {c.name for shape in results.shapes for c in shape.candidates if c.timing.timer == "cuda_events"}
    others = f", of {', '.join(sorted(by_events))} CUDA events" if by_events else ""
    when = days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}" if days else "never"
    return (
        f"{device}, {when}. Median GPU time of a call (CUPTI{others}), inputs random normal, buffers past the L2 "
        "cache. The ceiling is the faster of a plain copy and elementwise work on the same bytes. × is how many times "
        "as fast ours is; both times of a ratio are of one run, in turns."
    )


def _runs(results: Results) -> str:
    """What each run was: the rows' last column has its number."""
    lines = ["Runs, by the number in a row's last column:", ""]
    lines += [f"{i}. {_run(run)}" for i, run in enumerate(results.runs, start=1)]
    return "\n".join(lines)


def _run(run: Run) -> str:
    packages = run.environment.packages
    versions = ", ".join(f"{name} {packages[name]}" for name in _PACKAGES if name in packages)
    peers = ", ".join(run.settings.get("peers") or ()) or "none"
    commit = f"; commit {run.environment.commit}" if run.environment.commit else ""
    return f"{run.started[:16].replace('T', ' ')} UTC{commit}; peers: {peers}; {versions}"


def _ordered_rivals(table: Iterable[Row]) -> list[str]:
    measured = rival_names(table)
    return [name for name in _RIVALS if name in measured]


def _means_table(table: list[Row]) -> str:
    rivals = ["xla", *_ordered_rivals(table)]
    header = ["operation", "", "of the ceiling", "× XLA", *(f"× {_RIVALS[name]}" for name in rivals[1:]), "shapes"]
    lines = [_line(header), _line(["---", "---", *["---:"] * (len(header) - 2)])]
    for op, phase, group in [*grouped(table), ("geometric mean", "", table)]:
        share = geometric_mean([row.main.ceiling_share(row.ours) for row in group])
        means = (geometric_mean([row.speed_up(rival) for row in group]) for rival in rivals)
        name = f"`{op}`" if phase else op
        lines.append(_line([name, phase, _percent(share), *(_number(mean, 2) for mean in means), str(len(group))]))
    return "\n".join(lines)


def _large_table(table: list[Row]) -> str:
    rivals = _ordered_rivals(table)
    header = ["operation", "", "shape", "µs", "GB/s", "of the ceiling", "× XLA"]
    header += [*(f"× {_RIVALS[name]}" for name in rivals), "run"]
    lines = [_line(header), _line(["---", "---", "---", *["---:"] * (len(header) - 4), "---"])]
    for op, phase, group in grouped(table):
        for row in group:
            cells = [f"`{op}`", phase, short_spec(row.main.spec)]
            cells += [_number(row.main.microseconds(row.ours), 1)]
            cells += [_number(row.main.gigabytes_per_second(row.ours), 0)]
            cells += [_percent(row.main.ceiling_share(row.ours)), _number(row.speed_up("xla"), 2)]
            cells += [*(_number(row.speed_up(rival), 2) for rival in rivals), _runs_of(row, rivals)]
            lines.append(_line(cells))
    return "\n".join(lines)


def _runs_of(row: Row, rivals: list[str]) -> str:
    elsewhere = row.runs_elsewhere(rivals)
    return ", ".join([str(row.run), *(f"{_RIVALS[name]} {run}" for name, run in elsewhere.items())])


def _small_table(table: list[Row]) -> str:
    lines = [
        _line(["small calls", "", "shape", "µs", "XLA, µs", "difference, µs", "run"]),
        _line(["---", "---", "---", "---:", "---:", "---:", "---"]),
    ]
    for op, phase, group in grouped(table):
        for row in group:
            ours, xla = row.main.microseconds(row.ours), row.main.microseconds("xla")
            cells = [f"`{op}`", phase, short_spec(row.main.spec), _number(ours, 2), _number(xla, 2)]
            lines.append(_line([*cells, f"{ours - xla:+.2f}", str(row.run)]))
    return "\n".join(lines)


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _number(value: float, digits: int) -> str:
    return f"{value:.{digits}f}" if math.isfinite(value) else "–"


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %" if math.isfinite(share) else "–"


def place(text: str, table: str, marker: str = "results") -> str:
    """`text` with `table` between the two comments `<!-- marker:begin -->` and `<!-- marker:end -->`.

    Raises:
        ResultsError: they are not there, once each and in order.
    """
    first, last = f"<!-- {marker}:begin -->", f"<!-- {marker}:end -->"
    before, begin, rest = text.partition(first)
    _, end, after = rest.partition(last)
    if not begin or not end or first in after or last in after:
        raise ResultsError(f"expected one {first} and one {last} after it")
    return f"{before}{first}\n{table}\n{last}{after}"
