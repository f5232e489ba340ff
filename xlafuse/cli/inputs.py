"""Parses command-line options into a program and its arguments."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from hlo_analysis.loading import argument, first_line, load_attribute, load_function
from hlo_analysis.report.formats import plural
from xlafuse.cli.errors import InputError


def block_shape(texts: Sequence[str]) -> tuple[int, int]:
    """Parses batch and length of a block's input: '2x4096', the default, gives (2, 4096)."""
    if not texts:
        return 2, 4096
    parts = texts[0].lower().replace("×", "x").split("x")
    if len(texts) > 1 or len(parts) != 2 or not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise InputError(f"expected one shape BATCHxLENGTH for a block, as 2x4096, got {' '.join(texts)!r}")
    return int(parts[0]), int(parts[1])


def load_program(fn: str, shapes: Sequence[str], args: str | None) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Loads the function that --fn names, and its arguments from --shape or --args."""
    function = load_function(fn)
    return function, function_arguments(function, shapes, load_arguments(args) if args else None)


def load_arguments(name: str) -> tuple[Any, ...]:
    """Loads the arguments that 'package.module:factory' returns, or the tuple or list of that name."""
    found = load_attribute(name, "--args")
    if callable(found):
        try:
            found = found()
        except (Exception, SystemExit) as error:
            raise InputError(f"--args {name}: calling it failed: {first_line(error)}") from error
    if not isinstance(found, tuple | list):
        raise InputError(f"expected a tuple of arguments from --args {name}, got {type(found).__name__}")
    return tuple(found)


def function_arguments(
    fn: Callable[..., Any], shapes: Sequence[str], arguments: tuple[Any, ...] | None
) -> tuple[Any, ...]:
    """Returns the arguments to trace `fn` with, from --shape or --args, checked against its signature."""
    if shapes and arguments is not None:
        raise InputError("expected --shape or --args, got both")
    if arguments is None:
        arguments = tuple(map(argument, shapes))
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError):  # a builtin has no signature
        return arguments
    try:
        signature.bind(*arguments)
    except TypeError as error:
        raise InputError(
            f"{getattr(fn, '__name__', 'the function')}{signature} cannot be called with "
            f"{plural(len(arguments), 'argument')}: {error}. {_how_to_give(signature)}"
        ) from None
    return arguments


def _how_to_give(signature: inspect.Signature) -> str:
    needed = [
        parameter.name
        for parameter in signature.parameters.values()
        if parameter.kind is parameter.KEYWORD_ONLY and parameter.default is parameter.empty
    ]
    if needed:
        return f"Name a function that gives {', '.join(needed)} by keyword, as functools.partial makes one."
    return "Give one --shape 'bf16[8192,4096]' for each argument, or --args MODULE:FACTORY."
