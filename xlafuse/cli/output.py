"""The format that a command prints, and its folder, which is checked before any costly work."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator
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
Json = Annotated[bool, typer.Option("--json", help="Print only JSON on stdout.")]


def print_json(value: Any) -> None:
    """Prints a value of plain types as JSON."""
    sys.stdout.write(json.dumps(value, indent=1, ensure_ascii=False, default=str) + "\n")


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
