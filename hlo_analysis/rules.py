"""Runs the rules of an analysis, so that one that raises costs its own findings and never the report.

`analyze` calls every rule (of missed fusions, remedies, patterns, decisions, notes) through `attempt` or `gather`. An
error becomes a note of the Analysis. Where HLO_ANALYSIS_STRICT is 1 in the environment, as in tests and CI, and outside
`analyze`, it is raised.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import PurePath

STRICT = "HLO_ANALYSIS_STRICT"

_notes: ContextVar[dict[str, str] | None] = ContextVar("notes of failed rules", default=None)


@contextmanager
def failures_as_notes() -> Iterator[dict[str, str]]:
    """Collects the errors of rules as notes, one for each rule that failed, by its name."""
    notes: dict[str, str] = {}
    token = _notes.set(None if os.environ.get(STRICT, "0") not in ("", "0") else notes)
    try:
        yield notes
    finally:
        _notes.reset(token)


def attempt[**P, R, D](rule: Callable[P, R], otherwise: D, /, *args: P.args, **kwargs: P.kwargs) -> R | D:
    """Returns `rule(*args, **kwargs)`, or `otherwise` with a note if it raises."""
    try:
        return rule(*args, **kwargs)
    except Exception as error:
        _note(rule, error)
        return otherwise


def gather[**P, T](rule: Callable[P, Iterable[T]], /, *args: P.args, **kwargs: P.kwargs) -> list[T]:
    """Returns what a rule yields, or nothing with a note if it raises."""
    try:
        return list(rule(*args, **kwargs))
    except Exception as error:
        _note(rule, error)
        return []


def _note(rule: Callable[..., object], error: Exception) -> None:
    """Adds a note on a failed rule; raises the error where nobody collects notes."""
    notes = _notes.get()
    if notes is None:
        raise
    owner = getattr(getattr(rule, "__self__", None), "name", "")  # a kernel of somebody's catalogue
    name = f"{owner}.{rule.__name__}" if owner else rule.__name__.lstrip("_")
    last = traceback.extract_tb(error.__traceback__)[-1]
    where = f"{PurePath(last.filename).name}:{last.lineno}"
    what = " ".join(f"{type(error).__name__}: {error}".split())
    notes.setdefault(name, f"The rule {name} failed ({what}, at {where}): its findings are missing.")
