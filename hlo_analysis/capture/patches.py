"""Functions of JAX's own modules that answer for a target while a capture lowers, and otherwise as ever."""

from __future__ import annotations

import contextlib
import importlib
import threading
from collections.abc import Callable, Iterator, Mapping
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
        self._originals: dict[str, Callable[..., Any]] = {}
        self._depth = 0

    @contextlib.contextmanager
    def applied(self, value: object) -> Iterator[None]:
        """Within the block, and in this thread only, the answers are those for `value`."""
        module: Any = importlib.import_module(self._module)
        module = getattr(module, self._owner) if self._owner else module
        with _LOCK:
            if self._depth == 0:
                self._originals = {name: getattr(module, name) for name in self._answers}
                for name in self._answers:
                    setattr(module, name, self._asked(name))
            self._depth += 1
        token = self._value.set(value)
        try:
            yield
        finally:
            self._value.reset(token)
            with _LOCK:
                self._depth -= 1
                if self._depth == 0:
                    for name, original in self._originals.items():
                        setattr(module, name, original)

    def _asked(self, name: str) -> Callable[..., Any]:
        original, answer = self._originals[name], self._answers[name]

        def ask(*arguments: Any, **options: Any) -> Any:
            value = self._value.get()
            if value is None:
                return original(*arguments, **options)
            return answer(original, value, *arguments, **options)

        return ask
