"""Records evidence of correctness on a GPU: the results of tests/gpu and of compute-sanitizer."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from xlafuse.bench.environment import commit, gpu_state
from xlafuse.bench.results import ResultsError

SCHEMA_VERSION = 1
_PLANTED = "planted fault"


@dataclass(frozen=True, kw_only=True)
class TestSummary:
    """Summary of one run of tests/gpu.

    failures: names of the failed tests, each with the first line of its message.
    """

    __test__ = False  # not a test class

    date: str
    device: str
    commit: str
    passed: int
    failed: int
    skipped: int
    seconds: float
    failures: tuple[str, ...] = ()
    schema_version: int = SCHEMA_VERSION


def summarize(report: Path) -> TestSummary:
    """Summarizes a `--junitxml` file of pytest, with this machine's GPU and this package's commit.

    Raises:
        ResultsError: the file is missing or of another kind.
    """
    try:
        suite = ElementTree.parse(report).getroot().find("testsuite")
    except (OSError, ElementTree.ParseError) as error:
        raise ResultsError(f"expected pytest's XML report at {report}: {error}") from None
    if suite is None:
        raise ResultsError(f"expected pytest's XML report at {report}, found no <testsuite> in it")
    failures, skipped = [], 0
    for case in suite.iter("testcase"):
        fault = next((found for kind in ("failure", "error") if (found := case.find(kind)) is not None), None)
        if fault is not None:
            words = fault.get("message", "").splitlines() or [""]
            failures.append(f"{case.get('name')}: {words[0][:200]}")
        skipped += case.find("skipped") is not None
    return TestSummary(
        date=f"{datetime.now(UTC):%Y-%m-%dT%H:%MZ}",
        device=gpu_state().get("gpu", ""),
        commit=commit(),
        passed=int(suite.get("tests", "0")) - len(failures) - skipped,
        failed=len(failures),
        skipped=skipped,
        seconds=round(float(suite.get("time", 0)), 1),
        failures=tuple(failures),
    )


def write_summary(path: Path, summary: TestSummary) -> None:
    """Writes the summary as JSON."""
    path.write_text(json.dumps(asdict(summary), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def load(path: Path) -> dict[str, Any] | None:
    """Loads a file of `write_summary` or `scripts/sanitize.py`; returns None if there is no file.

    Raises:
        ResultsError: the file has another schema version.
    """
    if not path.is_file():
        return None
    data = json.loads(path.read_text(encoding="utf-8"))
    if data.get("schema_version") != SCHEMA_VERSION:
        raise ResultsError(f"{path} has schema version {data.get('schema_version')!r}, expected {SCHEMA_VERSION}")
    return data


def markdown(tests: Mapping[str, Any] | None, sanitizer: Mapping[str, Any] | None) -> str:
    """Makes one or two sentences for docs/correctness.md."""
    parts = []
    if tests:
        parts.append(
            f"`tests/gpu` on one {_stamp(tests)}: {tests['passed']} passed, {tests['failed']} failed, "
            f"{tests['skipped']} skipped (`notebooks/results/gpu-tests.json`)."
        )
        parts += [f"Failed: {name}." for name in tests["failures"]]
    if sanitizer:
        parts.append(f"`compute-sanitizer` on one {_stamp(sanitizer)}: {_outcomes(sanitizer)}.")
    return " ".join(parts) or "Not run yet."


def _stamp(data: Mapping[str, Any]) -> str:
    commit_words = f", commit {data['commit']}" if data["commit"] else ""
    return f"{data['device'] or 'unnamed GPU'}, {data['date'][:10]}{commit_words}"


def _outcomes(sanitizer: Mapping[str, Any]) -> str:
    outcomes = [outcome for outcome in sanitizer["outcomes"] if outcome["operation"] != _PLANTED]
    planted = [outcome for outcome in sanitizer["outcomes"] if outcome["operation"] == _PLANTED]
    calls = sum(len(outcome["cases"]) for outcome in outcomes)
    bad = {state: [f"`{o['operation']}`" for o in outcomes if o["status"] == state] for state in ("faults", "failed")}
    text = f"memcheck over {calls} forward and backward calls of {len(outcomes)} operations "
    text += f"reports faults of {', '.join(bad['faults'])}" if bad["faults"] else "clean"
    if bad["failed"]:
        text += f" as far as the tool came (it died in other calls of {', '.join(bad['failed'])})"
    return text + ", but it did not see the planted fault" * any(o["status"] != "faults" for o in planted)
