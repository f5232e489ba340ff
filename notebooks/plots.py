"""What the notebooks share: one colour a strategy, a few kinds of figure, tables, sentences with computed numbers."""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import matplotlib.pyplot as plt
from IPython.display import Code, Markdown

from hlo_analysis import Analysis, Launch
from pallas_kernels import REGISTRY
from xlafuse.bench.ceiling import COPY
from xlafuse.bench.results import Results, ShapeResult, load, short_spec
from xlafuse.bench.rows import Row, rows

RESULTS = Path(__file__).with_name("results")
COLOURS = {
    "unfused": "#e0cdb6",
    "xla": "#c3c7cd",
    "xla_cudnn": "#8b9098",
    "torch_compile": "#efb118",
    "triton": "#9c6b4e",
    "liger": "#ff725c",
    "cudnn": "#3ca951",
    "variant: all logits twice": "#b9c9ef",
    "pallas": "#97bbf5",
    "pallas_cudnn": "#6cc5b0",
    "best": "#4269d0",
    "mosaic": "#4269d0",
    "copy": "#ffffff",
    "one launch": "#4269d0",
    "products by XLA, gating by a kernel": "#97bbf5",
    "counted": "#c5cee0",
    "roofline": "#c5cee0",
    "a copy in its time": "#8fa3cf",
    "measured": "#2f4b9e",
    "forward": "#a9c3f5",
    "backward": "#2f4b9e",
}
"""Of strategies and of what kernels are timed beside. The kernels of `xlafuse.kernels` are "mosaic"."""
LABELS = {
    "unfused": "unfused",
    "xla": "XLA",
    "xla_cudnn": "XLA, cuDNN attention",
    "torch_compile": "torch.compile",
    "triton": "jax-triton",
    "liger": "Liger",
    "cudnn": "cuDNN",
    "best": "xlafuse: best",
    "mosaic": "xlafuse.kernels",
    "variant: all logits twice": "all logits computed twice",
    "copy": "a copy of the same bytes",
}
PRODUCTS = [name for name, op in REGISTRY.items() if op.flops is not None]
"""Operations with matrix products."""
SITES = {
    "attention_norm": "norm before attention",
    "qkv_projection": "q, k, v and rotary",
    "rope": "q, k, v and rotary",
    "attention": "attention",
    "output_projection": "output projection",
    "attention_residual": "norm before the MLP",
    "mlp_norm": "norm before the MLP",
    "gate_up_projection": "gate, up, activation",
    "activation": "gate, up, activation",
    "down_projection": "down projection",
    "mlp_residual": "down projection",
    "": "other sums",
}
"""The block's scopes, joined where one strategy fuses what another has in two launches."""

plt.rcParams.update(
    {
        "figure.dpi": 110,
        "font.size": 9,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.titlesize": 10,
        "axes.titlelocation": "left",
        "legend.frameon": False,
    }
)


def colour(name: str) -> str:
    """Of a strategy or candidate; what has none gets the ink's."""
    return COLOURS.get(name, "#43474f")


def label(name: str) -> str:
    """As figures and tables call it."""
    return LABELS.get(name, name)


def short(spec: str) -> str:
    """A measured shape's name, with short dtypes and spaces to break at."""
    return short_spec(spec).replace("-", " ")


def say(sentence: str) -> Markdown:
    """A paragraph whose numbers the cell has computed."""
    return Markdown(sentence)


def table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> Markdown:
    """A table; numbers get about three digits, and their columns stand to the right."""
    made = [list(row) for row in rows]
    is_number = [all(_is_number(cell) for cell in column) for column in zip(*made, strict=True)]
    cells = [[number(cell) if isinstance(cell, float) else str(cell) for cell in row] for row in made]
    lines = [header, ["---:" if each else "---" for each in is_number], *cells]
    return Markdown("\n".join(f"| {' | '.join(cell.replace('|', '/') for cell in line)} |" for line in lines))


def number(value: float) -> str:
    """About three digits of it, as 5.07, 25.3 and 1,214."""
    size = abs(value)
    return f"{value:,.0f}" if size >= 100 else f"{value:.1f}" if size >= 10 else f"{value:.2f}"


