"""Kept benchmark results: merged, shown, and written into README and docs/ between markers.

scripts/write_results.py                        # the tables, from notebooks/results
scripts/write_results.py --merge A B C -o FILE  # one file of several; the last measurement of a shape counts
scripts/write_results.py --show FILE             # as the benchmark printed them
scripts/write_results.py --tests XML -o FILE    # a summary of pytest's --junitxml report
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from xlafuse.bench.block_tables import block_details, block_overview, model_table
from xlafuse.bench.environment import commit, gpu_state
from xlafuse.bench.results import ResultsError, load, merge, write
from xlafuse.bench.tables import details, overview, place, summary
from xlafuse.bench.text import result_lines
from xlafuse.bench.text import summary as text_summary

ROOT = Path(__file__).resolve().parents[1]
README, DOCS = ROOT / "README.md", ROOT / "docs"
PAGES = (README, *(DOCS / f"{name}.md" for name in ("results", "correctness")))
KEPT = ROOT / "notebooks/results/kernels-h200.json"
SANITIZER = KEPT.with_name("sanitizer-h200.json")
TESTS = KEPT.with_name("gpu-tests.json")
_FAULTS = ("failure", "error")


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--merge", nargs="+", type=Path, metavar="FILE")
    parser.add_argument("-o", "--output", type=Path, default=KEPT)
    parser.add_argument("--show", type=Path, metavar="FILE")
    parser.add_argument("--tests", type=Path, metavar="XML")
    options = parser.parse_args(argv)
    try:
        if options.merge:
            merged = merge([load(path) for path in options.merge])
            write(options.output, merged)
            print(f"wrote {options.output}: {len(merged.shapes)} shapes of {len(merged.runs)} runs")
            return 0
        if options.show:
            results = load(options.show)
            print("\n".join(line for shape in results.shapes for line in result_lines(shape)))
            print("\n".join(text_summary(results)))
            return 0
        if options.tests:
            counts = tests_summary(options.tests)
            options.output.write_text(json.dumps(counts, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
            print(f"{counts['passed']} passed, {counts['failed']} failed, {counts['skipped']} skipped")
            return 0
        for path, text in placed({path: path.read_text(encoding="utf-8") for path in PAGES}).items():
            path.write_text(text, encoding="utf-8")
    except ResultsError as error:
        print(f"write_results.py: {error}", file=sys.stderr)
        return 2
    return 0


def placed(pages: Mapping[Path, str]) -> dict[Path, str]:
    """The pages with the text between their markers replaced."""
    results = load(KEPT)
    of_h100 = load(KEPT.with_name("kernels-h100.json"))
    blocks = [load(path) for path in sorted(KEPT.parent.glob("block-*.json"), reverse=True)]
    models = [load(path) for path in sorted(KEPT.parent.glob("model-*.json"), reverse=True)]
    tables = {
        README: {"summary": summary(results)},
        DOCS / "results.md": {
            "results": f"{overview(results)}\n\n{details(results)}",
            "h100": overview(of_h100),
            "block": "\n\n".join(f"{block_overview(block)}\n\n{block_details(block)}" for block in blocks)
            or "Not measured yet.",
            "models": "\n\n".join(map(model_table, models)) or "Not measured yet.",
        },
        DOCS / "correctness.md": {"checks": checks(TESTS, SANITIZER)},
    }
    made = dict(pages)
    for path, of_page in tables.items():
        for marker, table in of_page.items():
            made[path] = place(made[path], table, marker)
    return made


def tests_summary(report: Path) -> dict[str, Any]:
    """Summarizes a `--junitxml` file of pytest, with this machine's GPU and this package's commit."""
    try:
        suite = next(ElementTree.parse(report).iter("testsuite"))
    except (OSError, ElementTree.ParseError, StopIteration) as error:
        raise ResultsError(f"expected pytest's XML report at {report}: {error!r}") from None
    faults = {case.get("name"): fault for case in suite.iter("testcase") for fault in case if fault.tag in _FAULTS}
    skipped = sum(1 for _ in suite.iter("skipped"))
    return {
        "date": f"{datetime.now(UTC):%Y-%m-%dT%H:%MZ}",
        "device": gpu_state().get("gpu", ""),
        "commit": commit(),
        "passed": int(suite.get("tests", "0")) - len(faults) - skipped,
        "failed": len(faults),
        "skipped": skipped,
        "seconds": round(float(suite.get("time", 0)), 1),
        "failures": [
            f"{name}: {fault.get('message', '').partition(chr(10))[0][:200]}" for name, fault in faults.items()
        ],
        "schema_version": 1,
    }


def checks(tests: Path, sanitizer: Path) -> str:
    """Makes the sentences of docs/correctness.md of the kept files of `--tests` and `sanitize.py`, where there are."""
    parts = []
    for path in filter(Path.is_file, (tests, sanitizer)):
        found = json.loads(path.read_text(encoding="utf-8"))
        at = f"on one {found['device'] or 'unnamed GPU'}, {found['date'][:10]}"
        at += f", commit {found['commit']}" if found["commit"] else ""
        if path == tests:
            counts = ", ".join(f"{found[name]} {name}" for name in ("passed", "failed", "skipped"))
            parts.append(f"`tests/gpu` {at}: {counts} (`notebooks/results/gpu-tests.json`).")
            parts += [f"Failed: {name}." for name in found["failures"]]
            continue
        *ours, planted = sorted(found["outcomes"], key=lambda outcome: outcome["operation"] == "planted fault")
        calls = sum(len(outcome["cases"]) for outcome in ours)
        bad = {state: ", ".join(f"`{outcome['operation']}`" for outcome in ours if outcome["status"] == state)
               for state in ("faults", "failed")}  # fmt: skip
        told = f"reports faults of {bad['faults']}" if bad["faults"] else "clean"
        told += f" as far as the tool came (it died in other calls of {bad['failed']})" if bad["failed"] else ""
        told += "" if planted["status"] == "faults" else ", but it did not see the planted fault"
        told = f"memcheck over {calls} forward and backward calls of {len(ours)} operations {told}"
        parts.append(f"`compute-sanitizer` {at}: {told}.")
    return " ".join(parts) or "Not run yet."


if __name__ == "__main__":
    sys.exit(main())
