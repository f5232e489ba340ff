"""Implements `xlafuse diff`, which compares two compiled programs: saved ones, two strategies, two versions of jax."""

from __future__ import annotations

import sys
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Annotated

import typer

from xlafuse.cli.errors import InputError
from xlafuse.cli.output import Format, FormatOption, Json
from xlafuse.cli.programs import Program, Source, analysis_of, load_analysis

if TYPE_CHECKING:
    from hlo_analysis.records import Analysis

_SIDE = "STRATEGY[@TARGET]"


@dataclass(frozen=True, kw_only=True)
class Request(Source):
    """Options of `xlafuse diff`."""

    before: Annotated[
        str | None,
        typer.Argument(
            metavar="A", help="A saved capture, a folder that xla_dump_to wrote, or a report.json[:STRATEGY]."
        ),
    ] = None
    after: Annotated[str | None, typer.Argument(metavar="B", help="The other side, in the same form.")] = None
    a: Annotated[
        str, typer.Option("--a", metavar=_SIDE, help="With --fn or --block: how to compile A, such as xla or xla@h100.")
    ] = "xla"
    b: Annotated[
        str | None,
        typer.Option("--b", metavar=_SIDE, help="How to compile B; fused is a function under xlafuse.fuse."),
    ] = None
    count: Annotated[
        int, typer.Option("-n", "--count", metavar="N", min=1, help="Number of changes of each kind to list.")
    ] = 10
    jax: Annotated[
        list[str] | None,
        typer.Option(
            "--jax",
            metavar="VERSION",
            help="With --fn or --block: compile with this version of jax, which pip installs into a cache folder once. "
            "Give two, or one to compare with the installed one.",
        ),
    ] = None
    python: Annotated[
        list[str] | None,
        typer.Option(metavar="ENV", help="As --jax: a virtual environment's folder, or a Python executable."),
    ] = None
    exit_code: Annotated[
        bool,
        typer.Option(
            "--exit-code", help="Exit with 1 if B makes more launches, moves more bytes or takes more estimated time."
        ),
    ] = False
    format: FormatOption = Format.text
    json: Json = False


def diff(request: Request) -> None:
    """Show which launches of a program were merged, split, gained or lost, and how traffic changed in each scope.

    Matches launches by what they compute. Needs no GPU. Exits with 0, with --exit-code with 1 if B is worse, 2 on bad
    input.
    """
    from hlo_analysis.changes import difference
    from hlo_analysis.report.changes import difference_json, difference_lines, difference_markdown

    before, after, b = request.before, request.after, request.b
    options: list[str] = []
    if request.fn is None and request.block is None:
        sides = _saved(before, after, b)
    elif before is not None or after is not None:
        raise InputError("expected two saved programs, or --fn or --block with --a and --b; got both")
    elif request.jax or request.python:
        if b is not None:
            raise InputError("--jax and --python compare one strategy in two environments: leave out --b")
        *sides, options = _in_environments(request)
    elif b is None:
        raise InputError(f"expected --b {_SIDE}: what to compare with --a {request.a}")
    else:
        sides = _compiled(request, request.a), _compiled(request, b)
    found = difference(*sides)
    found = replace(found, notes=(*found.notes, *options))
    if request.json:
        sys.stdout.write(difference_json(found))
    elif request.format is Format.markdown:
        sys.stdout.write(difference_markdown(found, request.count))
    else:
        for line in difference_lines(found, request.count):
            print(line)
    if request.exit_code and found.is_worse:
        raise typer.Exit(1)


def _in_environments(program: Request) -> tuple[Analysis, Analysis, list[str]]:
    """Compiles the program in two environments; returns both analyses, and the options of XLA that differ."""
    from xlafuse.environments import chosen, compiled_in_both

    words = ["--mode", program.mode.value, "--target", program.target, "--timeout", str(program.timeout)]
    for name, value in (("--fn", program.fn), ("--args", program.args), ("--block", program.block)):
        words += [] if value is None else [name, value]
    words += [word for shape in program.shape or () for word in ("--shape", shape)]
    return compiled_in_both(chosen(program.jax or [], program.python or []), words, program.a)


def _saved(before: str | None, after: str | None, b: str | None) -> tuple[Analysis, Analysis]:
    if before is None or after is None:
        raise InputError("expected two saved programs A and B, or --fn or --block with --a and --b")
    if b is not None:
        raise InputError("--b is for --fn or --block; of a report.json name the strategy as report.json:STRATEGY")
    return load_analysis(before), load_analysis(after)


def _compiled(source: Source, side: str) -> Analysis:
    strategy, at, target = side.partition("@")
    if not strategy or (at and not target):
        raise InputError(f"expected {_SIDE}, as xla or xla@h100, got {side!r}")
    typed = {field.name: getattr(source, field.name) for field in fields(Source)}
    return analysis_of(Program(**{**typed, "target": target or source.target}, strategy=strategy))
