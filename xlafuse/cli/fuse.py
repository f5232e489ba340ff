"""Implements `xlafuse fuse`: shows what `xlafuse.fuse` takes of a function, as a source diff, and what it refuses."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext, redirect_stdout
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from xlafuse.cli.errors import InputError
from xlafuse.cli.report import use_cpu_without_gpu

if TYPE_CHECKING:
    from xlafuse.fusion.plan import Plan, Site


@dataclass(frozen=True, kw_only=True)
class Request:
    """Options of one `xlafuse fuse`, as typed."""

    fn: str
    shapes: tuple[str, ...]
    args: str | None
    ops: tuple[str, ...] | None
    skip: tuple[str, ...]
    allow: tuple[str, ...]
    target: str
    compiles: bool
    json: bool


@dataclass(frozen=True, kw_only=True)
class Taken:
    """Sites at the same lines that `fuse` takes.

    call: the call that replaces the site.
    equations: how many equations one call replaces.
    count: number of the sites.
    diff: sign (" ", "-" or "+") and text of each line.
    """

    operation: str
    implementation: str
    where: str
    call: str
    arrays: Mapping[str, str]
    equations: int
    diff: tuple[tuple[str, str], ...]
    count: int = 1


@dataclass(frozen=True, kw_only=True)
class Left:
    """Sites at the same lines that stay as they are written, since the operation would run by XLA."""

    operation: str
    where: str
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


def run(request: Request) -> None:
    """Runs the command.

    Raises:
        InputError: bad options, or a function that cannot be traced.
    """
    use_cpu_without_gpu()
    from hlo_analysis.targets import load_target
    from xlafuse.cli import inputs

    target = load_target(request.target)
    # The function may print while it is imported and traced; stdout is for the JSON alone.
    with redirect_stdout(sys.stderr) if request.json else nullcontext():
        function = inputs.load_function(request.fn)
        arguments = inputs.load_arguments(request.args) if request.args else None
        arguments = inputs.function_arguments(function, request.shapes, arguments)
        choices = {"ops": request.ops, "skip": request.skip, "allow": request.allow}
        findings = find(function, arguments, **choices, target=target)
        if findings.taken and request.compiles and target.kind == "cuda":
            findings = dataclasses.replace(findings, worse=worse_in(function, arguments, request.target, choices))
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
    import jax

    from hlo_analysis.capture.lowering import describe_arguments, function_name
    from xlafuse.cli.site_diff import SiteDiff
    from xlafuse.fusion.api import ALLOWANCES, is_differentiated
    from xlafuse.fusion.evaluate import evaluate
    from xlafuse.fusion.plan import make_plan
    from xlafuse.fusion.sites import spellings
    from xlafuse.fusion.sources import line_of

    try:
        sought = spellings(ops, skip)
    except ValueError as error:
        raise InputError(str(error)) from None
    if unknown := [name for name in allow if name not in ALLOWANCES]:
        raise InputError(f"unknown --allow {unknown[0]!r}; there are {', '.join(ALLOWANCES)}")
    name = function_name(function)
    with _traced_for(target):
        closed, structs = _traced(function, name, arguments)
        if is_differentiated(closed.jaxpr):
            note = f"{name} is differentiated already: name the function that is given to jax.grad instead."
            return Findings(function=name, note=note)
        plan = make_plan(closed.jaxpr, sought, frozenset(allow), ops, frozenset(skip))
        implementations: dict[Site, str] = {}
        jax.eval_shape(lambda *arrays: evaluate(plan, [*closed.consts, *arrays], implementations.setdefault), *structs)
    described = (text.partition(": ")[0] for text in describe_arguments(function, arguments))
    leaves = jax.tree.leaves(tuple(arguments))
    dynamic = (argument for argument, is_array in zip(described, map(_is_array, leaves), strict=True) if is_array)
    inputs = dict(zip(plan.graph.inputs[len(closed.consts) :], dynamic, strict=True))
    taken: list[Taken] = []
    left: list[Left] = []
    refused: dict[Refused, None] = {}
    for each in plan.walk():
        for site in sorted(each.sites, key=lambda site: site.root.index):
            shown = SiteDiff(site, function=name, inputs=inputs if each is plan else {}, outside=__file__)
            taken.append(
                Taken(
                    operation=site.operation,
                    implementation=implementations.get(site, "not computed"),
                    where=shown.where,
                    call=shown.call,
                    arrays=shown.arrays,
                    equations=len(site.covered),
                    diff=tuple(shown.diff()),
                )
            )
        left += [Left(operation=site.operation, where=line_of(site.root, outside=__file__)) for site in each.written]
        refused |= dict.fromkeys(_refused(each))
    return Findings(function=name, taken=_counted(taken), left=_counted(left), refused=tuple(refused))


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


def _traced_for(target: Any) -> Any:
    """Makes operations choose implementations for the target within the context."""
    import contextlib

    import jax

    from hlo_analysis.capture.cudnn import answer_cudnn_checks
    from hlo_analysis.capture.meshes import mesh_of_one, name_target_in_meshes

    stack = contextlib.ExitStack()
    if target.kind == "cuda":
        stack.enter_context(answer_cudnn_checks(target))
        stack.enter_context(name_target_in_meshes(target))
        stack.enter_context(jax.sharding.use_abstract_mesh(mesh_of_one(target)))
    return stack


def _is_array(leaf: Any) -> bool:
    return hasattr(leaf, "shape") and hasattr(leaf, "dtype")


def _traced(function: Callable[..., Any], name: str, arguments: Sequence[Any]) -> tuple[Any, list[Any]]:
    """Returns the function's jaxpr over its arrays, and the arrays."""
    import jax

    from hlo_analysis.capture.lowering import describe_arguments, leave_out_packages, user_line

    leaves, structure = jax.tree.flatten(tuple(arguments))
    structs = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves if _is_array(leaf)]

    def flat(*arrays: Any) -> list[Any]:
        given = iter(arrays)
        whole = [next(given) if _is_array(leaf) else leaf for leaf in leaves]
        results = function(*jax.tree.unflatten(structure, whole))
        return [each for each in jax.tree.leaves(results) if _is_array(each)]

    leave_out_packages("xlafuse", "pallas_kernels", "typer", "click")
    try:
        return jax.make_jaxpr(flat)(*structs), structs
    except (Exception, SystemExit) as error:
        reason = str(error).strip().split("\n\n")[0]
        if type(error).__name__ == "TraceContextError":  # of flax.nnx
            reason += "; have --args return the module, and --fn take it as an argument"
        described = ", ".join(describe_arguments(function, tuple(arguments))) or "none"
        raise InputError(
            f"{name} could not be traced with arguments ({described}): {type(error).__name__}"
            f"{reason and f': {reason}'}{user_line(error)}"
        ) from error