def _is_number(cell: object) -> bool:
    return isinstance(cell, (int, float)) or cell == "" or str(cell)[0] in "0123456789+-–"


def code(*functions: Callable[..., object]) -> Code:
    """The source of functions that a library holds."""
    return Code("\n\n".join(inspect.getsource(function) for function in functions), language="python")


def launches(analysis: Analysis) -> Markdown:
    """The launch table: what each kernel moves, how long at least, and how long it took where that is recorded."""
    is_measured = any(launch.measured_us is not None for launch in analysis.launches)
    has_scopes = any(launch.scope for launch in analysis.launches)

    def row(launch: Launch) -> list[object]:
        repeated = f", {launch.repeat} times" if launch.repeat > 1 else ""
        scope = [launch.scope.removeprefix("block/")] if has_scopes else []
        measured = ["" if launch.measured_us is None else launch.measured_us] if is_measured else []
        flops = launch.flops / 1e9 if launch.flops > 5e8 else ""
        return [
            launch.kind + repeated,
            *scope,
            moved(launch) / 1e6,
            flops,
            launch.roofline_us,
            *measured,
        ]

    header = ["kernel", *(["scope"] if has_scopes else []), "MB", "GFLOP", "roofline, µs"]
    return table([*header, *(["measured, µs"] if is_measured else [])], map(row, analysis.launches))


def moved(launch: Launch) -> int:
    """Bytes that one launch reads and writes."""
    return launch.bytes_read + launch.bytes_written


def site_of(launch: Launch) -> str:
    """Which of `SITES` a launch of the block belongs to."""
    return SITES[launch.scope.removeprefix("block/").split("/")[0]]


def by_site(analysis: Analysis, value: Callable[[Launch], float]) -> dict[str, float]:
    """Sums of a value of the block's launches, by site."""
    sums = dict.fromkeys(SITES.values(), 0.0)
    for launch in analysis.launches:
        sums[site_of(launch)] += value(launch) * launch.repeat
    return sums


def bars(
    values: Mapping[str, float], xlabel: str, *, title: str = "", form: str = "{:,.0f}", line: float | None = None
) -> None:
    """One bar a strategy or candidate, with its number; none for a NaN. line: where to draw a vertical one."""
    known = {name: value for name, value in values.items() if math.isfinite(value)}
    _, axes = plt.subplots(figsize=(7.2, 0.75 + 0.34 * len(known)), layout="constrained")
    for place, (name, value) in enumerate(known.items()):
        axes.barh(place, value, color=colour(name), edgecolor="#43474f", linewidth=0.4)
        axes.text(value, place, f" {form.format(value)}", va="center", fontsize=8)
    axes.set_yticks(range(len(known)), [label(name) for name in known])
    axes.invert_yaxis()
    axes.margins(x=0.12)
    if line is not None:
        axes.axvline(line, color="#43474f", linewidth=0.8, linestyle="--", zorder=0)
    axes.set(xlabel=xlabel, title=title)
    plt.show()


def grouped_bars(
    groups: Mapping[str, Mapping[str, float]],
    xlabel: str,
    *,
    title: str = "",
    form: str = "{:,.0f}",
    line: float | None = None,
) -> None:
    """For each group a bar a strategy: `groups[group][strategy]`. line: where to draw a vertical one."""
    names = list(dict.fromkeys(name for group in groups.values() for name in group))
    height = 0.8 / len(names)
    figure, axes = plt.subplots(figsize=(7.2, 1.1 + (0.1 + 0.17 * len(names)) * len(groups)), layout="constrained")
    for shift, name in enumerate(names):
        places = [place for place, group in enumerate(groups.values()) if name in group]
        values = [group[name] for group in groups.values() if name in group]
        at = [place + (shift - (len(names) - 1) / 2) * height for place in places]
        drawn = axes.barh(
            at,
            values,
            height * 0.92,
            color=colour(name),
            label=label(name),
            edgecolor="#43474f",
            linewidth=0.4,
        )
        axes.bar_label(drawn, [f" {form.format(value)}" for value in values], fontsize=7)
    axes.set_yticks(range(len(groups)), list(groups))
    axes.invert_yaxis()
    axes.margins(x=0.1, y=0.02)
    if line is not None:
        axes.axvline(line, color="#43474f", linewidth=0.8, linestyle="--")
    axes.set_xlabel(xlabel)
    axes.legend(ncols=len(names), loc="lower left", bbox_to_anchor=(0.0, 1.0), borderaxespad=0.2, fontsize=8)
    figure.suptitle(title, x=0.01, ha="left", fontsize=10)
    plt.show()


