"""Makes commands of functions whose options are the fields of a dataclass, and reads lists in options."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any, get_type_hints

from xlafuse.cli.errors import cli_errors


def with_options[T](run: Callable[[T], None], options: type[T]) -> Callable[..., None]:
    """Returns a command for typer that calls `run` with its options, which are the fields of the dataclass `options`.

    Each field is annotated as a parameter of a typer command is.
    """

    def command(**given: Any) -> None:
        with cli_errors():
            run(options(**given))

    hints = get_type_hints(options, include_extras=True)
    parameters = [
        inspect.Parameter(
            each.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty if each.default is dataclasses.MISSING else each.default,
            annotation=hints[each.name],
        )
        for each in dataclasses.fields(options)  # pyright: ignore[reportArgumentType]
    ]
    command.__signature__ = inspect.Signature(parameters)  # pyright: ignore[reportFunctionMemberAccess]
    command.__annotations__ = hints
    command.__name__, command.__doc__ = run.__name__, run.__doc__
    return command


def names(text: str | None) -> tuple[str, ...]:
    """Splits a comma-separated list: 'a,b' gives ('a', 'b')."""
    return tuple(name for part in (text or "").split(",") if (name := part.strip()))
