"""Finds the lines of a program's files that its equations come from."""

from __future__ import annotations

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
    """A line of a file, from 1, and the function that it is in."""

    file: str
    function: str
    line: int

    @property
    def shown_file(self) -> str:
        """The file, relative to the current folder if it is inside."""
        path = Path(self.file)
        return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else self.file


def stack_of(equation: Any, *, outside: str) -> tuple[Place, ...]:
    """Returns where the user wrote an `xlafuse.fusion.graph.Equation` and the calls around it, innermost first.

    outside: the file that traced the program. Frames of installed packages and of this one further inside are left out.
    The result is empty if nothing is known.
    """
    places = places_of(equation, outside=outside)
    start = next((k for k, place in enumerate(places) if not is_library(place.file)), 0)
    return tuple(places[start:])


def line_of(equation: Any, *, outside: str) -> str:
    """Returns the file and line at which the user wrote an equation, as `stack_of` finds them."""
    stack = stack_of(equation, outside=outside)
    return f"{stack[0].shown_file}:{stack[0].line}" if stack else "an unknown line"


def places_of(equation: Any, *, outside: str) -> list[Place]:
    """Returns the calls that an equation comes from, innermost first, up to those of the file `outside`."""
    places: list[Place] = []
    chain = [*equation.calls, equation.source]
    for call, source in zip([None, *chain][-2::-1], reversed(chain), strict=True):
        frames = _frames(source, outside)
        if call is not None:
            # JAX keeps the trace of a jitted function, whose surrounding calls are those of the first call.
            name = call.params["name"]
            inside = (k for k, frame in enumerate(frames) if frame.function_name.rpartition(".")[2] == name)
            frames = frames[: next(inside, 0) + 1]  # a wrapped function has another name than its code
        places += map(_place, frames)
    return places


def _place(frame: Any) -> Place:
    return Place(frame.file_name, frame.function_name, frame.start_line)


def _frames(source: Any, outside: str) -> Sequence[Any]:
    frames = list(source_info_util.user_frames(source.source_info.traceback))
    end = next((k for k, frame in enumerate(frames) if frame.file_name == outside), len(frames))
    return frames[:end]


def is_library(file: str) -> bool:
    """Returns whether a file is of an installed package, or of this one."""
    path = Path(file)
    return any(name in path.parts for name in _LIBRARIES) or any(map(path.is_relative_to, _PACKAGES))
