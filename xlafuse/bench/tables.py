"""Makes the tables of README and docs/results.md from a file of results and puts them between two markers."""

from __future__ import annotations

import math
from collections.abc import Iterable

from xlafuse.bench.results import (
    Results,
    ResultsError,
    Run,
    ShapeResult,
    geometric_mean,
    markdown_table,
    short_spec,
)
from xlafuse.bench.rows import (
    RIVALS,
    Row,
    grouped,
    is_bound_by_products,
    rival_names,
    rows,
    teraflops_per_second,
)
from xlafuse.bench.settings import PHASES

_PACKAGES = (
    *("jax", "torch", "triton", "liger-kernel", "jax-triton"),
    *("flash-attn3-jax", "flash-attn-4", "quack-kernels", "nvidia-cutlass-dsl"),
)

CLOCKS = (
    "MHz: the multiprocessors' clock while the candidates of a shape took turns, median and lowest; W: the board's "
    "power, median and highest, of 700 W at most. Between turns the GPU waits for the host, so that the median is less "
    "than the power of the kernels alone."
)


def overview(results: Results) -> str:
    """Makes the tables of means by operation and phase: memory-bound shapes, then shapes bound by matrix products."""
    streamed, _, multiplied = _parts(results)
    parts = [_caption(results)]
    if streamed:
        parts.append(_means_table(streamed))
    if multiplied:
        parts.append(_means_table(multiplied, are_products=True))
    return "\n\n".join(parts)


_CLASSES = {
    "row-wise operations": ("rms_norm", "layer_norm", "dropout_residual_norm", "gated_activation", "bias_activation",
                            "softmax", "rope", "cross_entropy", "batch_norm"),
    "matrix products": ("linear", "gated_linear", "norm_linear", "qkv_projection", "linear_residual_norm",
                        "quantized_linear", "lora_linear"),
    "products of experts": ("grouped_linear", "grouped_gated_linear"),
    "linear + cross-entropy": ("linear_cross_entropy",),
    "attention": ("attention",),
    "attention with a cache": ("decode_attention",),
    "embedding": ("embedding",),
    "recommendation": ("dot_interaction",),
}  # fmt: skip


def summary(results: Results) -> str:
    """Makes README's table: geometric means over classes of operations, against XLA and the fastest other library."""
    streamed, _, multiplied = _parts(results)
    lines = []
    for name, operations in _CLASSES.items():
        for phase in PHASES:
            memory = [row for row in streamed if row.main.op in operations and row.main.phase == phase]
            compute = [row for row in multiplied if row.main.op in operations and row.main.phase == phase]
            table = memory + compute
            if not table:
                continue
            share = geometric_mean([row.main.ceiling_share(row.ours) for row in memory])
            rate = geometric_mean([teraflops_per_second(row.main, row.ours) for row in compute])
            others = [[row.speed_up(rival) for rival in rival_names([row])] for row in table]
            fastest = [min(found) for ratios in others if (found := [x for x in ratios if math.isfinite(x)])]
            by_memory = len(memory) > len(compute)
            cells = [str(len(table)), _percent(share) if by_memory else "–", "–" if by_memory else _number(rate, 0)]
            cells += [_number(geometric_mean([row.speed_up("xla") for row in table]), 2)]
            cells += [_number(geometric_mean(fastest), 2)]
            lines.append([name, phase, *cells])
    header = ["", "", "shapes", "share of the ceiling", "TFLOP/s", "× XLA", "× fastest other library"]
    return f"{_caption(results)}\n\n{markdown_table(header, lines, 'llrrrrr')}"


def details(results: Results) -> str:
    """Makes the tables of every shape: memory-bound, bound by matrix products, and small, each row with its run."""
    streamed, small, multiplied = _parts(results)
    parts = [_caption(results)]
    if streamed:
        parts += ["## Bound by memory", _shapes_table(streamed)]
    if multiplied:
        parts += ["## Bound by matrix products", _shapes_table(multiplied, are_products=True), CLOCKS]
    if small:
        parts += ["## Small calls", _small_table(small)]
    return "\n\n".join((*parts, "## Runs", _runs(results)))


def _parts(results: Results) -> tuple[list[Row], list[Row], list[Row]]:
    """Splits the rows into memory-bound shapes beyond the cache, small shapes, and shapes bound by matrix products."""
    table = [row for _, _, group in grouped(rows(results)) for row in group if row.ours]
    multiplied = [row for row in table if is_bound_by_products(row.main)]
    others = [row for row in table if not is_bound_by_products(row.main)]
    return [row for row in others if row.main.is_large], [row for row in others if not row.main.is_large], multiplied


