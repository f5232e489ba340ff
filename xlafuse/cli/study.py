"""Implements `xlafuse study NAME`: counts or times what a published claim says, and writes the rows."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from xlafuse.cli.errors import InputError, cli_errors
from xlafuse.cli.output import Json, print_json


def study(
    name: Annotated[str | None, typer.Argument(metavar="NAME", help='A study, or "all".')] = None,
    target: Annotated[
        str,
        typer.Option(
            "--target",
            metavar="TARGET",
            help='GPU to count for, see `xlafuse targets`; "attached" times on this machine\'s GPU.',
        ),
    ] = "h200",
    output: Annotated[
        Path | None,
        typer.Option(
            "-o",
            "--output",
            metavar="PATH",
            help="The JSON file to write, or the folder for all studies. Default: none.",
        ),
    ] = None,
    show: Annotated[bool, typer.Option("--list", help="List the studies and their claims.")] = False,
    json: Json = False,
) -> None:
    """Run published claims about fusion as programs.

    Counts launches and bytes for the target without a GPU; --target attached measures times on one. Exits with 0 if
    every variant gave its rows, 1 if one failed, 2 on bad input or no GPU.
    """
    with cli_errors():
        from xlafuse.files import to_json
        from xlafuse.studies import STUDIES, get_study, run_study
        from xlafuse.studies.pages import table

        studies = map(get_study, STUDIES)
        if show and json:
            print_json([{"name": s.name, "title": s.title, "claims": [asdict(c) for c in s.claims]} for s in studies])
            raise typer.Exit
        if show:
            for each in studies:
                print(f"{each.name}: {each.title}")
                for claim in each.claims:
                    print(f"    {claim.text}: {claim.published} ({claim.source})")
            raise typer.Exit
        if name is None:
            raise InputError("expected the name of a study, or all: `xlafuse study --list` shows them")
        is_complete, results = True, []
        for each in STUDIES if name == "all" else (name,):
            chosen = get_study(each)
            result = run_study(chosen, target)
            left_out = [note for part in result.parts for note in part.left_out]
            is_complete &= not any("Error" in note for note in left_out)
            results.append(asdict(result))
            if not json:
                print(f"{chosen.title}\n\n{table(result)}", *(f"left out: {note}" for note in left_out), sep="\n")
            if output is not None:
                path = output / f"{each}.json" if name == "all" else output
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(to_json(result), encoding="utf-8")
                print(f"wrote {path}", file=sys.stderr if json else sys.stdout)
        if json:
            print_json(results)
    raise typer.Exit(0 if is_complete else 1)
