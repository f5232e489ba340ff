"""Makes commands of functions whose options are the fields of a dataclass, and reads lists in options."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Annotated, Any, get_args, get_origin, get_type_hints

from xlafuse.cli.errors import cli_errors


def with_options(run: Callable[..., None], options: type[Any]) -> Callable[..., None]:
    """Returns a command for typer that calls `run` with its options: `options(...)`, then the command's own.

    The command's own are the further parameters of `run`. The others are the fields of the dataclass `options` that are
    annotated as a parameter of a typer command is. A field of type tuple[str, ...] is a list with commas.
    """
    hints = get_type_hints(options, include_extras=True)
    _, *own = inspect.signature(run, eval_str=True).parameters.values()
    parameters = [each.replace(kind=each.KEYWORD_ONLY) for each in own]
    lists = set()
    for field in dataclasses.fields(options):
        annotation: Any = hints[field.name]
        default: Any = field.default
        if get_origin(annotation) is not Annotated:
            continue
        if get_args(annotation)[0] == tuple[str, ...]:
            lists.add(field.name)
            annotation, default = Annotated[str, *annotation.__metadata__], ",".join(default)
        default = inspect.Parameter.empty if default is dataclasses.MISSING else default
        parameters.append(
            inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
        )

    def command(**given: Any) -> None:
        further = {each.name: given.pop(each.name) for each in own}
        with cli_errors():
            run(options(**{key: names(value) if key in lists else value for key, value in given.items()}), **further)

    command.__signature__ = inspect.Signature(parameters)  # pyright: ignore[reportFunctionMemberAccess]
    command.__annotations__ = {each.name: each.annotation for each in parameters}
    command.__name__, command.__doc__ = run.__name__, run.__doc__
    return command


def names(text: str | None) -> tuple[str, ...]:
    """Splits a comma-separated list: 'a,b' gives ('a', 'b')."""
    return tuple(name for part in (text or "").split(",") if (name := part.strip()))
