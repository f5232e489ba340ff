"""Turns errors into a message on stderr and an exit code.

0: done. 1: a check failed, or a strategy or variant that was asked for has no result. 2: bad input, or the program
raised. 130: interrupted.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import typer

from hlo_analysis.errors import HloAnalysisError, InputError
from xlafuse.errors import ComparisonError, XlafuseError

__all__ = ["InputError", "StrategyFailedError", "cli_errors"]


class StrategyFailedError(XlafuseError, RuntimeError):
    """Strategies that the user asked for have no analysis or no times; the report of the others is written.

    reasons: each names a strategy and, after a colon, what it lacks.
    """

    def __init__(self, reasons: Mapping[str, str]):
        listed = "\n".join(f"{name} has no {reason}" for name, reason in reasons.items())
        super().__init__(listed)


_SHOWN_LINES = 15
"""How many lines of a compiler's message are shown."""


@contextmanager
def cli_errors() -> Iterator[None]:
    """Turns the packages' own errors into a message and an exit code; other errors are bugs and pass through."""
    try:
        yield
    except ComparisonError as error:
        reasons = sorted(set(error.reasons.values()))
        # All strategies failed for one reason: the program itself is at fault, which is bad input.
        is_program = len(reasons) == 1
        _say(_short(reasons[0].removeprefix("CaptureError: ") if is_program else str(error)))
        raise typer.Exit(2 if is_program else 1) from None
    except StrategyFailedError as error:
        _say(_short(str(error)))
        raise typer.Exit(1) from None
    except (XlafuseError, HloAnalysisError) as error:
        _say(_short(str(error)))
        raise typer.Exit(2) from None
    except KeyboardInterrupt:
        _say("interrupted")
        raise typer.Exit(130) from None


def _say(message: str) -> None:
    print(f"xlafuse: {message}", file=sys.stderr)


def _short(message: str) -> str:
    lines = [line for line in message.splitlines() if line.strip()]
    if len(lines) > _SHOWN_LINES:
        lines = [*lines[: _SHOWN_LINES - 1], f"... and {len(lines) - _SHOWN_LINES + 1} more lines"]
    return "\n".join(lines)
