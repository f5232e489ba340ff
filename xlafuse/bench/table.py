"""README's results table, made from a file of results, and its place between two markers."""

from __future__ import annotations

import math
from collections.abc import Iterable

from xlafuse.bench.lines import grouped, is_large, short_spec
from xlafuse.bench.results import Results, ResultsError, ShapeResult, geometric_mean

BEGIN, END = "<!-- results:begin -->", "<!-- results:end -->"
_PEER_TITLES = {
    "torch_compile": "torch.compile",
    "torch_max_autotune": "torch.compile, autotuned",
    "torch_eager": "PyTorch",
    "liger": "Liger",
}


def markdown(results: Results) -> str:
    """The tables: means over the shapes past the cache, and folded away all shapes, small ones with times alone."""
    large = [shape for shape in results.shapes if is_large(shape) and shape.chosen]
    small = [shape for shape in results.shapes if not is_large(shape) and shape.chosen]
    parts = [_caption(results)]
    if large:
        parts.append(_means_table(large))
    parts.append("<details><summary>Every shape</summary>")
    if large:
        parts.append(_large_table(large))
    if small:
        parts.append(_small_table(small))
    return "\n\n".join((*parts, "</details>"))


def _caption(results: Results) -> str:
    environments = [run.environment for run in results.runs if run.shapes]
    device = ", ".join(dict.fromkeys(e.device_kind for e in environments))
    versions: dict[str, str] = {}
    for environment in environments:
        versions.update(environment.packages)
    shown = ", ".join(
        f"{name} {versions[name]}" for name in ("jax", "torch", "triton", "liger-kernel") if name in versions
    )
    days = sorted({run.started[:10] for run in results.runs if run.shapes})
    by_events = {c.name for shape in results.shapes for c in shape.candidates if c.timing.timer == "cuda_events"}
    others = f", of {', '.join(sorted(by_events))} CUDA events" if by_events else ""
    when = days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}" if days else "never"
    return (
        f"{device}, {when}; {shown}. Median GPU time of a call (CUPTI{others}), inputs random normal, buffers past "
        "the L2 cache; all columns of a row were timed in turns in one run. The ceiling is the faster of a plain copy "
        "and elementwise work on the same bytes. × is how many times as fast ours is."
    )


def _peer_names(shapes: Iterable[ShapeResult]) -> list[str]:
    measured = {candidate.name for shape in shapes for candidate in shape.of_kind("peer")}
    return [name for name in _PEER_TITLES if name in measured]


def _means_table(shapes: list[ShapeResult]) -> str:
    rivals = ["xla", *_peer_names(shapes)]
    header = ["operation", "", "of the ceiling", "× XLA", *(f"× {_PEER_TITLES[peer]}" for peer in rivals[1:]), "shapes"]
    lines = [_row(header), _row(["---", "---", *["---:"] * (len(header) - 2)])]
    for op, phase, group in [*grouped(shapes), ("geometric mean", "", shapes)]:
        ours = [shape for shape in group if shape.chosen != "xla"]
        share = geometric_mean([shape.ceiling_share(shape.chosen or "") for shape in group])
        means = (geometric_mean([shape.speed_up(shape.chosen or "", rival) for shape in ours]) for rival in rivals)
        name = f"`{op}`" if phase else op
        lines.append(_row([name, phase, _percent(share), *(_number(mean, 2) for mean in means), str(len(group))]))
    return "\n".join(lines)


def _large_table(shapes: list[ShapeResult]) -> str:
    peers = _peer_names(shapes)
    header = ["operation", "", "shape", "µs", "GB/s", "of the ceiling", "× XLA"]
    header += [f"× {_PEER_TITLES[peer]}" for peer in peers]
    lines = [_row(header), _row(["---", "---", "---", *["---:"] * (len(header) - 3)])]
    for op, phase, group in grouped(shapes):
        for shape in group:
            name = shape.chosen or ""
            lines.append(
                _row(
                    [
                        f"`{op}`",
                        phase,
                        short_spec(shape.spec),
                        _number(shape.microseconds(name), 1),
                        _number(shape.gigabytes_per_second(name), 0),
                        _percent(shape.ceiling_share(name)),
                        _ratio(shape, name, "xla"),
                        *(_ratio(shape, name, peer) for peer in peers),
                    ]
                )
            )
    return "\n".join(lines)


def _small_table(shapes: Iterable[ShapeResult]) -> str:
    lines = [
        _row(["small calls", "", "shape", "µs", "XLA, µs", "difference, µs"]),
        _row(["---", "---", "---", "---:", "---:", "---:"]),
    ]
    for op, phase, group in grouped(shapes):
        for shape in group:
            ours, xla = shape.microseconds(shape.chosen or ""), shape.microseconds("xla")
            cells = [f"`{op}`", phase, short_spec(shape.spec), _number(ours, 2), _number(xla, 2)]
            lines.append(_row([*cells, f"{ours - xla:+.2f}"]))
    return "\n".join(lines)


def _row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _number(value: float, digits: int) -> str:
    return f"{value:.{digits}f}" if math.isfinite(value) else "–"


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %" if math.isfinite(share) else "–"


def _ratio(shape: ShapeResult, name: str, rival: str) -> str:
    return "–" if name == rival else _number(shape.speed_up(name, rival), 2)


def place(text: str, table: str) -> str:
    """`text` with `table` between its two markers.

    Raises:
        ResultsError: the markers are not there, once each and in order.
    """
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end or BEGIN in after or END in after:
        raise ResultsError(f"expected one {BEGIN} and one {END} after it")
    return f"{before}{BEGIN}\n{table}\n{END}{after}"
