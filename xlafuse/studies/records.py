"""Records of a study, and their JSON: the claims, the counted and measured rows, and the conclusions."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from pydantic import TypeAdapter

from xlafuse.bench.environment import Environment
from xlafuse.errors import XlafuseError
from xlafuse.files import read_record

SCHEMA_VERSION = 1

Basis = Literal["counted", "measured"]
Verdict = Literal["holds", "holds in part", "does not hold", "not comparable", "not measured"]


class StudyError(XlafuseError, ValueError):
    """A file of study results cannot be read or merged; the message names the file and the reason."""


@dataclass(frozen=True)
class Claim:
    """A published statement. source: the title of its document."""

    text: str
    published: str
    source: str


@dataclass(frozen=True, kw_only=True)
class Row:
    """One variant of one case.

    values: quantities by name. us, p20_us, p80_us and wall_us are microseconds; launches is a count; bytes is HBM
        traffic; temp_bytes and peak_bytes are memory. A study may add others.
    """

    case: str
    variant: str
    values: Mapping[str, float]
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Part:
    """The rows of one run.

    target: the GPU that the run compiled for or ran on.
    left_out: what gave no row, with the reason.
    """

    basis: Basis
    target: str
    started: str
    rows: tuple[Row, ...]
    environment: Environment | None = None
    left_out: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class StudyResult:
    """Counted and measured rows of a study."""

    study: str
    parts: tuple[Part, ...]
    schema_version: int = field(default=SCHEMA_VERSION)

    def value(self, case: str, variant: str, quantity: str) -> float:
        """Returns a quantity of a variant, the last one if it was measured more than once; NaN if there is none."""
        found = [
            row.values[quantity]
            for row in self.rows
            if (row.case, row.variant) == (case, variant) and quantity in row.values
        ]
        return found[-1] if found else math.nan

    def ratio(self, case: str, variant: str, over: str, quantity: str = "us") -> float:
        """Returns the quantity of `over` divided by that of `variant`; for times, the speed-up of `variant`."""
        return self.value(case, over, quantity) / self.value(case, variant, quantity)

    @property
    def rows(self) -> tuple[Row, ...]:
        """The rows of all parts."""
        return tuple(row for part in self.parts for row in part.rows)

    @property
    def cases(self) -> tuple[str, ...]:
        """The names of the cases, each once, in the order of the part that has the most."""
        of_parts = [dict.fromkeys(row.case for row in part.rows) for part in self.parts]
        return tuple(dict.fromkeys(case for cases in sorted(of_parts, key=len, reverse=True) for case in cases))

    def variants(self, case: str) -> tuple[str, ...]:
        """Returns the names of a case's variants, each once."""
        return tuple(dict.fromkeys(row.variant for row in self.rows if row.case == case))

    def has(self, *quantities: str) -> bool:
        """Tells whether some row has one of the quantities."""
        return any(quantity in row.values for row in self.rows for quantity in quantities)


@dataclass(frozen=True, kw_only=True)
class Finding:
    """Our verdict on one claim. reason: why our figure differs, "" if it does not."""

    ours: str
    verdict: Verdict
    reason: str = ""


@dataclass(frozen=True, kw_only=True)
class Conclusion:
    """Three sentences computed from the rows, and a finding for each claim, in order."""

    sentences: tuple[str, str, str]
    findings: tuple[Finding, ...]


@dataclass(frozen=True, kw_only=True)
class Study:
    """A published claim as a program.

    count: yields the rows of a target without a GPU, by compiling and counting or from committed recordings.
    time: yields the rows of the attached GPU; None if there is nothing to time. Both yield a str for what they leave
        out.
    conclude: derives sentences and findings from the rows.
    quantity: the quantity in the plot, with its label.
    cases: the cases of a comparison (`xlafuse.studies.variants.Case`), for their counters.
    """

    name: str
    title: str
    claims: tuple[Claim, ...]
    count: Callable[[str], Iterable[Row | str]]
    conclude: Callable[[StudyResult], Conclusion]
    time: Callable[[], Iterable[Row | str]] | None = None
    quantity: tuple[str, str] = ("us", "µs")
    cases: Callable[[], Sequence[Any]] = tuple


_RESULT = TypeAdapter(StudyResult)


def load(path: Path) -> StudyResult:
    """Loads the text of `to_json`; raises StudyError if it is none, or has another schema version."""
    return read_record(path, _RESULT, SCHEMA_VERSION, "the result of a study", StudyError)


def merged(results: Sequence[StudyResult]) -> StudyResult:
    """Merges results of one study; of parts with the same basis and target, the last one counts.

    Raises:
        StudyError: the results are of different studies.
    """
    names = sorted({result.study for result in results})
    if len(names) != 1:
        raise StudyError(f"expected results of one study, got {', '.join(names) or 'none'}")
    parts: dict[Any, Part] = {}
    for part in (part for result in results for part in result.parts):
        variants = frozenset((row.case, row.variant) for row in part.rows) if part.basis == "measured" else None
        parts[part.basis, part.target, variants] = part
    return replace(results[-1], parts=tuple(parts.values()))
