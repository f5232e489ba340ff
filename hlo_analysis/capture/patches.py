"""Functions of JAX's own modules that answer for a target while a capture lowers, and otherwise as ever."""

from __future__ import annotations

import contextlib
import functools
import importlib
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any

Answer = Callable[..., Any]
"""`(original, value, *arguments)`: what a function returns within `Patch.applied(value)`."""

_LOCK = threading.Lock()


class Patch:
    """Replaces functions of a module, or of its class `owner`; in other threads, and outside `applied`, the originals
    answer."""

    def __init__(self, module: str, answers: Mapping[str, Answer], *, owner: str = "") -> None:
        self._module = module
        self._owner = owner
        self._answers = answers
        self._value: ContextVar[Any] = ContextVar(module, default=None)
        self._originals: dict[tuple[Any, str], Callable[..., Any]] = {}
        self._depth = 0

    @contextlib.contextmanager
    def applied(self, value: object) -> Iterator[None]:
        """Within the block, and in this thread only, the answers are those for `value`."""
        with _LOCK:
            self._replace()
            self._depth += 1
        token = self._value.set(value)
        try:
            yield
        finally:
            self._value.reset(token)
            with _LOCK:
                self._depth -= 1
                if self._depth == 0:
                    for (owner, name), original in self._originals.items():
                        setattr(owner, name, original)
                    self._originals.clear()

    def _owners(self) -> Iterable[Any]:
        """The objects whose functions are replaced."""
        module: Any = importlib.import_module(self._module)
        return [getattr(module, self._owner) if self._owner else module]

    def _replace(self) -> None:
        """Replaces the functions that another thread has not replaced already."""
        for owner in self._owners():
            for name, answer in self._answers.items():
                if (owner, name) not in self._originals:
                    original = self._originals[owner, name] = vars(owner)[name]
                    setattr(owner, name, self._asked(original, answer))

    def _asked(self, original: Callable[..., Any], answer: Answer) -> Callable[..., Any]:
        @functools.wraps(original)
        def ask(*arguments: Any, **options: Any) -> Any:
            value = self._value.get()
            if value is None:
                return original(*arguments, **options)
            return answer(original, value, *arguments, **options)

        return ask