def _refused(plan: Plan) -> Iterator[Refused]:
    from xlafuse.fusion.sources import source_lines, stack_of

    for refusal in plan.refusals:
        equation = refusal.value.equation
        where, code = "an argument" if equation is None else "an unknown line", None
        if equation is not None and (stack := stack_of(equation, outside=__file__)):
            where = f"{stack[0].shown_file}:{stack[0].first_line}"
            code = source_lines(stack[0].file, stack[0].first_line, stack[0].first_line)
        yield Refused(
            operation=refusal.operation, where=where, code=code[0].strip() if code else "", reason=refusal.reason
        )


def _show(findings: Findings) -> None:
    from rich.console import Console
    from rich.text import Text

    from xlafuse.fusion.report import count_text

    console = Console(highlight=False, soft_wrap=True)

    def line(text: str, style: str = "") -> None:
        console.print(Text(text, style=style))

    taken, left = (sum(each.count for each in sites) for sites in (findings.taken, findings.left))
    line(f"{findings.function}: {count_text(taken, left, len(findings.refused))}", "bold")
    if findings.note:
        line(findings.note)
    for each in findings.taken:
        arrays = ", ".join(f"{name} {array}" for name, array in each.arrays.items())
        times = f", {each.count} times" if each.count > 1 else ""
        what = f"{each.operation} by {each.implementation} for {each.equations} equations{times}"
        line(f"\n@@ {each.where} @@ {what}", "cyan")
        for sign, text in each.diff:
            line(f"{sign}{text}", {"-": "red", "+": "green"}.get(sign, ""))
        line(f"  # {arrays}", "dim")
    for each in findings.worse:
        line(f"\n{each}", "bold")
    if findings.left:
        line("")
    for each in findings.left:
        times = f", {each.count} times" if each.count > 1 else ""
        line(f"{each.where}: {each.operation} left to XLA{times}", "dim")
    for each in findings.refused:
        line(f"\n{each.where}: no {each.operation}: {each.reason}", "yellow")
        if each.code:
            line(f"    {each.code}")
