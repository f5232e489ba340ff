"""The errors that `hlo_analysis` raises for bad input, each saying what was expected, what came and what to do."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class HloAnalysisError(Exception):
    """Base of every error that this package raises on purpose."""


class CaptureError(HloAnalysisError):
    """A function could not be traced, or XLA could not compile it.

    `last_words` holds the end of what XLA wrote to its error stream; '' where XLA never ran.
    """

    def __init__(self, message: str, *, last_words: str = "") -> None:
        self.last_words = last_words
        super().__init__(f"{message}\n\nXLA's last words:\n{last_words}" if last_words else message)


class UnknownTargetError(HloAnalysisError, ValueError):
    """No such target, or one that this package cannot compile for."""


class UnknownOptionError(CaptureError, ValueError):
    """XLA has no compiler option of that name."""


class DumpError(HloAnalysisError, ValueError):
    """A folder or archive is not a capture, or lacks what an analysis needs."""


class HloParseError(HloAnalysisError, ValueError):
    """HLO text that is not well formed. `line` and `column` count from 1."""

    def __init__(self, message: str, *, line: int, column: int) -> None:
        self.message = message
        self.line = line
        self.column = column
        super().__init__(f"line {line}, column {column}: {message}")

    def __reduce__(self):
        """Rebuild from the parts: errors cross process boundaries by pickle."""
        return _hlo_parse_error, (self.message, self.line, self.column)


def _hlo_parse_error(message: str, line: int, column: int) -> HloParseError:
    return HloParseError(message, line=line, column=column)


def nearest_names(name: str, known: Iterable[str], count: int = 3) -> str:
    """A phrase for error messages: `; did you mean 'a' or 'b'?`, or '' when nothing is near."""
    near = difflib.get_close_matches(name, list(known), n=count, cutoff=0.5)
    return f"; did you mean {' or '.join(repr(match) for match in near)}?" if near else ""
