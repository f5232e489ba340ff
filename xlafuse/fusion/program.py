"""Fuses a function for a compilation that needs at least one site: the strategy `fused`, and trials."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax

from hlo_analysis.records import SiteRecord
from xlafuse.errors import XlafuseError
from xlafuse.fusion.api import fuse
from xlafuse.fusion.report import Report, SiteLeft

_NEAREST = 3
"""The largest number of sites not taken that an error names."""


class NothingFusedError(XlafuseError, NotImplementedError):
    """`fuse` took no site of a program, which would be compiled as it is."""

    def __init__(self, report: Report):
        self.report = report
        sites = [str(each) for each in (*report.left, *report.refused)]
        rest, near = sites[_NEAREST:], "; ".join(sites[:_NEAREST]) or "nothing is nearly one"
        super().__init__(
            f"fuse left {report.function} as it is: {'; '.join(report.notes)}."
            if report.notes
            else f"fuse takes no site of {report.function} ({near}{f'; and {len(rest)} more' if rest else ''})."
        )


class FusedProgram:
    """A function through `fuse`, and what the last trace of it found.

    function: what to compile in place of `fn`. Tracing it raises `NothingFusedError` where no site is taken. choices:
    `ops`, `skip` and `allow` of `fuse`.
    """

    def __init__(self, fn: Callable[..., Any], **choices: Any):
        self.function = _jitted_alike(fuse(fn, report=self._found, **choices), fn)
        self._report: Report | None = None

    def _found(self, report: Report) -> None:
        self._report = report
        if not report.taken and not report.undifferentiated:
            raise NothingFusedError(report)

    @property
    def sites(self) -> tuple[SiteRecord, ...]:
        """Returns the sites taken, left to XLA and refused; none before the function is traced."""
        return () if self._report is None else site_records(self._report)


def _jitted_alike(fused: Callable[..., Any], fn: Callable[..., Any]) -> Callable[..., Any]:
    """Jits `fused` with the static and donated arguments that `fn` is jitted with, if it is."""
    given = getattr(fn, "_jit_info", None)
    if given is None:
        return fused
    names = ("static_argnums", "static_argnames", "donate_argnums", "donate_argnames")
    return jax.jit(fused, **{name: getattr(given, name) for name in names})


def site_records(report: Report) -> tuple[SiteRecord, ...]:
    """Returns the sites of a report as records of a comparison, those taken first."""
    taken = [
        SiteRecord(operation=site.operation, source=site.where, outcome="taken", implementation=site.implementation)
        for site in report.taken
    ]

    def others(outcome: Literal["left to XLA", "refused"], sites: Sequence[SiteLeft]) -> list[SiteRecord]:
        return [
            SiteRecord(operation=site.operation, source=site.where, outcome=outcome, reason=site.reason)
            for site in sites
        ]

    return (*taken, *others("left to XLA", report.left), *others("refused", report.refused))
