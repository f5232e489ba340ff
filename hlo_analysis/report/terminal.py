"""Prints a comparison on a terminal: what to do, where the time goes, strategies, sites of fused operations."""

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

from hlo_analysis.records import Analysis, Comparison, StrategyResult
from hlo_analysis.report import formats, sentences
from hlo_analysis.report.advice import Advice, advice, effect_text, launches_text, most_text, program_us, winning_code
from hlo_analysis.report.alike import distinct, twin_sentences
from hlo_analysis.report.console import fitted
from hlo_analysis.report.formats import Units, format_us, plural, units_of
from hlo_analysis.report.time_groups import time_groups
from hlo_analysis.report.times import measured_sentences


def render_terminal(comparison: Comparison, console: Console, *, remedies: int = 5, groups: int = 8) -> None:
    """Prints the comparison on `console`: what to do, where the time goes, strategies, sites.

    Args:
        comparison: what to print.
        console: where.
        remedies: how many remedies.
        groups: how many groups of launches.
    """
    twins = twin_sentences(comparison)
    comparison = distinct(comparison)
    console.print()
    first, *others = sentences.verdict_sentences(comparison)
    console.print(Text(comparison.title, style="dim"))
    console.print(Text(first, style="bold"))
    console.print(Text(" ".join(others)))
    if code := winning_code(comparison):
        console.print()
        console.print(Padding(Text(code), (0, 0, 0, 2)))
    base = comparison[comparison.baseline]
    if base.analysis is not None:
        _what_to_do(base.analysis, console, remedies)
        console.print()
        console.print(Text(f"Where the time of {base.name} goes", "bold"))
        console.print(fitted(console, [functools.partial(times_table, base.analysis, groups)]))
    console.print()
    makers = [functools.partial(strategy_table, comparison, left_out=each) for each in _LEFT_OUT]
    table = fitted(console, makers)
    console.print(table)
    if not isinstance(table, Table) or len(table.columns) < len(makers[0]().columns):
        console.print(fitted(console, [lambda: kinds_table(comparison)]))
    for line in (*twins, *_footnotes(comparison)):
        console.print(Text(line, style="dim"))
    for result in comparison.strategies:
        if result.sites:
            console.print()
            console.print(_sites(result))
    console.print()


def _what_to_do(analysis: Analysis, console: Console, count: int) -> None:
    found = advice(analysis)
    if not found:
        return
    first = f"the first {count} of {len(found)} remedies" if len(found) > count else "by remedy"
    console.print()
    console.print(Text(f"What to do, {first}", "bold"))
    console.print(Group(*(_advice(analysis, *each) for each in enumerate(found[:count], start=1))))


def times_table(analysis: Analysis, count: int) -> Table:
    """Returns a table of the groups of launches that take longest."""
    found = time_groups(analysis)
    whole = program_us(analysis) or 1
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("time", "share", "launches"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("scope", overflow="fold", min_width=16)
    for group in found[:count]:
        bar = "█" * round(8 * group.time_us / found[0].time_us) if found[0].time_us else ""
        name = f"{group.name} ×{group.scopes}" if group.scopes > 1 and "*" in group.name else group.name
        share = f"{group.time_us / whole:.0%}"
        table.add_row(format_us(group.time_us), share, str(group.count), Text.assemble((f"{bar:<8} ", "yellow"), name))
    if rest := found[count:]:
        others = sum(group.time_us for group in rest)
        launches = str(sum(group.count for group in rest))
        table.add_row(format_us(others), f"{others / whole:.0%}", launches, f"{'':<9}{plural(len(rest), 'other')}")
    return table


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
    has_links = any(each.analysis and each.analysis.exposed_us is not None for each in comparison.strategies)
    headings = {
        "launches": "launches\ncounted",
        "kinds": "by kind\ncounted",
        "traffic": f"{sentences.memory_name(comparison)} {units.traffic.name}\ncounted",
        **({"saved": "saved\ncounted"} if comparison.unfused else {}),
        "roofline": f"roofline {units.time.name}\nestimated",
        "estimate": f"estimate {units.time.name}\nestimated",
        **({"exposed": f"of it links {units.time.name}\nestimated"} if has_links else {}),
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
        "roofline": sentences.time_text(analysis.roofline_us, analysis, base, units.time)
        if sentences.is_lower_bound(analysis, base)
        else _with_change(units.time.show(roofline), roofline, against and against.roofline_us),
        "estimate": sentences.time_text(analysis.estimated_us, analysis, base, units.time),
        "exposed": units.time.show(analysis.exposed_us),
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


def _advice(analysis: Analysis, place: int, item: Advice) -> Padding:
    first = item.first
    how = "verified" if item.is_verified else "" if first.waits_for_host else first.how
    head = Text.assemble(
        (f"{place}. ", "bold"),
        (effect_text(analysis, item), "bold green" if item.is_verified else "bold yellow"),
        f" {how}  ",
        (item.name, "bold"),
        "  ",
        (item.place or "no scope", "cyan"),
    )
    lines = dict(analysis.source_lines)
    body = Text()
    if text := lines.get(first.source or ""):
        body.append(f"{text}\n", "dim")
    body.append(launches_text(analysis, item.launches), "dim").append(f"\nwhy     {first.cause}")
    if worst := most_text(item):
        body.append(f" {worst}.")
    if first.remedy and item.is_open:
        body.append("\n").append(f"{first.remedy_kind:<8}", "green").append(first.remedy)
    if item.trial is not None:
        style = "green" if item.trial.helps else "dim"
        body.append("\n").append("tried   ", style).append(sentences.trial_text(item.trial))
    return Padding(Group(head, Padding(body, (0, 0, 0, 3))), (0, 0, 1, 0))
