"""Implements `xlafuse diff A B`, which compares two compiled programs."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from xlafuse.cli.errors import InputError, cli_errors
from xlafuse.cli.programs import (
    DEFAULT_TARGET,
    Args,
    Block,
    Fn,
    Mode,
    ModeOption,
    Program,
    Shape,
    Target,
    Timeout,
    analysis_of,
    load_analysis,
)

if TYPE_CHECKING:
    from hlo_analysis.records import Analysis

_SIDE = "STRATEGY[@TARGET]"


def diff(
    before: Annotated[
        str | None,
        typer.Argument(
            metavar="A", help="A saved capture, a folder that xla_dump_to wrote, or a report.json[:STRATEGY]."
        ),
    ] = None,
    after: Annotated[str | None, typer.Argument(metavar="B", help="The other side, in the same form.")] = None,
    fn: Fn = None,
    shape: Shape = None,
    args: Args = None,
    block: Block = None,
    a: Annotated[
        str, typer.Option("--a", metavar=_SIDE, help="With --fn or --block: how to compile A, such as xla or xla@h100.")
    ] = "xla",
    b: Annotated[
        str | None,
        typer.Option("--b", metavar=_SIDE, help="How to compile B; fused is a function under xlafuse.fuse."),
    ] = None,
    mode: ModeOption = Mode.forward,
    target: Target = DEFAULT_TARGET,
    count: Annotated[
        int, typer.Option("-n", "--count", metavar="N", min=1, help="Number of changes of each kind to list.")
    ] = 10,
    json: Annotated[bool, typer.Option("--json", help="Print only JSON on stdout.")] = False,
    timeout: Timeout = 300.0,
) -> None:
    """Show which launches of a program were merged, split, gained or lost, and how traffic changed in each scope.

    Matches launches by what they compute. Needs no GPU. Exits with 2 on bad input.
    """
    with cli_errors():
        from hlo_analysis.changes import difference
        from hlo_analysis.report.changes import difference_json, difference_lines

        if fn is None and block is None:
            sides = _saved(before, after, b)
        elif before is not None or after is not None:
            raise InputError("expected two saved programs, or --fn or --block with --a and --b; got both")
        elif b is None:
            raise InputError(f"expected --b {_SIDE}: what to compare with --a {a}")
        else:
            program = Program(block=block, fn=fn, shape=shape, args=args, mode=mode, target=target, timeout=timeout)
            sides = _compiled(program, a), _compiled(program, b)
        found = difference(*sides)
        if json:
            sys.stdout.write(difference_json(found))
        else:
            for line in difference_lines(found, count):
                print(line)


def _saved(before: str | None, after: str | None, b: str | None) -> tuple[Analysis, Analysis]:
    if before is None or after is None:
        raise InputError("expected two saved programs A and B, or --fn or --block with --a and --b")
    if b is not None:
        raise InputError("--b is for --fn or --block; of a report.json name the strategy as report.json:STRATEGY")
    return load_analysis(before), load_analysis(after)


def _compiled(program: Program, side: str) -> Analysis:
    from dataclasses import replace

    strategy, at, target = side.partition("@")
    if not strategy or (at and not target):
        raise InputError(f"expected {_SIDE}, as xla or xla@h100, got {side!r}")
    return analysis_of(replace(program, strategy=strategy, target=target or program.target))