def block_results(mode: str, shape: str) -> ShapeResult:
    """The last run of `xlafuse bench block` that timed all strategies and torch.compile in turns, for llama3-8b."""
    found = [
        s for s in load(RESULTS / "block-h200.json").shapes if (s.op, s.phase, s.spec) == ("llama3-8b", mode, shape)
    ]
    return max(found, key=lambda shape: len(shape.candidates))


def kernel_results() -> Results:
    """What `xlafuse bench kernels` measured on an H200: every operation, beside XLA and other libraries."""
    return load(RESULTS / "kernels-h200.json")


def kernel_row(op: str, phase: str, spec: str) -> Row:
    """One shape of `kernel_results`, with the other libraries that only another run timed."""
    return next(row for row in rows(kernel_results()) if row.main.key == (op, spec, phase))


def products_of_gradients(op: str, part: str) -> dict[int, dict[str, float]]:
    """Times on an H100 of an operation's products in a training step: µs by rows and way. part: which products."""
    times = json.loads((RESULTS / "products-backward-h100.json").read_text(encoding="utf-8"))["times"]
    return {each["rows"]: each["us"] for each in times if (each["op"], each["part"]) == (op, part)}


def share_of_copy(row: Row, name: str) -> float:
    """A candidate's speed over that of a copy of as many bytes, both of one run; NaN where none timed it."""
    shapes = (
        shape for shape in (row.main, *(each for _, each in row.others)) if math.isfinite(shape.microseconds(name))
    )
    shape = next(shapes, row.main)
    return shape.microseconds(COPY) / shape.microseconds(name)


def roofline(analyses: Mapping[str, Analysis], *, title: str = "") -> None:
    """Each measured launch by FLOPs a byte and FLOP/s; its area is its time. The roofs are the device's peaks."""
    device = next(iter(analyses.values())).device
    peak = dict(device.matrix_flops)["bf16"]
    _, axes = plt.subplots(figsize=(7.2, 4.2), layout="constrained")
    low, high = 0.1, 1e4
    ridge = peak / device.memory_bandwidth
    axes.plot(
        [low, ridge, high],
        [low * device.memory_bandwidth / 1e12, peak / 1e12, peak / 1e12],
        "k-",
        lw=0.8,
    )
    axes.text(ridge * 1.15, peak / 1e12 * 1.12, f"{peak / 1e12:.0f} TFLOP/s, bf16", fontsize=8)
    axes.text(0.13, 0.75, f"{device.memory_bandwidth / 1e12:.1f} TB/s", fontsize=8, rotation=38)
    for name, analysis in analyses.items():
        shown = [each for each in analysis.launches if each.measured_us and each.flops / max(1, moved(each)) > low]
        axes.scatter(
            [each.flops / moved(each) for each in shown],
            [each.flops / (each.measured_us or 1.0) / 1e6 for each in shown],
            s=[6 + 0.25 * (each.measured_us or 0.0) for each in shown],
            color=colour(name),
            edgecolors="#43474f",
            linewidths=0.5,
            alpha=0.8,
            label=label(name),
        )
    axes.set(xscale="log", yscale="log", xlim=(low, high), ylim=(0.1, 2500), title=title)
    axes.set(xlabel="FLOPs a byte of HBM traffic (counted)", ylabel="TFLOP/s (measured)")
    for handle in axes.legend(loc="lower right").legend_handles:
        handle.set_sizes([40])  # pyright: ignore[reportOptionalMemberAccess, reportAttributeAccessIssue]
    plt.show()
