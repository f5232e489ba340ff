"""Names the modules of Flax NNX in the programs that they trace, as Linen names its own.

While a function is traced, each module that is called opens a `jax.named_scope`: its attribute path from the caller
that holds it (`blocks/3/attention`), or the name of its class where no caller does. Scopes that the user opened stay as
they are: within one, and within a class that opens its own, nothing is named twice.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from types import FrameType, FunctionType
from typing import Any

import jax
from jax._src import source_info_util

from hlo_analysis.capture.patches import Patch

# JAX keeps what it traced: with these scopes it is not what the user traces.
_is_named = jax.make_user_context()


@contextlib.contextmanager
def name_modules() -> Iterator[None]:
    """Within the block, and in this thread only, NNX modules open scopes; does nothing where Flax is not imported."""
    if "flax.nnx" not in sys.modules:
        yield
        return
    with _CALLS.applied(_Scopes()), _is_named(True):
        yield


class _Scopes:
    """A stack of the modules being traced, outermost first, each with the scope that it opened."""

    def __init__(self) -> None:
        self._running: list[tuple[Any, str]] = []
        self._paths: dict[int, tuple[Any, dict[int, str]]] = {}

    def call(self, original: Callable[..., Any], module: Any, *arguments: Any, **options: Any) -> Any:
        """Calls a module in its scope, or as it is where it gets none."""
        name = self._name(module)
        if not name:
            return original(module, *arguments, **options)
        self._running.append((module, name))
        try:
            with jax.named_scope(name):
                return original(module, *arguments, **options)
        finally:
            self._running.pop()

    def _name(self, module: Any) -> str:
        caller, opened = self._running[-1] if self._running else (None, "")
        if caller is module:  # super().__call__
            return ""
        own = _own_scopes(type(module))
        path = self._path(module, sys._getframe())
        if not path:
            return "" if own else type(module).__name__
        if _innermost_scope() not in ("", opened):
            return ""
        parent, _, last = path.rpartition("/")
        return parent if last in own else path

    def _path(self, module: Any, frame: FrameType | None) -> str:
        """The module's path from the module that the nearest caller has in a variable and that holds it, or ''."""
        from flax import nnx

        while frame is not None:
            for value in frame.f_locals.values():
                if isinstance(value, nnx.Module) and (path := self._paths_from(value).get(id(module))):
                    return path
            frame = frame.f_back
        return ""

    def _paths_from(self, owner: Any) -> dict[int, str]:
        from flax import nnx

        if id(owner) not in self._paths:
            paths = {id(module): "/".join(map(str, path)) for path, module in nnx.iter_modules(owner)}
            self._paths[id(owner)] = owner, paths  # the owner too, so that no other object gets its id
        return self._paths[id(owner)][1]


def _innermost_scope() -> str:
    """The scope that was opened last in the function that JAX traces now, or ''."""
    stack = source_info_util.current_name_stack().stack
    return next((entry.name for entry in reversed(stack) if isinstance(entry, source_info_util.Scope)), "")


@functools.cache
def _own_scopes(kind: type) -> frozenset[str]:
    """The scopes that methods of a class open, among other strings of theirs; empty where none opens any."""
    names: set[str] = set()
    for method in (method for base in kind.__mro__ for method in vars(base).values()):
        while isinstance(method, FunctionType):
            if "named_scope" in method.__code__.co_names:
                names |= {constant for constant in method.__code__.co_consts if isinstance(constant, str)}
            cells = [cell.cell_contents for cell in method.__closure__ or ()]
            names |= {cell.name for cell in cells if isinstance(cell, type(jax.named_scope("")))}  # of a decorator
            method = getattr(method, "__wrapped__", None)
    return frozenset(names)


class _Calls(Patch):
    """Replaces `__call__` of every class of NNX modules that defines one."""

    def _owners(self) -> Iterator[Any]:
        from flax import nnx

        pending = [nnx.Module]
        while pending:
            kind = pending.pop()
            pending += kind.__subclasses__()
            if "__call__" in vars(kind):
                yield kind


def _called(original: Callable[..., Any], scopes: _Scopes, *arguments: Any, **options: Any) -> Any:
    return scopes.call(original, *arguments, **options)


_CALLS = _Calls("flax.nnx", {"__call__": _called})
