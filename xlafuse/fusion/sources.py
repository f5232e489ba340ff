"""Finds the expressions in a program's files that its equations come from."""

from __future__ import annotations

import ast
import functools
import linecache
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jax._src import source_info_util

import pallas_kernels

_LIBRARIES = ("site-packages", "dist-packages")
_PACKAGES = (Path(__file__).parents[1], Path(pallas_kernels.__file__).parent)
"""The folders of this package and of its kernels, which need not be installed."""


@dataclass(frozen=True)
class Place:
    """An expression in a file; lines count from 1, columns from 0 in bytes."""

    file: str
    function: str
    first_line: int
    last_line: int
    first_column: int
    last_column: int

    @property
    def shown_file(self) -> str:
        """The file, relative to the current folder if it is inside."""
        path = Path(self.file)
        return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else self.file

    @property
    def text(self) -> str | None:
        """The expression's source; None if the file cannot be read."""
        lines = source_lines(self.file, self.first_line, self.last_line)
        if lines is None or self.last_column <= (self.first_column if len(lines) == 1 else 0):
            return None
        whole = [line.encode() for line in lines]
        whole[-1] = whole[-1][: self.last_column]
        whole[0] = whole[0][self.first_column :]
        return b"\n".join(whole).decode(errors="replace")

    @property
    def statement(self) -> tuple[int, int]:
        """First and last line of the statement around the expression; in a compound statement, the expression's own."""
        around = [
            (first, last)
            for first, last in _statements(self.file)
            if first <= self.first_line and self.last_line <= last
        ]
        return min(around, key=lambda lines: lines[1] - lines[0], default=(self.first_line, self.last_line))

    def is_before(self, other: Place) -> bool:
        """Tells whether this expression is in an earlier statement than the other, or part of it."""
        if self.last_line < other.statement[0]:
            return True
        first, last = (self.first_line, self.first_column), (self.last_line, self.last_column)
        return (other.first_line, other.first_column) <= first and last <= (other.last_line, other.last_column)

    def target(self) -> str | None:
        """Returns the name that the statement assigns the expression to; None for other statements."""
        lines = source_lines(self.file, *self.statement)
        text = self.text
        if lines is None or text is None:
            return None
        name, equals, assigned = "\n".join(lines).strip().partition(" = ")
        return name if equals and assigned == text and name.isidentifier() else None

    def replaced(self, text: str) -> list[str] | None:
        """Returns the statement's lines with `text` in place of the expression."""
        first, last = self.statement
        lines = source_lines(self.file, first, last)
        if lines is None or self.text is None:
            return None
        before = lines[self.first_line - first].encode()[: self.first_column].decode(errors="replace")
        after = lines[self.last_line - first].encode()[self.last_column :].decode(errors="replace")
        whole = [*lines[: self.first_line - first], before + text + after, *lines[self.last_line - first + 1 :]]
        return "\n".join(whole).split("\n")


def source_lines(file: str, first: int, last: int) -> list[str] | None:
    """Returns those lines of a file without line ends; None if they cannot be read."""
    lines = linecache.getlines(file)[first - 1 : last]
    return [line.rstrip("\r\n") for line in lines] if len(lines) == last - first + 1 else None


def stack_of(equation: Any, *, outside: str) -> tuple[Place, ...]:
    """Returns where the user wrote an `xlafuse.fusion.graph.Equation` and the calls around it, innermost first.

    outside: the file that traced the program. Frames of installed packages and of this one further inside are left out.
    The result is empty if nothing is known.
    """
    places = places_of(equation, outside=outside)
    start = next((k for k, place in enumerate(places) if not _is_library(place.file)), 0)
    return tuple(places[start:])


def line_of(equation: Any, *, outside: str) -> str:
    """Returns the file and line at which the user wrote an equation, as `stack_of` finds them."""
    stack = stack_of(equation, outside=outside)
    return f"{stack[0].shown_file}:{stack[0].first_line}" if stack else "an unknown line"


def same_call(equation: Any, stack: Sequence[Place], *, outside: str) -> Place | None:
    """Returns where an equation comes from in the function call that `stack` ends in; None if it is from elsewhere."""
    if not stack:
        return None
    places = places_of(equation, outside=outside)
    for k, place in enumerate(places):
        is_same = (place.file, place.function) == (stack[0].file, stack[0].function)
        if is_same and tuple(places[k + 1 :]) == tuple(stack[1:]):
            return place
    return None


def places_of(equation: Any, *, outside: str) -> list[Place]:
    """Returns the calls that an equation comes from, innermost first, up to those of the file `outside`."""
    places: list[Place] = []
    chain = [*equation.calls, equation.source]
    for call, source in zip([None, *chain][-2::-1], reversed(chain), strict=True):
        frames = _frames(source, outside)
        if call is not None:
            # JAX keeps the trace of a jitted function, whose surrounding calls are those of the first call.
            name = call.params["name"]
            inside = next((k for k, frame in enumerate(frames) if frame.function_name.rpartition(".")[2] == name), -1)
            frames = frames[: inside + 1]
        places += map(_place, frames)
    return places


def _place(frame: Any) -> Place:
    return Place(
        frame.file_name,
        frame.function_name,
        frame.start_line,
        max(frame.start_line, frame.end_line),
        frame.start_column,
        frame.end_column,
    )


def _frames(source: Any, outside: str) -> Sequence[Any]:
    frames = list(source_info_util.user_frames(source.source_info.traceback))
    end = next((k for k, frame in enumerate(frames) if frame.file_name == outside), len(frames))
    return frames[:end]


def _is_library(file: str) -> bool:
    path = Path(file)
    return any(name in path.parts for name in _LIBRARIES) or any(map(path.is_relative_to, _PACKAGES))


@functools.cache
def _statements(file: str) -> tuple[tuple[int, int], ...]:
    """Returns first and last lines of the statements that contain no other statement."""
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError):
        return ()
    simple = (node for node in ast.walk(tree) if isinstance(node, ast.stmt) and not hasattr(node, "body"))
    return tuple((node.lineno, node.end_lineno or node.lineno) for node in simple)
