"""Imports the user's modules again, with other source text for some of their files."""

from __future__ import annotations

import contextlib
import functools
import io
import sys
import sysconfig
from collections.abc import Callable, Iterator, Mapping
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType
from typing import Any

from xlafuse.fusion.sources import is_library


@contextlib.contextmanager
def reimported(codes: Mapping[str, CodeType]) -> Iterator[None]:
    """Within the context the user's modules are imported again, as new ones, and files in `codes` run that code.

    Afterwards the modules are what they were. What they print in the context is dropped.
    """
    kept = {name: module for name, module in sys.modules.items() if _is_users(module)}
    path, read = [*sys.path], SourceFileLoader.get_code

    @functools.wraps(read)
    def get_code(self: SourceFileLoader, fullname: str) -> CodeType | None:
        return codes.get(str(Path(self.path).resolve())) or read(self, fullname)

    for name in kept:
        del sys.modules[name]
    SourceFileLoader.get_code = get_code
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        SourceFileLoader.get_code = read
        for name in [name for name, module in sys.modules.items() if _is_users(module)]:
            del sys.modules[name]
        sys.modules.update(kept)
        sys.path[:] = path


def rerun(codes: Mapping[str, CodeType], call: Callable[[], Any]) -> Any:
    """Returns what `call` returns with the user's modules imported again; None where it raises."""
    with reimported(codes):
        try:
            return call()
        except (Exception, SystemExit):  # the user's modules may raise anything
            return None


def _is_users(module: Any) -> bool:
    file = getattr(module, "__file__", None)
    if not isinstance(file, str) or module.__name__ == "__main__" or is_library(file):
        return False
    return not Path(file).is_relative_to(sysconfig.get_path("stdlib"))
