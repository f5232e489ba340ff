"""Measures blocks on the attached GPU launch by launch, for the reports of machines without one.

    python scripts/record_measured.py -o OUT [PRESET/SHAPE/MODE ...]

Each strategy of each case is compiled with the autotuning that ships for the GPU, so that what is measured is the
program of the reports, and then run. OUT/<GPU>/<preset>-<shape>-<mode>.json is one case, for `xlafuse/recordings/`.
"""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # the machine with the GPU need not have the package installed

CASES = tuple(
    f"llama3-8b/{case}"
    for case in ("2x4096/forward", "2x4096/grad", "1x512/forward", "1x1/forward", "16x1/forward", "1x512/grad")
)
STRATEGIES = ("xla", "best", "xla_cudnn")


def line(name: str, analysis: Any) -> str:
    """One line of the table: times, and how many launches have one."""
    measured = analysis.measured
    if measured is None or measured.kernel_us is None:
        notes = measured.notes if measured else analysis.provenance.notes
        return f"{name:37} NOT MEASURED {notes[-1] if notes else ''}"
    timed = sum(launch.measured_us is not None for launch in analysis.launches)
    return (
        f"{name:37} kernels {measured.kernel_us:9.1f} us  gaps {measured.gap_us:7.1f}  wall "
        f"{measured.wall_us:9.1f}  roofline {analysis.roofline_us:9.1f}  {timed}/{len(analysis.launches)} launches  "
        f"{measured.calls} calls  {' '.join(measured.notes)}"
    )


def record(case: str, output: Path) -> int:
    """Measures a case under each strategy and writes its file; returns how many were not measured."""
    from hlo_analysis import load_target
    from xlafuse import compare
    from xlafuse.bench.block import batch_and_length
    from xlafuse.measurements import file_name, measurements_of, to_json

    preset, shape, mode = case.split("/")
    comparison = compare(
        preset,
        batch_and_length(shape),
        strategies=STRATEGIES,
        mode="grad" if mode == "grad" else "forward",
        target="attached",
        numerics=False,
        measure=True,
        autotune=load_target("h200").autotune,
    )
    for result in comparison.strategies:
        name = f"{case:26} {result.name}"
        print(line(name, result.analysis) if result.analysis else f"{name:37} FAILED {result.error}", flush=True)
    found = measurements_of(comparison)
    timed = {name: each for name, each in found.strategies.items() if each.kernel_us is not None}
    for each in timed.values():
        file = output / file_name(preset, shape, mode, each.device)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(to_json(replace(found, title=case, strategies=timed)), encoding="utf-8")
    return len(comparison.strategies) - len(timed)


def main() -> int:
    """Measures the cases; 1 when a strategy was not measured."""
    parser = argparse.ArgumentParser(description="Measure blocks launch by launch.")
    parser.add_argument("cases", nargs="*", default=CASES, metavar="PRESET/SHAPE/MODE")
    parser.add_argument("-o", "--output", type=Path, required=True)
    options = parser.parse_args()
    os.environ["JAX_PLATFORMS"] = "cpu"  # tracing needs no GPU, and would take memory of the measured program's
    return int(sum(record(case, options.output) for case in options.cases) > 0)


if __name__ == "__main__":
    raise SystemExit(main())
