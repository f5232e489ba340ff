"""Implements `xlafuse kernels`: lists the operations and the implementation that a call takes."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hlo_analysis.loading import argument_shape
from xlafuse.cli.errors import InputError
from xlafuse.cli.output import print_json, print_table
from xlafuse.findings import traced_for

if TYPE_CHECKING:
    from pallas_kernels import Choice

_ARRAY = re.compile(r"[a-z]\w*\[.*\]")


def print_kernels(*, as_json: bool = False) -> None:
    """Prints every operation with its implementations."""
    import pallas_kernels
    from pallas_kernels.specs import plain

    rows = []
    for name, op in pallas_kernels.REGISTRY.items():
        summary = (inspect.getdoc(getattr(pallas_kernels, name)) or "").partition("\n\n")[0].replace("\n", " ")
        known = pallas_kernels.choice(op.function, **plain(op.tagged("test")[0].structs())).reasons
        rows.append((name, summary, ", ".join(known)))
    if as_json:
        print_json([{"name": n, "description": text, "implementations": known.split(", ")} for n, text, known in rows])
        return
    print_table(("operation", "what it does", "implementations"), rows)
    print("xlafuse kernels NAME: its arguments, and what a call of it takes.")


def print_kernel(name: str, arguments: Sequence[str], target: str, *, as_json: bool = False) -> None:
    """Prints an operation's documentation and what its benchmark calls take, or what the described call takes.

    arguments: NAME=VALUE each, see `parsed`.

    Raises:
        InputError: arguments that cannot be read, or that the operation refuses.
        UnknownNameError: no operation or target of that name.
    """
    import pallas_kernels
    from hlo_analysis.targets import load_target
    from pallas_kernels.specs import plain
    from xlafuse.errors import UnknownNameError

    if name not in pallas_kernels.REGISTRY:
        raise UnknownNameError("operation", name, pallas_kernels.REGISTRY)
    op, device = pallas_kernels.REGISTRY[name], load_target(target)

    def chosen(given: Mapping[str, Any]) -> Choice:
        return traced_for(device, lambda: pallas_kernels.choice(op.function, **plain(given)))

    if arguments:
        given = parsed(arguments)
        try:
            made = chosen(given)
        except (TypeError, ValueError) as error:
            raise InputError(str(error)) from error
        if as_json:
            print_json({"call": list(arguments), **_record(made, target)})
            return
        words = {each: "is taken" if each == made.taken else "runs, too" for each in made.runnable}
        rows = [(each, words.get(each) or made.reasons[each] or "") for each in {**words, **made.reasons}]
        print_table(("implementation", ""), rows, title=f"{name} on {target}")
        return
    # The public function; the registry's own may take an object's fields as separate arguments.
    function = getattr(pallas_kernels, name)
    signature, text = f"{name}{inspect.signature(function)}", inspect.getdoc(function)
    choices = {spec.name: chosen(spec.structs()) for spec in op.tagged("bench")}
    if as_json:
        calls = [{"call": call, **_record(made, target)} for call, made in choices.items()]
        print_json({"name": name, "signature": signature, "description": text, "calls": calls})
        return
    print(f"{signature}\n\n{text}\n")
    rows = [(call, made.runnable[0], ", ".join(made.runnable[1:]) or "–") for call, made in choices.items()]
    print_table(("call", "takes", "runs, too"), rows, title=f"what calls take on {target}")


def parsed(texts: Sequence[str]) -> Mapping[str, Any]:
    """Parses a call's arguments.

    'x=bf16[8192,4096]' is an array of that shape, 'is_causal=True' or 'window=(1023, 0)' a Python value, and any other
    word a string.

    Raises:
        InputError: a text is not NAME=VALUE, or a name comes twice.
    """
    import jax

    from pallas_kernels.specs import Static

    found: dict[str, Any] = {}
    for text in texts:
        name, separator, value = text.partition("=")
        if not (name and separator):
            raise InputError(f"expected --arg NAME=VALUE, as x=bf16[8192,4096] or is_causal=True, got {text!r}")
        if name in found:
            raise InputError(f"--arg {name} is given twice")
        if _ARRAY.fullmatch(value):
            shape, dtype = argument_shape(value)
            found[name] = jax.ShapeDtypeStruct(shape, dtype)
        else:
            found[name] = Static(_literal(value))
    return found


def _literal(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def _record(choice: Choice, target: str) -> dict[str, Any]:
    """Returns a choice as plain values; `refused` has the reason for each implementation that does not run."""
    refused = {name: reason for name, reason in choice.reasons.items() if reason}
    return {"target": target, "takes": choice.taken, "runs": list(choice.runnable), "refused": refused}
