"""Finds the lines of a program's files that its equations come from."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jax._src import source_info_util

import pallas_kernels

_LIBRARIES = ("site-packages", "dist-packages")
_PACKAGES = (Path(__file__).parents[1], Path(pallas_kernels.__file__).parent)
"""The folders of this package and of its kernels, which need not be installed."""


def frame_of(equation: Any, *, outside: str) -> Any:
    """Returns the frame in which the user wrote an `xlafuse.fusion.graph.Equation`; None if nothing is known.

    outside: the file that traced the program. Frames of installed packages and of this one further inside are left out.
    """
    frames = list(_frames(equation, outside))
    return next((each for each in frames if not _is_library(each.file_name)), next(iter(frames), None))


def line_of(equation: Any, *, outside: str) -> str:
    """Returns the line at which the user wrote an equation, and its file, relative to the current folder if inside."""
    if (frame := frame_of(equation, outside=outside)) is None:
        return "an unknown line"
    path = Path(frame.file_name)
    file = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
    return f"{file}:{frame.start_line}"


def _frames(equation: Any, outside: str) -> Iterator[Any]:
    """Yields the calls that an equation comes from, innermost first, up to those of the file `outside`."""
    chain = [*equation.calls, equation.source]
    for call, source in zip([None, *chain][-2::-1], reversed(chain), strict=True):
        frames = list(source_info_util.user_frames(source.source_info.traceback))
        frames = frames[: next((k for k, frame in enumerate(frames) if frame.file_name == outside), len(frames))]
        if call is not None:
            # JAX keeps the trace of a jitted function, whose surrounding calls are those of the first call.
            name = call.params["name"]
            inside = (k for k, frame in enumerate(frames) if frame.function_name.rpartition(".")[2] == name)
            frames = frames[: next(inside, 0) + 1]  # a wrapped function has another name than its code
        yield from frames


def _is_library(file: str) -> bool:
    path = Path(file)
    return any(name in path.parts for name in _LIBRARIES) or any(map(path.is_relative_to, _PACKAGES))
