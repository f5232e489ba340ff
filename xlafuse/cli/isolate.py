"""Implements `xlafuse isolate`: writes a launch or an edge as a program of its own, and compiles it."""

from __future__ import annotations

import runpy
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from xlafuse.cli.errors import InputError
from xlafuse.cli.output import output_folder
from xlafuse.cli.programs import Program, capture_of

if TYPE_CHECKING:
    from hlo_analysis.isolate import Isolated
    from hlo_analysis.records import Analysis, Launch


@dataclass(frozen=True, kw_only=True)
class Request(Program):
    """Options of `xlafuse isolate`."""

    producer: Annotated[
        str,
        typer.Argument(
            metavar="LAUNCH",
            help="A launch: its number, its HLO name, or part of an op name, scope or source line. It is isolated with "
            "its producers and consumers.",
        ),
    ]
    consumer: Annotated[
        str | None, typer.Argument(metavar="CONSUMER", help="The launch that reads it: isolates this edge alone.")
    ] = None
    output: Annotated[
        Path, typer.Option("-o", "--output", metavar="DIR", help="Folder for reproduce.py and launches.hlo.")
    ] = Path("xlafuse-isolated")


def isolate(request: Request) -> None:
    """Write a launch, with its producers and consumers, or an edge as a program of its own, and compile it.

    reproduce.py has the operations as a JAX function, shapes, options and versions. Run alone it says whether XLA makes
    the same launches; on a GPU it also times them. Exits with 0 if the launches are the same, 1 if not, 2 on bad input.
    """
    from hlo_analysis import analyze
    from hlo_analysis.hlo import parse_module
    from hlo_analysis.isolate import isolate as written
    from xlafuse.catalogue import KERNELS
    from xlafuse.files import write_files

    capture = capture_of(request)
    analysis = analyze(capture, catalogue=KERNELS)
    module = parse_module(capture.text("final_hlo") or "")
    wanted, around, why = _chosen(analysis, request.producer, request.consumer)
    with output_folder(request.output) as folder:

        def attempt(near: Sequence[Launch]) -> _Attempt:
            made = written(module, wanted, near)
            launches = [each for each in (*wanted, *near) if each.name not in made.left_out]
            launches.sort(key=lambda each: each.index)
            hlo = "\n\n".join(f"// #{each.index} {each.name} ({each.kind})\n{each.hlo}" for each in launches)
            files = {"reproduce.py": _script(analysis, made, launches, why), "launches.hlo": hlo + "\n"}
            paths = write_files(folder, files)
            return _Attempt(
                made=made, launches=launches, paths=paths, again=_compiled_again(request, analysis, paths[0])
            )

        found = attempt(around)
        for fewer in (around[:1], []):  # the fewer, the less XLA can do otherwise
            if found.is_same or len(fewer) == len(around):
                break
            found = attempt(fewer)
    for path in found.paths:
        print(f"wrote {path}")
    for name in found.made.left_out:
        print(f"note: {name} is not in it: it is a kernel, or has an operation that JAX has no function for")
    print(f"in the program: {_listed(found.launches)}")
    print(f"{'the same' if found.is_same else 'different'}, alone: {_listed(found.again.launches)}")
    print(f"because: {why}")
    raise typer.Exit(0 if found.is_same else 1)


@dataclass(frozen=True, kw_only=True)
class _Attempt:
    """A reproducer that was written, and what XLA makes of it."""

    made: Isolated
    launches: list[Launch]
    paths: list[Path]
    again: Analysis

    @property
    def is_same(self) -> bool:
        """Whether XLA makes launches of the same kinds."""
        return _kinds(self.launches) == _kinds(self.again.launches)


_PRODUCTS = ("cublas", "cublaslt", "triton_gemm")
"""Kinds of matrix products: on a GPU autotuning picks one by time, not twice the same where they are near."""


def _kinds(launches: Sequence[Launch]) -> list[str]:
    """Returns the kinds of launches but copies, which XLA adds where a result would overwrite an argument."""
    return sorted("product" if each.kind in _PRODUCTS else each.kind for each in launches if each.kind != "copy")


def _listed(launches: Sequence[Launch]) -> str:
    return ", ".join(f"#{each.index} {each.name} ({each.kind})" for each in launches)


def _chosen(analysis: Analysis, producer: str, consumer: str | None) -> tuple[list[Launch], list[Launch], str]:
    """Returns the launches to isolate, those around them, and why XLA keeps them apart."""
    from hlo_analysis.explain import apart_because, find_edge, find_edges, launches_named
    from hlo_analysis.isolate import neighbours

    if consumer is not None:
        edge = find_edge(analysis, producer, consumer)
        ends = dict.fromkeys((edge.producer, edge.consumer))
        return [analysis.launches[index] for index in ends], [], apart_because(edge)
    found = launches_named(analysis, producer)
    if len(found) != 1:
        names = ", ".join(f"#{index} {analysis.launches[index].name}" for index in found[:6])
        raise InputError(f"{producer!r} names {len(found)} launches: {names}; expected one")
    launch = analysis.launches[found[0]]
    edges = find_edges(analysis, str(launch.index))
    why = apart_because(edges[0]) if edges else "it reads what no launch wrote, and no launch reads it"
    return [launch], neighbours(analysis, launch), why


def _script(analysis: Analysis, made: Isolated, launches: list[Launch], why: str) -> str:
    from jinja2 import Environment, PackageLoader

    environment = Environment(loader=PackageLoader("xlafuse.cli"), keep_trailing_newline=True, trim_blocks=True)
    origin = analysis.provenance
    return environment.get_template("reproduce.py.j2").render(
        launches=launches,
        kinds=_kinds(launches),
        products=_PRODUCTS,
        why=why.replace('"""', "'''"),
        made=made,
        target=origin.target,
        versions=origin.versions,
        options=dict(origin.compiler_options),
    )


def _compiled_again(request: Request, analysis: Analysis, script: Path) -> Analysis:
    """Compiles the reproducer as the program was."""
    from hlo_analysis import analyze, capture

    made = runpy.run_path(str(script))
    fn, arguments = made["fn"], made["ARGUMENTS"]
    origin = analysis.provenance
    options = dict(origin.compiler_options)
    return analyze(capture(fn, *arguments, target=origin.target, compiler_options=options, timeout=request.timeout))
