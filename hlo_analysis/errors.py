"""Defines the errors for bad input; each says what was expected, what came and what to do."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class HloAnalysisError(Exception):
    """Base class of the errors that this package raises deliberately."""


class InputError(HloAnalysisError, ValueError):
    """Bad input on the command line; the message says what was expected and what came."""


class CaptureError(HloAnalysisError):
    """A function could not be traced, or XLA could not compile it.

    `last_words` holds the end of XLA's error output; '' if XLA never ran.
    """

    def __init__(self, message: str, *, last_words: str = "") -> None:
        self.last_words = last_words
        super().__init__(f"{message}\n\nXLA's last words:\n{last_words}" if last_words else message)


class UnknownTargetError(HloAnalysisError, ValueError):
    """The target does not exist, or this package cannot compile for it."""


class UnknownOptionError(CaptureError, ValueError):
    """XLA has no compiler option of that name."""


class UnknownEdgeError(HloAnalysisError, LookupError):
    """No launch, instruction or edge has that name, or several do."""


class DumpError(HloAnalysisError, ValueError):
    """A folder or archive is not a capture, or lacks data that an analysis needs."""


class HloParseError(HloAnalysisError, ValueError):
    """The HLO text is not well formed. `line` and `column` count from 1."""

    def __init__(self, message: str, *, line: int, column: int) -> None:
        self.message = message
        self.line = line
        self.column = column
        super().__init__(f"line {line}, column {column}: {message}")

    def __reduce__(self):
        """Rebuilds the error from its parts, because errors cross process boundaries by pickle."""
        return _hlo_parse_error, (self.message, self.line, self.column)


def _hlo_parse_error(message: str, line: int, column: int) -> HloParseError:
    return HloParseError(message, line=line, column=column)


def nearest_names(name: str, known: Iterable[str]) -> str:
    """Returns a phrase for error messages: `; did you mean 'a' or 'b'?`, or '' if no name is near."""
    near = difflib.get_close_matches(name, list(known), cutoff=0.5)
    return f"; did you mean {' or '.join(repr(match) for match in near)}?" if near else ""
