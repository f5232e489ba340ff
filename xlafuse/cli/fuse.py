"""Implements `xlafuse fuse`: shows what `xlafuse.fuse` takes of a function, and what it refuses."""

from __future__ import annotations

import sys
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, redirect_stdout
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from xlafuse.cli.errors import InputError
from xlafuse.cli.output import Json, print_json
from xlafuse.cli.programs import DEFAULT_TARGET, FN, Args, Target, use_cpu_without_gpu

if TYPE_CHECKING:
    from xlafuse.fusion.report import Report


@dataclass(frozen=True, kw_only=True)
class Request:
    """Options of `xlafuse fuse`."""

    fn: Annotated[str, FN]
    shape: Annotated[
        list[str] | None,
        typer.Option(metavar="SHAPE", help="One for each argument, such as 'bf16[8192,4096]' or 'f32[]'."),
    ] = None
    args: Args = None
    ops: Annotated[tuple[str, ...], typer.Option(metavar="A,B,C", help="Operations to look for. Default: all.")] = ()
    skip: Annotated[tuple[str, ...], typer.Option(metavar="A,B,C", help="Operations to leave out.")] = ()
    allow: Annotated[
        tuple[str, ...], typer.Option(metavar="A,B", help="Differences to accept: rounding. Default: none.")
    ] = ()
    target: Target = DEFAULT_TARGET
    compiles: Annotated[
        bool,
        typer.Option(
            "--compile/--no-compile",
            help="Compile forward pass and gradient with and without fuse, and name what makes them worse.",
        ),
    ] = True
    json: Json = False


def fuse(request: Request) -> None:
    """Show which fused operations `xlafuse.fuse` puts into a function, and what it refuses.

    Needs no GPU. Exits with 0, even if there is no site, and with 2 on bad input.
    """
    use_cpu_without_gpu()
    from hlo_analysis.targets import load_target
    from xlafuse.cli import inputs

    target = load_target(request.target)
    choices = {"ops": request.ops or None, "skip": request.skip, "allow": request.allow}
    worse: tuple[str, ...] = ()
    # The function may print while it is imported and traced; stdout is for the JSON alone.
    with redirect_stdout(sys.stderr) if request.json else nullcontext():
        program = inputs.load_program(request.fn, request.shape or (), request.args)
        report = report_of(*program, choices, target)
        if report.taken and request.compiles and target.kind == "cuda":
            worse = worse_in(*program, request.target, choices)
    if request.json:
        print_json({**asdict(report), "worse": worse})
        return
    for line, count in Counter([*str(report).splitlines(), *worse]).items():
        print(f"{line}, {count} times" if count > 1 else line)


def report_of(
    function: Callable[..., Any], arguments: Sequence[Any], choices: Mapping[str, Any], target: Any
) -> Report:
    """Traces a function for a target, without computing anything; returns the report of `xlafuse.fuse`.

    arguments: trees of arrays or `jax.ShapeDtypeStruct`; other leaves are static. choices: further arguments of `fuse`.

    Raises:
        InputError: unknown names, or a function that cannot be traced.
    """
    import jax

    import xlafuse
    from hlo_analysis.capture.lowering import describe_arguments, function_name, leave_out_packages, tracing_error
    from xlafuse.findings import over_arrays, traced_for
    from xlafuse.fusion.api import UNSEEN_SHARDINGS

    reports: list[Report] = []
    try:
        fused = xlafuse.fuse(function, report=reports.append, **choices)
    except ValueError as error:
        raise InputError(str(error)) from None
    flat, structs = over_arrays(fused, arguments)
    leave_out_packages("xlafuse", "pallas_kernels", "typer", "click")
    warnings.filterwarnings("ignore", "fuse left ")  # the report says so itself
    try:
        traced_for(target, lambda: jax.eval_shape(flat, *structs))
    except (Exception, SystemExit) as error:
        described = ", ".join(describe_arguments(function, tuple(arguments))) or "none"
        raise InputError(
            f"{function_name(function)} could not be traced with arguments ({described}): "
            + tracing_error(error, "have --args return the module, and --fn take it as an argument")
        ) from error
    report = reports[-1]
    notes = tuple(note for note in report.notes if note != UNSEEN_SHARDINGS)  # it is traced for one device
    return replace(report, notes=notes, taken=(*report.taken, *report.undifferentiated), undifferentiated=())


def worse_in(
    function: Callable[..., Any], arguments: Sequence[Any], target: str, choices: Mapping[str, Any]
) -> tuple[str, ...]:
    """Compiles the function and its gradient with and without `fuse`; returns how the fused ones are worse.

    choices: the further arguments of `fuse`. What cannot be compiled, as the gradient of integers, is told, too.
    """
    from hlo_analysis import CaptureError
    from xlafuse.regressions import regression_of

    found = []
    for mode, what in (("forward", "forward"), ("grad", "gradient")):
        try:
            regression = regression_of(function, *arguments, choices=choices, mode=mode, target=target)
        except CaptureError as error:
            regression = f"not compared. {str(error).splitlines()[0]}"
        if regression is not None:
            found.append(f"{what}: {regression}")
    return tuple(found)
