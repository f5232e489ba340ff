"""Implements `xlafuse kernels`: lists the operations and the implementation that a call takes."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from hlo_analysis.loading import argument_shape
from hlo_analysis.report.console import fitted
from xlafuse.cli.errors import InputError
from xlafuse.cli.output import print_json
from xlafuse.findings import traced_for

if TYPE_CHECKING:
    from pallas_kernels import Choice, OpSpec

_ARRAY = re.compile(r"[a-z]\w*\[.*\]")


def print_kernels(*, as_json: bool = False) -> None:
    """Prints every operation with its implementations."""
    from pallas_kernels import REGISTRY

    if as_json:
        print_json(
            [
                {"name": name, "description": _summary(op), "implementations": _implementations(op)}
                for name, op in REGISTRY.items()
            ]
        )
        return
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("operation", no_wrap=True)
    table.add_column("what it does", min_width=30)
    table.add_column("implementations", min_width=12)
    for name, op in REGISTRY.items():
        table.add_row(name, escape(_summary(op)), ", ".join(_implementations(op)))
    console = Console()
    console.print(fitted(console, [lambda: table]))
    console.print("xlafuse kernels NAME: its arguments, and what a call of it takes.", highlight=False)


def print_kernel(name: str, arguments: Sequence[str], target: str, *, as_json: bool = False) -> None:
    """Prints an operation's documentation and what its benchmark calls take, or what the described call takes.

    arguments: NAME=VALUE each, see `parsed`.

    Raises:
        InputError: arguments that cannot be read, or that the operation refuses.
        UnknownNameError: no operation or target of that name.
    """
    from hlo_analysis.targets import load_target
    from pallas_kernels import REGISTRY, choice
    from pallas_kernels.specs import plain
    from xlafuse.errors import UnknownNameError

    if name not in REGISTRY:
        raise UnknownNameError("operation", name, REGISTRY)
    op, device = REGISTRY[name], load_target(target)
    if arguments:
        given = parsed(op, arguments)
        try:
            made = traced_for(device, lambda: choice(op.function, **plain(given)))
        except (TypeError, ValueError) as error:
            raise InputError(str(error)) from error
        if as_json:
            print_json({"call": list(arguments), **_record(made, target)})
        else:
            _print_choice(made, target)
        return
    function = _public(op)
    specs = list(op.tagged("bench"))
    choices = traced_for(device, lambda: [choice(op.function, **plain(spec.structs())) for spec in specs])
    if as_json:
        calls = [{"call": spec.name, **_record(made, target)} for spec, made in zip(specs, choices, strict=True)]
        signature = f"{name}{inspect.signature(function)}"
        print_json({"name": name, "signature": signature, "description": inspect.getdoc(function), "calls": calls})
        return
    console = Console(highlight=False, soft_wrap=True)
    console.print(escape(f"{name}{inspect.signature(function)}\n\n{inspect.getdoc(function)}\n"))
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, title=f"what calls take on {target}", title_justify="left")
    for heading in ("call", "takes", "runs, too"):
        table.add_column(heading, no_wrap=heading == "call")
    for spec, made in zip(specs, choices, strict=True):
        taken, *others = made.runnable
        table.add_row(spec.name, taken, ", ".join(others) or "–")
    console.print(fitted(console, [lambda: table]))


def parsed(op: OpSpec, texts: Sequence[str]) -> Mapping[str, Any]:
    """Parses a call's arguments.

    'x=bf16[8192,4096]' is an array of that shape, 'is_causal=True' or 'window=(1023, 0)' a Python value, and any other
    word a string.

    Raises:
        InputError: a text is not NAME=VALUE, the operation has no such name, a name comes twice, or a required one is
            missing.
    """
    import jax

    from hlo_analysis.errors import nearest_names
    from pallas_kernels.specs import Static

    known, needed = _argument_names(op)
    found: dict[str, Any] = {}
    for text in texts:
        name, separator, value = text.partition("=")
        if not (name and separator):
            raise InputError(f"expected --arg NAME=VALUE, as x=bf16[8192,4096] or is_causal=True, got {text!r}")
        if name not in known:
            raise InputError(f"{op.name} has no argument {name!r}{nearest_names(name, known) or ''}")
        if name in found:
            raise InputError(f"--arg {name} is given twice")
        if _ARRAY.fullmatch(value):
            shape, dtype = argument_shape(value)
            found[name] = jax.ShapeDtypeStruct(shape, dtype)
        else:
            found[name] = Static(_literal(value))
    if missing := [name for name in needed if name not in found]:
        raise InputError(f"{op.name} needs {', '.join(missing)} as well, each by --arg NAME=VALUE")
    return found


def _argument_names(op: OpSpec) -> tuple[list[str], list[str]]:
    """Returns the names that a call may have and those that it must have.

    If the registry's function takes keywords in place of objects such as a `Norm`, the names come from its specs.
    """
    parameters = inspect.signature(op.function).parameters.values()
    named = [p for p in parameters if p.kind is not p.VAR_KEYWORD and p.name != "implementation"]
    known, needed = [p.name for p in named], [p.name for p in named if p.default is p.empty]
    if len(named) < len(parameters) - ("implementation" in (p.name for p in parameters)):
        specs = [list(spec.arguments) for spec in op.arg_specs]
        known += [name for names in specs for name in names if name not in known]
        needed += [name for name in specs[0] if name not in needed and all(name in names for names in specs)]
    return list(dict.fromkeys(known)), needed


def _literal(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def _record(choice: Choice, target: str) -> dict[str, Any]:
    """Returns a choice as plain values; `refused` has the reason for each implementation that does not run."""
    refused = {name: reason for name, reason in choice.reasons.items() if reason}
    return {"target": target, "takes": choice.taken, "runs": list(choice.runnable), "refused": refused}


def _print_choice(choice: Choice, target: str) -> None:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, title=f"{choice.operation} on {target}", title_justify="left")
    table.add_column("implementation", no_wrap=True)
    table.add_column("", min_width=24)
    for name in dict.fromkeys((*choice.runnable, *choice.reasons)):
        word = "is taken" if name == choice.taken else "runs, too"
        table.add_row(name, escape(choice.reasons[name] or word))
    console = Console(highlight=False)
    console.print(fitted(console, [lambda: table]))


def _summary(op: OpSpec) -> str:
    return (inspect.getdoc(_public(op)) or "").partition("\n\n")[0].replace("\n", " ")


def _public(op: OpSpec) -> Callable[..., Any]:
    """Returns the public function; the registry's own may take an object's fields as separate arguments."""
    import pallas_kernels

    return getattr(pallas_kernels, op.name)


def _implementations(op: OpSpec) -> tuple[str, ...]:
    from pallas_kernels import choice
    from pallas_kernels.specs import plain

    return tuple(choice(op.function, **plain(op.tagged("test")[0].structs())).reasons)
