"""Implements `xlafuse export`, which writes a saved program for other viewers."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from xlafuse.cli.errors import InputError, cli_errors
from xlafuse.cli.programs import load_analyses

if TYPE_CHECKING:
    from hlo_analysis.records import Analysis


class Format(StrEnum):
    """Viewer that the file is for."""

    model_explorer = "model-explorer"
    perfetto = "perfetto"


class Times(StrEnum):
    """Source of the launches' durations in a trace."""

    estimated = "estimated"
    measured = "measured"


def export(
    saved: Annotated[
        str,
        typer.Argument(
            metavar="PATH",
            help="A report.json (all of its strategies, or one as report.json:STRATEGY), a saved capture, or a folder "
            "that xla_dump_to wrote.",
        ),
    ],
    output: Annotated[Path, typer.Option("-o", "--output", metavar="FILE", help="The JSON file to write.")],
    form: Annotated[
        Format,
        typer.Option(
            "--format",
            help="model-explorer: the launches as a graph, by scope; perfetto: one call as a timeline.",
        ),
    ] = Format.model_explorer,
    times: Annotated[
        Times, typer.Option(help="Durations in a timeline: our estimates, or times measured on a GPU.")
    ] = Times.estimated,
) -> None:
    """Write a saved program as a Model Explorer graph or as a Perfetto timeline.

    Exits with 2 on bad input, such as asking for measured times of a program that was not measured.
    """
    with cli_errors():
        from xlafuse.files import write_files

        if not output.parent.is_dir():
            raise InputError(f"cannot write {output}: no folder {output.parent}")
        text = _text(load_analyses(saved), form, times, label=saved)
        write_files(output.parent, {output.name: text})
        print(f"wrote {output}")


def _text(analyses: list[Analysis], form: Format, times: Times, *, label: str) -> str:
    if form is Format.perfetto:
        from hlo_analysis.measured.trace import trace_events

        return trace_events(*analyses, times="measured" if times is Times.measured else "estimated")
    from hlo_analysis.report.model_explorer import model_explorer

    return model_explorer(analyses, label)
