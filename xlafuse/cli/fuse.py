"""Implements `xlafuse fuse`: shows what `xlafuse.fuse` takes of a function, and what it refuses."""

from __future__ import annotations

import dataclasses
import json
import linecache
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext, redirect_stdout
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from xlafuse.cli.errors import InputError
from xlafuse.cli.programs import DEFAULT_TARGET, FN, Args, Target, use_cpu_without_gpu

if TYPE_CHECKING:
    from xlafuse.fusion.plan import Plan, Site


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
    json: Annotated[bool, typer.Option("--json", help="Print only JSON on stdout.")] = False


@dataclass(frozen=True, kw_only=True)
class Taken:
    """Sites at the same line that `fuse` takes.

    where: file and line of the code, as the user wrote it. function: the one around it. call: the call that replaces
    the code, with the operation's own names for its arrays. arrays: their dtypes and shapes. equations: how many one
    call replaces. count: number of the sites.
    """

    operation: str
    implementation: str
    where: str
    function: str
    call: str
    arrays: Mapping[str, str]
    equations: int
    count: int = 1


@dataclass(frozen=True, kw_only=True)
class Left:
    """Sites at the same lines that stay as they are written, since the operation would run by XLA, for `reason`."""

    operation: str
    where: str
    reason: str
    count: int = 1


@dataclass(frozen=True, kw_only=True)
class Refused:
    """Code that looks like an operation and is refused.

    where: file and line.
    code: that line.
    reason: the smallest difference from the operation.
    """

    operation: str
    where: str
    code: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class Findings:
    """Sites found in one trace of a function.

    note: why nothing was searched. worse: how the fused program is worse than the plain one, and what to skip.
    """

    function: str
    note: str | None = None
    taken: tuple[Taken, ...] = ()
    left: tuple[Left, ...] = ()
    refused: tuple[Refused, ...] = ()
    worse: tuple[str, ...] = ()


def fuse(request: Request) -> None:
    """Show which fused operations `xlafuse.fuse` puts into a function, with their calls, and what it refuses.

    Needs no GPU. Exits with 0, even if there is no site, and with 2 on bad input.
    """
    use_cpu_without_gpu()
    from hlo_analysis.targets import load_target
    from xlafuse.cli import inputs

    target = load_target(request.target)
    # The function may print while it is imported and traced; stdout is for the JSON alone.
    with redirect_stdout(sys.stderr) if request.json else nullcontext():
        choices = {"ops": request.ops or None, "skip": request.skip, "allow": request.allow}
        program = inputs.load_program(request.fn, request.shape or (), request.args)
        findings = find(*program, **choices, target=target)
        if findings.taken and request.compiles and target.kind == "cuda":
            findings = dataclasses.replace(findings, worse=worse_in(*program, request.target, choices))
    if request.json:
        sys.stdout.write(json.dumps(dataclasses.asdict(findings), indent=2, default=str) + "\n")
    else:
        _show(findings)


def find(
    function: Callable[..., Any],
    arguments: Sequence[Any],
    *,
    ops: Sequence[str] | None = None,
    skip: Sequence[str] = (),
    allow: Sequence[str] = (),
    target: Any,
) -> Findings:
    """Finds the sites of a function by tracing it for a target, without computing anything.

    arguments: trees of arrays or `jax.ShapeDtypeStruct`; other leaves are static.

    Raises:
        InputError: unknown names, or a function that cannot be traced.
    """
    from xlafuse.findings import traced_for
    from xlafuse.fusion.api import ALLOWANCES
    from xlafuse.fusion.spellings import spellings

    try:
        sought = spellings(ops, skip)
    except ValueError as error:
        raise InputError(str(error)) from None
    if unknown := [name for name in allow if name not in ALLOWANCES]:
        raise InputError(f"unknown --allow {unknown[0]!r}; there are {', '.join(ALLOWANCES)}")
    return traced_for(target, lambda: _findings(function, arguments, sought, ops, frozenset(skip), frozenset(allow)))


