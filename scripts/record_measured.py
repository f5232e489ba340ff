"""Measures blocks on the attached GPU launch by launch, for the reports of machines without one.

    python scripts/record_measured.py -o OUT [--seconds 300] [--only llama3-8b/2x4096/forward ...] [--strategies A,B]

Each strategy of each case is compiled with the autotuning that ships for the GPU, so that what is measured is the
program of the reports, and then run. OUT/<GPU>/<preset>-<shape>-<mode>.json is one case, for `xlafuse/recordings/`;
it is written again after every strategy, so that a run cut short keeps what it has.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # the machine with the GPU need not have the package installed

CASES = tuple(
    f"llama3-8b/{case}"
    for case in ("2x4096/forward", "2x4096/grad", "1x512/forward", "1x1/forward", "16x1/forward", "1x512/grad")
)
STRATEGIES = ("xla", "best", "xla_cudnn")


def measured(case: str, strategy: str) -> Any:
    """The analysis of one strategy, compiled for the attached GPU and run."""
    from hlo_analysis import analyze, capture, load_target
    from xlafuse.bench.block import batch_and_length
    from xlafuse.models import block_function
    from xlafuse.strategies import get_strategy

    preset, shape, mode = case.split("/")
    found = get_strategy(strategy)
    function, arguments = block_function(preset, batch_and_length(shape), plan=found.plan)
    captured = capture(
        found.rewritten(function),
        *arguments,
        target="attached",
        mode="grad" if mode == "grad" else "forward",
        compiler_options=found.compiler_options,
        autotune=load_target("h200").autotune,
        label=strategy,
        measure=True,
    )
    return analyze(captured)


def line(case: str, strategy: str, analysis: Any) -> str:
    """One line of the table: times, and how many launches have one."""
    measured = analysis.measured
    if measured is None or measured.kernel_us is None:
        notes = measured.notes if measured else analysis.provenance.notes
        return f"{case:26} {strategy:10} NOT MEASURED {notes[-1] if notes else ''}"
    timed = sum(launch.measured_us is not None for launch in analysis.launches)
    return (
        f"{case:26} {strategy:10} kernels {measured.kernel_us:9.1f} us  gaps {measured.gap_us:7.1f}  wall "
        f"{measured.wall_us:9.1f}  roofline {analysis.roofline_us:9.1f}  {timed}/{len(analysis.launches)} launches  "
        f"{measured.calls} calls  {' '.join(measured.notes)}"
    )


def main() -> int:
    """Measures what fits into the time; 1 when a strategy was not measured."""
    parser = argparse.ArgumentParser(description="Measure blocks launch by launch.")
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=300.0, help="start nothing after this long")
    parser.add_argument("--only", nargs="+", default=CASES, metavar="PRESET/SHAPE/MODE")
    parser.add_argument("--strategies", default=",".join(STRATEGIES))
    options = parser.parse_args()
    # Tracing needs no GPU, and would take memory of the measured program's.
    os.environ["JAX_PLATFORMS"] = "cpu"
    from xlafuse.measurements import Measurements, file_name, to_json

    began, failed = time.perf_counter(), 0
    for case in options.only:
        found: dict[str, Any] = {}
        for strategy in options.strategies.split(","):
            if time.perf_counter() - began > options.seconds:
                print(f"{case:26} {strategy:10} left out", flush=True)
                continue
            try:
                analysis = measured(case, strategy)
            except Exception as error:  # the others are worth having
                print(f"{case:26} {strategy:10} FAILED {type(error).__name__}: {str(error)[:400]}", flush=True)
                failed += 1
                continue
            print(f"{time.perf_counter() - began:5.0f} s  {line(case, strategy, analysis)}", flush=True)
            if analysis.measured is None or analysis.measured.kernel_us is None:
                failed += 1
                continue
            found[strategy] = analysis.measured
            file = options.output / file_name(*case.split("/"), analysis.measured.device)
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(to_json(Measurements(title=case, strategies=found)), encoding="utf-8")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
