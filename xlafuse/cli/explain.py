"""Implements `xlafuse explain`: tells about one edge between launches, or lists the costliest edges."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer

from xlafuse.cli.errors import InputError
from xlafuse.cli.output import Json, print_json
from xlafuse.cli.programs import Program, analysis_of


@dataclass(frozen=True, kw_only=True)
class Request(Program):
    """Options of `xlafuse explain`."""

    producer: Annotated[
        str | None,
        typer.Argument(
            metavar="PRODUCER",
            help="A launch or an instruction: its HLO name, a launch's number, or part of an op name, scope or "
            "source line. Without CONSUMER, lists the edges at it; without both, the costliest edges.",
        ),
    ] = None
    consumer: Annotated[
        str | None, typer.Argument(metavar="CONSUMER", help="The launch or instruction that reads the value.")
    ] = None
    ptx: Annotated[
        bool,
        typer.Option("--ptx", help="Print the PTX of the launches that PRODUCER names, instead of the edges at them."),
    ] = False
    count: Annotated[int, typer.Option("-n", "--count", metavar="N", min=1, help="Number of edges to list.")] = 10
    json: Json = False


def explain(request: Request) -> None:
    """Tell why two parts of a program are in one launch or in two, what that costs, and what to do.

    Needs no GPU. Exits with 2 on bad input, such as a name that matches no edge or several.
    """
    from hlo_analysis.explain import edges_of, find_edge, find_edges, find_ptx
    from hlo_analysis.report.edges import edge_list, edge_record, edge_story

    producer, consumer = request.producer, request.consumer
    if request.ptx and (producer is None or consumer is not None):
        raise InputError("--ptx prints the source of one launch: name it, and no second one")
    analysis = analysis_of(request)
    if producer is None:
        edges = edges_of(analysis)
    elif request.ptx:
        print(find_ptx(analysis, producer))
        return
    else:
        edges = find_edges(analysis, producer) if consumer is None else (find_edge(analysis, producer, consumer),)
    if request.json:
        print_json([edge_record(analysis, edge) for edge in edges[: request.count]])
    elif consumer is not None:
        print("\n".join(edge_story(analysis, edges[0])))
    else:
        print("\n".join(edge_list(analysis, edges, request.count)))