def _findings(
    function: Callable[..., Any],
    arguments: Sequence[Any],
    sought: Any,
    ops: Sequence[str] | None,
    skip: frozenset[str],
    allow: frozenset[str],
) -> Findings:
    import jax

    from hlo_analysis.capture.lowering import function_name
    from xlafuse.cli.calls import call_text
    from xlafuse.fusion.api import is_differentiated
    from xlafuse.fusion.evaluate import evaluate
    from xlafuse.fusion.plan import make_plan
    from xlafuse.fusion.report import why_left
    from xlafuse.fusion.sources import frame_of, line_of

    name = function_name(function)
    closed, structs = _traced(function, arguments)
    if is_differentiated(closed.jaxpr):
        note = f"{name} is differentiated already: name the function that is given to jax.grad instead."
        return Findings(function=name, note=note)
    plan = make_plan(closed.jaxpr, sought, allow, ops, skip)
    implementations: dict[Site, str] = {}
    jax.eval_shape(lambda *arrays: evaluate(plan, [*closed.consts, *arrays], implementations.setdefault), *structs)
    frames = {
        site: frame_of(site.root, outside=__file__)
        for each in plan.walk()
        for site in sorted(each.sites, key=lambda site: site.root.index)
    }
    taken = [
        Taken(
            operation=site.operation,
            implementation="xla" if site.note else implementations.get(site, "not computed"),
            where=line_of(site.root, outside=__file__),
            function=frame.function_name if frame else name,
            call=site.note or call_text(site),
            arrays={own: _array(binding.value.dtype, binding.shape) for own, binding in site.arrays.items()},
            equations=len(site.covered),
        )
        for site, frame in frames.items()
    ]
    left: list[Left] = []
    refused: dict[Refused, None] = {}
    for each in plan.walk():
        left += [
            Left(operation=site.operation, where=line_of(site.root, outside=__file__), reason=why_left(site))
            for site in each.written
        ]
        refused |= dict.fromkeys(_refused(each))
    return Findings(function=name, taken=_counted(taken), left=_counted(left), refused=tuple(refused))


def _array(dtype: Any, shape: Sequence[int]) -> str:
    from hlo_analysis.loading import DTYPES

    name = next((short for short, long in DTYPES.items() if long == dtype.name), dtype.name)
    return f"{name}[{','.join(map(str, shape))}]"


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


def _counted[T: (Taken, Left)](sites: Sequence[T]) -> tuple[T, ...]:
    """Returns each site once with its number of occurrences, since one layer's code serves all layers."""
    counts = [(each, sites.count(each)) for place, each in enumerate(sites) if each not in sites[:place]]
    return tuple(dataclasses.replace(each, count=count) for each, count in counts)


def _traced(function: Callable[..., Any], arguments: Sequence[Any]) -> tuple[Any, list[Any]]:
    """Returns the function's jaxpr over its arrays, and the arrays."""
    import jax

    from hlo_analysis.capture.lowering import describe_arguments, function_name, leave_out_packages, tracing_error
    from xlafuse.findings import over_arrays

    flat, structs = over_arrays(function, arguments)
    leave_out_packages("xlafuse", "pallas_kernels", "typer", "click")
    try:
        return jax.make_jaxpr(flat)(*structs), structs
    except (Exception, SystemExit) as error:
        described = ", ".join(describe_arguments(function, tuple(arguments))) or "none"
        raise InputError(
            f"{function_name(function)} could not be traced with arguments ({described}): "
            + tracing_error(error, "have --args return the module, and --fn take it as an argument")
        ) from error


def _refused(plan: Plan) -> Iterator[Refused]:
    from xlafuse.fusion.sources import frame_of, line_of

    for refusal in plan.refusals:
        equation, code = refusal.value.equation, ""
        where = "an argument" if equation is None else line_of(equation, outside=__file__)
        if equation is not None and (frame := frame_of(equation, outside=__file__)):
            code = linecache.getline(frame.file_name, frame.start_line).strip()
        yield Refused(operation=refusal.operation, where=where, code=code, reason=refusal.reason)


def _show(findings: Findings) -> None:
    from rich.console import Console
    from rich.text import Text

    from hlo_analysis.report.formats import plural
    from xlafuse.fusion.report import count_text

    console = Console(highlight=False, soft_wrap=True)

    def line(text: str, style: str = "") -> None:
        console.print(Text(text, style=style))

    taken, left = (sum(each.count for each in sites) for sites in (findings.taken, findings.left))
    line(f"{findings.function}: {count_text(taken, left, len(findings.refused))}", "bold")
    if findings.note:
        line(findings.note)
    for each in findings.taken:
        times = f", {each.count} times" if each.count > 1 else ""
        by = "computed by XLA here," if each.implementation == "xla" else f"by {each.implementation}"
        what = f"{each.operation} {by} for {plural(each.equations, 'equation')}{times}"
        line(f"\n{each.where}, in {each.function}: {what}", "cyan")
        line(f"    {each.call}")
        line("    " + ", ".join(f"{name} {array}" for name, array in each.arrays.items()), "dim")
    for each in findings.worse:
        line(f"\n{each}", "bold")
    if findings.left:
        line("")
    for each in findings.left:
        times = f", {each.count} times" if each.count > 1 else ""
        line(f"{each.where}: {each.operation} left to XLA{times}: {each.reason}", "dim")
    for each in findings.refused:
        line(f"\n{each.where}: no {each.operation}: {each.reason}", "yellow")
        if each.code:
            line(f"    {each.code}")
