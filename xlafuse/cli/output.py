"""The format that a command prints, and its folder, which is checked before any costly work."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from xlafuse.cli.errors import InputError


class Format(StrEnum):
    """Output formats of a command."""

    text = "text"
    markdown = "markdown"


FormatOption = Annotated[Format, typer.Option("--format", help="markdown: for an issue or a pull request.")]
_LONGEST_WHOLE = 30
"""Characters of the longest cell of a column that is never broken."""
Json = Annotated[bool, typer.Option("--json", help="Print only JSON on stdout.")]


def print_json(value: Any) -> None:
    """Prints a value of plain types as JSON."""
    sys.stdout.write(json.dumps(value, indent=1, ensure_ascii=False, default=str) + "\n")


def print_table(headings: Sequence[str], rows: Sequence[Sequence[str]], *, title: str | None = None) -> None:
    """Prints a table; where the terminal is too narrow for it, row by row. Long texts may be broken into lines."""
    from rich import box
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from hlo_analysis.report.console import fitted

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, title=title, title_justify="left")
    for heading, cells in zip(headings, zip(*rows, strict=True), strict=True):
        is_short = max(map(len, cells)) <= _LONGEST_WHOLE
        table.add_column(heading, no_wrap=is_short, min_width=None if is_short else _LONGEST_WHOLE)
    for row in rows:
        table.add_row(*map(escape, row))
    console = Console()
    console.print(fitted(console, [lambda: table]))


@contextmanager
def output_folder(path: Path) -> Iterator[Path]:
    """Creates the folder if it is missing and checks that it is writable, before any costly work.

    If the context raises, folders that were created here are removed.

    Raises:
        InputError: the folder cannot be created or written.
    """
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        _remove(missing)
        raise InputError(f"cannot write to the output folder {path}: {error.strerror or error}") from None
    try:
        yield path
    except BaseException:
        _remove(missing)
        raise


def _remove(folders: list[Path]) -> None:
    for folder in folders:
        try:
            folder.rmdir()
        except OSError:
            return
