"""Errors of the public functions; each says what was expected, what came, and what to do."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class XlafuseError(Exception):
    """Base class of this package's errors."""


class UnknownNameError(XlafuseError, ValueError):
    """A name is not in its registry; the message lists the nearest names, then all of them."""

    def __init__(self, what: str, name: object, known: Iterable[str]):
        self.name = name
        self.known = tuple(known)
        self.nearest = tuple(difflib.get_close_matches(str(name), self.known, n=3, cutoff=0.5))
        hint = f"; did you mean {' or '.join(map(repr, self.nearest))}?" if self.nearest else "."
        super().__init__(f"unknown {what} {name!r}{hint} Known: {', '.join(self.known)}.")


class InapplicablePlanError(XlafuseError, NotImplementedError):
    """A fusion plan asks for an implementation that the block's configuration cannot use."""


def check_left_to_xla(name: str, implementation: object, reason: str) -> None:
    """Raises NotImplementedError if a caller allows only kernels, for a call that no operation computes."""
    if implementation is not None and "xla" not in implementation:  # pyright: ignore[reportOperatorIssue]
        raise NotImplementedError(f"{name}: implementation {implementation!r} cannot run: {reason}.")


class ComparisonError(XlafuseError, RuntimeError):
    """No strategy gave an analysis; `reasons` maps each strategy to its reason."""

    def __init__(self, reasons: dict[str, str]):
        self.reasons = dict(reasons)
        # Strategies often fail for the same reason, for example because the function does not trace.
        grouped: dict[str, list[str]] = {}
        for name, reason in self.reasons.items():
            grouped.setdefault(reason, []).append(name)
        listed = "\n".join(f"{', '.join(names)}: {reason}" for reason, names in grouped.items())
        super().__init__(f"no strategy could be analysed.\n{listed}")
