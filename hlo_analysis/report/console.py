"""Fits tables to a terminal's width, and output to its character set."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable, Iterable

from rich.console import Console, Group
from rich.measure import Measurement
from rich.padding import Padding
from rich.table import Table
from rich.text import Text


def write_plain_characters() -> None:
    """Makes stdout and stderr write a question mark in place of what their encoding lacks."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="replace")


def fitted(console: Console, tables: Iterable[Callable[[], Table]]) -> Table | Group:
    """Returns the first of the tables that fits the console with no number cut; else the last one, row by row.

    A column with `no_wrap` is never cut, another never narrower than its `min_width`.
    """
    table = Table()
    for make in tables:
        table = make()
        for column in table.columns:
            if column.no_wrap:
                texts = (Text.from_markup(str(each)) for each in (column.header, *column.cells))
                column.min_width = max(line.cell_len for text in texts for line in text.split())
        if Measurement.get(console, console.options.update(max_width=10_000), table).minimum <= console.width:
            return table
    return _rows(table)


def _rows(table: Table) -> Group:
    """Lists a table's rows: the first cell, and below it the others by their headings."""
    headings = [str(column.header).replace("\n", " ") for column in table.columns]
    lines: list[Text | Padding] = []
    for first, *others in zip(*(list(column.cells) for column in table.columns), strict=True):
        lines.append(Text.from_markup(str(first)))
        for heading, cell in zip(headings[1:], others, strict=True):
            text = Text.from_markup(str(cell))
            lines.append(Padding(Text.assemble((f"{heading}: ", "dim") if heading else "", text), (0, 0, 0, 2)))
    return Group(*lines)
