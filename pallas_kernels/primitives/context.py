"""Values of context variables that hold inside a `with` statement."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar


@contextlib.contextmanager
def assigned[T](variable: ContextVar[T], value: T) -> Iterator[None]:
    """Gives a context variable a value inside the context."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)
