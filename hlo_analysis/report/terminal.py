"""Prints a comparison on a terminal: verdict, strategy table, sites of fused operations, where the time goes."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Sequence

from rich import box
from rich.console import Console, Group
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from hlo_analysis.records import Analysis, Comparison, Hotspot, StrategyResult
from hlo_analysis.report import formats, sentences
from hlo_analysis.report.console import fitted
from hlo_analysis.report.formats import Units, plural, units_of
from hlo_analysis.report.hotspots import heading, launches_text, listed, time_text
from hlo_analysis.report.times import measured_sentences


def render_terminal(comparison: Comparison, console: Console, *, hotspots: int = 5) -> None:
    """Prints the comparison on `console`: verdict, strategy table, sites, and the `hotspots` first hotspots."""
    console.print()
    console.print(Text(comparison.title, style="bold"))
    console.print(Text(sentences.verdict(comparison)))
    console.print()
    makers = [functools.partial(strategy_table, comparison, left_out=each) for each in _LEFT_OUT]
    table = fitted(console, makers)
    console.print(table)
    if not isinstance(table, Table) or len(table.columns) < len(makers[0]().columns):
        console.print(fitted(console, [lambda: kinds_table(comparison)]))
    for line in _footnotes(comparison):
        console.print(Text(line, style="dim"))
    for result in comparison.strategies:
        if result.sites:
            console.print()
            console.print(_sites(result))
    base = comparison[comparison.baseline]
    if base.analysis is not None and (found := listed(base.analysis)):
        console.print()
        first = f"the first {hotspots} of {len(found)} causes" if len(found) > hotspots else plural(len(found), "cause")
        console.print(Text(f"Where the time of {base.name} goes: {heading(base.analysis, found)}; {first}", "bold"))
        console.print(Group(*(_hotspot(base.analysis, *each) for each in enumerate(found[:hotspots], start=1))))
    console.print()


_LEFT_OUT = ((), ("kinds",), ("kinds", "saved"), ("kinds", "saved", "wall"), ("kinds", "saved", "wall", "peak"))
"""Columns left out of the strategy table, one after the other, until it fits the terminal."""

_MAX_REFUSED = 5
"""Most refused sites listed; the JSON has all of them."""


def kinds_table(comparison: Comparison) -> Table:
    """Returns a table of the launches of each kind, by strategy."""
    table = Table(box=None, pad_edge=False, show_header=True, header_style="bold")
    table.add_column("strategy", no_wrap=True)
    table.add_column("launches by kind, counted", min_width=20)
    for result in comparison.strategies:
        if result.analysis is not None:
            table.add_row(escape(result.name), _kinds(result.analysis))
    return table


def strategy_table(comparison: Comparison, *, left_out: Sequence[str] = ()) -> Table:
    """Returns a table with one row per strategy; percentages compare with the baseline.

    left_out: columns not to show, among "kinds", "saved", "wall" and "peak".
    """
    units = units_of(comparison)
    has_time = any(result.measured_us is not None for result in comparison.strategies)
    has_wall = any(result.wall_us is not None for result in comparison.strategies)
    headings = {
        "launches": "launches\ncounted",
        "kinds": "by kind\ncounted",
        "traffic": f"{sentences.memory_name(comparison)} {units.traffic.name}\ncounted",
        **({"saved": "saved\ncounted"} if comparison.unfused else {}),
        "roofline": f"roofline {units.time.name}\nestimated",
        "estimate": f"estimate {units.time.name}\nestimated",
        "peak": f"peak {units.memory.name}\ncounted",
        **({"time": f"time {units.time.name}\nmeasured"} if has_time else {}),
        **({"wall": f"wall {units.time.name}\nmeasured"} if has_wall else {}),
    }
    shown = [name for name in headings if name not in left_out]
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True, header_style="bold")
    table.add_column("strategy", no_wrap=True)
    for name in shown:
        if name == "kinds":
            table.add_column(headings[name], overflow="fold", min_width=_KINDS_WIDTH)
        else:
            table.add_column(headings[name], justify="right", no_wrap=True)
    base = comparison[comparison.baseline].analysis
    for result in comparison.strategies:
        name = f"[bold]{escape(result.name)}[/] *" if result.name == comparison.baseline else escape(result.name)
        cells = _cells(comparison, result, base, units)
        table.add_row(name, *(cells.get(each, "–") for each in shown))
    return table


_KINDS_WIDTH = 36
"""Least width of the column of launch kinds; in less room they have a table of their own."""


def _cells(comparison: Comparison, result: StrategyResult, base: Analysis | None, units: Units) -> dict[str, str]:
    """Returns the cells of a strategy's row that are known, by column."""
    analysis = result.analysis
    measured = {"time": units.time.show(result.measured_us), "wall": units.time.show(result.wall_us)}
    if analysis is None:
        return {"kinds": "see below", **measured}
    against = base if base is not None and base is not analysis else None
    bytes_moved, roofline = analysis.traffic.bytes, analysis.roofline_us
    return {
        "launches": str(analysis.launch_count),
        "kinds": _kinds(analysis),
        "traffic": _with_change(units.traffic.show(bytes_moved), bytes_moved, against and against.traffic.bytes),
        **({"saved": sentences.saved_percent(comparison, result.name)} if comparison.unfused is not None else {}),
        "roofline": sentences.roofline_text(analysis, base, units.time)
        if sentences.is_lower_bound(analysis, base)
        else _with_change(units.time.show(roofline), roofline, against and against.roofline_us),
        "estimate": sentences.estimate_text(analysis, base, units.time),
        "peak": units.memory.show(sentences.peak_bytes(analysis)),
        **measured,
    }