def _caption(results: Results) -> str:
    runs = [run for run in results.runs if run.shapes]
    device = ", ".join(dict.fromkeys(run.environment.device_kind for run in runs))
    days = sorted({run.started[:10] for run in runs})
    when = days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}" if days else "never"
    return (
        f"{device}, {when}. Median GPU time of a call (CUPTI), inputs random normal, buffers past the L2 "
        "cache. The ceiling is the faster of a plain copy and elementwise work on the same bytes. × is how many times "
        "as fast ours is; both times of a ratio are of one run, in turns."
    )


def _runs(results: Results) -> str:
    """Lists the runs by the number that the rows' last column shows."""
    lines = ["By the number in a row's last column:", ""]
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
    return sorted(measured, key=lambda name: [*RIVALS, *measured].index(name))


def _rival_heads(rivals: Iterable[str]) -> list[str]:
    return [f"× {RIVALS.get(name, name)}" for name in rivals]


def _means_table(table: list[Row], *, are_products: bool = False) -> str:
    rivals = ["xla", *_ordered_rivals(table)]
    lines = []
    for op, phase, group in [*grouped(table), *([] if are_products else [("geometric mean", "", table)])]:
        speeds = sorted(teraflops_per_second(row.main, row.ours) for row in group)
        ends = dict.fromkeys(_number(speed, 0) for speed in (speeds[0], speeds[-1]))
        share = _percent(geometric_mean([row.main.ceiling_share(row.ours) for row in group]))
        means = (geometric_mean([row.speed_up(rival) for row in group]) for rival in rivals)
        first = [f"`{op}`" if phase else op, phase, " to ".join(ends) if are_products else share]
        lines.append([*first, *(_number(mean, 2) for mean in means), str(len(group))])
    first = ["matrix products", "", "TF/s"] if are_products else ["bound by memory", "", "of the ceiling"]
    return markdown_table([*first, *_rival_heads(rivals), "shapes"], lines, "ll" + "r" * (2 + len(rivals)))


def _shapes_table(table: list[Row], *, are_products: bool = False) -> str:
    rivals = _ordered_rivals(table)
    lines = []
    for row in table:
        shape, ours = row.main, row.ours
        speed = (
            [_number(teraflops_per_second(shape, ours), 0)]
            if are_products
            else [_number(shape.gigabytes_per_second(ours), 0), _percent(shape.ceiling_share(ours))]
        )
        ratios = [_number(row.speed_up(rival), 2) for rival in ("xla", *rivals)]
        activity = clock_and_power(shape) if are_products else ()
        elsewhere = (f"{RIVALS.get(name, name)} {run}" for name, run in row.runs_elsewhere(rivals).items())
        runs = ", ".join([str(row.run), *elsewhere])
        lines.append([*_named(row), _number(shape.microseconds(ours), 1), *speed, *ratios, *activity, runs])
    speed, activity = (["TF/s"], ["MHz", "W"]) if are_products else (["GB/s", "of the ceiling"], [])
    header = ["operation", "", "shape", "µs", *speed, *_rival_heads(["xla", *rivals]), *activity, "run"]
    return markdown_table(header, lines, "lll" + "r" * (len(header) - 4) + "l")


def _small_table(table: list[Row]) -> str:
    lines = []
    for row in table:
        ours, xla = row.main.microseconds(row.ours), row.main.microseconds("xla")
        lines.append([*_named(row), _number(ours, 2), _number(xla, 2), f"{ours - xla:+.2f}", str(row.run)])
    return markdown_table(["small calls", "", "shape", "µs", "XLA, µs", "difference, µs", "run"], lines, "lllrrrl")


def _named(row: Row) -> list[str]:
    return [f"`{row.main.op}`", row.main.phase, short_spec(row.main.spec)]


def clock_and_power(shape: ShapeResult) -> tuple[str, str]:
    """Formats a shape's clock in MHz, median and lowest, and its power in W, median and highest."""
    read = shape.activity.quantities if shape.activity else {}
    clock, power = read.get("sm_clock_mhz"), read.get("power_watts")
    return (
        f"{clock.median:.0f} ({clock.least:.0f})" if clock else "–",
        f"{power.median:.0f} ({power.most:.0f})" if power else "–",
    )


def _number(value: float, digits: int) -> str:
    return f"{value:.{digits}f}" if math.isfinite(value) else "–"


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %" if math.isfinite(share) else "–"


def place(text: str, table: str, marker: str) -> str:
    """Replaces the part of `text` between `<!-- marker:begin -->` and `<!-- marker:end -->` with `table`.

    Raises:
        ResultsError: the two comments are not there once each and in order.
    """
    first, last = f"<!-- {marker}:begin -->", f"<!-- {marker}:end -->"
    before, begin, rest = text.partition(first)
    _, end, after = rest.partition(last)
    if not begin or not end or first in after or last in after:
        raise ResultsError(f"expected one {first} and one {last} after it")
    return f"{before}{first}\n{table}\n{last}{after}"