def _kinds(analysis: Analysis) -> str:
    return " · ".join(f"{count}\N{NO-BREAK SPACE}{kind}" for kind, count in analysis.launches_by_kind.items())


def _with_change(text: str, value: float, base: float | None) -> str:
    if base is None:
        return text
    change = formats.format_change(value, base)
    colour = {"−": "green", "+": "red"}.get(change[:1], "dim")
    return f"{text} [{colour}]{change:>5}[/]"


def _footnotes(comparison: Comparison) -> list[str]:
    """Explains the table: the baseline, GEMM choices, numerics, failures, and limits of the captures."""
    done = [(result, result.analysis) for result in comparison.strategies if result.analysis is not None]
    memory = sentences.memory_name(comparison)
    saved = f" Saved: of the {memory} traffic of {comparison.unfused}." if comparison.unfused else ""
    lines = [f"* baseline of the differences. {memory}: bytes read and written.{saved}"]
    choices: dict[str, list[str]] = {}
    for result, analysis in done:
        choices.setdefault(sentences.gemm_choice(analysis.provenance), []).append(result.name)
    if len(choices) == 1:
        lines.append(f"GEMM choice: {next(iter(choices))}.")
    elif choices:
        lines.append("GEMM choice: " + "; ".join(f"{words} ({', '.join(who)})" for words, who in choices.items()) + ".")
    if seconds := sentences.seconds_to_compile(comparison):
        lines.append(f"Seconds to lower and compile, on this machine and with dumps: {seconds}.")
    checked = [result for result, _ in done if result.numerics is not None]
    if checked:
        failed = [result.name for result in checked if result.numerics is not None and not result.numerics.passed]
        lines.append(
            f"Numerics against float64: {len(checked) - len(failed)} of {len(checked)} within twice the baseline's "
            + "error"
            + (f"; FAILED: {', '.join(failed)}." if failed else ".")
        )
    lines.extend(
        f"{result.name} has no analysis: {_first_sentence(result.error or 'no reason given')}"
        for result in comparison.strategies
        if result.analysis is None
    )
    # The page shows the caveats of other strategies.
    notes = [*measured_sentences(comparison), *sentences.caveats(comparison)]
    lines.extend(note for names, note in notes if not names or comparison.baseline in names)
    return lines


def _first_sentence(text: str) -> str:
    head, stop, _ = text.splitlines()[0].partition(". ")
    return head + stop.rstrip()


def _sites(result: StrategyResult) -> Group:
    texts = sentences.site_texts(result.sites)
    refused = texts["refused"]
    counts = Counter(site.outcome for site in result.sites)
    shown = [name for name in texts if counts[name] or name != "left to XLA"]
    head = f"Sites of {result.name}: {', '.join(f'{counts[name]} {name}' for name in shown)}"
    lines = [Text.assemble(("+ ", "green"), text) for text in texts["taken"]]
    lines += [Text(f"= {text}", "dim") for text in texts["left to XLA"]]
    lines += [Text.assemble(("- ", "red"), text) for text in refused[:_MAX_REFUSED]]
    if len(refused) > _MAX_REFUSED:
        lines.append(Text(f"- and {len(refused) - _MAX_REFUSED} more refused", "dim"))
    return Group(Text(head, "bold"), *lines)


def _hotspot(analysis: Analysis, place: int, item: Hotspot) -> Padding:
    head = Text.assemble(
        (f"{place}. ", "bold"),
        (time_text(item), "bold yellow"),
        "  " if item.waits_for_host else f" {item.how}  ",
        (" ".join(filter(None, (sentences.last_scope(item.scope), item.source))) or "no scope", "cyan"),
    )
    body = Text.assemble((launches_text(analysis, item), "dim"), "\n", "why     ", item.cause)
    if item.remedy and sentences.is_advice(item):
        body.append("\n").append(f"{item.remedy_kind:<8}", "green").append(item.remedy)
    if item.trial is not None:
        style = "green" if item.trial.helps else "dim"
        body.append("\n").append("tried   ", style).append(sentences.trial_text(item.trial))
    return Padding(Group(head, Padding(body, (0, 0, 0, 3))), (0, 0, 1, 0))
