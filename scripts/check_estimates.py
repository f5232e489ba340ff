#!/usr/bin/env python3
"""Sets estimates beside what a GPU took: of the block presets on an H200, and of public models on an H100.

Needs no GPU and about a minute:

    PYTHONPATH=. python3 scripts/check_estimates.py            # a row a strategy of each recording of the block
    PYTHONPATH=. python3 scripts/check_estimates.py --models   # a row a program of the public models
    PYTHONPATH=. python3 scripts/check_estimates.py --fit      # the medians that the constants come from

The constants are in `hlo_analysis/targets/efficiency.py`. They were fitted on `FIT` and `FIT_MODELS`; the other shapes
and models are held out. `scripts/public_models/record.py` makes the recordings of the models, of two layers each.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from hlo_analysis import Capture, analyze
from hlo_analysis.measured import with_measured
from hlo_analysis.program.launch_kinds import EMITTERS
from hlo_analysis.records import Analysis, Comparison, Launch
from hlo_analysis.targets.efficiency import EFFICIENCY
from xlafuse import compare
from xlafuse.measurements import load

PRESET = "llama3-8b"
FIT = ((2, 4096, "forward"), (2, 4096, "grad"))
HELD_OUT = ((1, 512, "forward"), (1, 512, "grad"), (1, 1, "forward"), (16, 1, "forward"))
STRATEGIES = ("xla", "best", "xla_cudnn")
RECORDINGS = Path(__file__).parent / "public_models" / "recordings" / "h100"
FIT_MODELS = ("bert", "gemma", "gpt2", "graphnet")
CLOSE = 1.5
"""An estimate is close when it is at most so many times too long or too short."""


@dataclass(frozen=True, kw_only=True)
class Accuracy:
    """The estimates of one strategy beside its recording; ratios are estimated over measured."""

    strategy: str
    close: float | None
    """Share of the measured time in launches whose estimates are close; None where the program is no longer the one
    that was recorded, so that only its whole time is known."""
    total: float
    """Of all launches and the gaps between them."""
    wall: float
    """Of the same over the wall clock of one call of many in flight."""
    roofline: float
    """The roofline of all launches over their measured time, for comparison."""
    far: tuple[str, ...]
    """Launches whose estimates are not close, the longest first."""


def compared(batch: int, length: int, mode: str) -> Comparison:
    """The block under the recorded strategies, with the recording's times."""
    return compare(
        PRESET,
        (batch, length),
        strategies=STRATEGIES,
        mode="grad" if mode == "grad" else "forward",
        target="h200",
        numerics=False,
    )


def accuracy(strategy: str, analysis: Analysis) -> Accuracy:
    """How close the estimates of one strategy are."""
    measured = analysis.measured
    assert measured is not None
    assert measured.kernel_us
    assert measured.wall_us
    timed = timed_launches(analysis)
    far = [(launch, us) for launch, us in timed if not 1 / CLOSE <= launch.estimated_us / us <= CLOSE]
    busy = sum(us * launch.repeat for launch, us in timed)
    return Accuracy(
        strategy=strategy,
        close=1 - sum(us * launch.repeat for launch, us in far) / busy if busy else None,
        total=analysis.estimated_us / (measured.kernel_us + (measured.gap_us or 0)),
        wall=analysis.estimated_us / measured.wall_us,
        roofline=analysis.roofline_us / measured.kernel_us,
        far=tuple(
            f"{launch.name} ({launch.kind}) {launch.estimated_us:.1f} of {us:.1f} us"
            for launch, us in sorted(far, key=lambda item: -item[1])
        ),
    )


def recorded_model(file: Path) -> Analysis:
    """The analysis of a recorded program, by today's constants, with its measured times."""
    capture = Capture.load(file)
    device = replace(capture.manifest.device, efficiency=EFFICIENCY)
    capture.manifest = replace(capture.manifest, device=device)
    return with_measured(analyze(capture), load(file.with_suffix(".json")).strategies["xla"])


def longest_in_common(analysis: Analysis, count: int = 5) -> int:
    """How many of the launches that take longest the estimates name, too."""
    timed = timed_launches(analysis)
    measured = sorted(timed, key=lambda item: -item[1] * item[0].repeat)[:count]
    estimated = sorted(timed, key=lambda item: -item[0].estimated_us * item[0].repeat)[:count]
    return len({launch.index for launch, _ in measured} & {launch.index for launch, _ in estimated})


def print_models() -> None:
    """Prints a row for each recorded program of a public model."""
    print("| program | fitted | launches within 1.5x, by time | total | wall clock | of the longest five |")
    print("| --- | --- | --- | --- | --- | --- |")
    for file in sorted(RECORDINGS.glob("*.zip")):
        analysis = recorded_model(file)
        row = accuracy(file.stem, analysis)
        fitted = "fitted" if file.stem.partition("-")[0] in FIT_MODELS else "held out"
        print(
            f"| {file.stem} | {fitted} | {row.close:.1%} | {row.total:.2f} | {row.wall:.2f} "
            f"| {longest_in_common(analysis)} |",
            flush=True,
        )
        print(f"far off in {file.stem}: {'; '.join(row.far[:5])}", file=sys.stderr)


def timed_launches(analysis: Analysis) -> list[tuple[Launch, float]]:
    """Launches with their measured µs; without library calls in a row, which the profile cannot tell apart."""
    return [(launch, launch.measured_us) for launch in analysis.launches if launch.measured_us]


def order_is_right(comparison: Comparison) -> bool:
    """Whether the estimates rank the strategies as their measured times do."""
    done = [analysis for _, analysis in analyses(comparison)]

    def took(analysis: Analysis) -> float:
        assert analysis.measured is not None
        return (analysis.measured.kernel_us or 0) + (analysis.measured.gap_us or 0)

    return sorted(done, key=took) == sorted(done, key=lambda analysis: analysis.estimated_us)


def analyses(comparison: Comparison) -> Iterator[tuple[str, Analysis]]:
    """The strategies that have a recording."""
    for result in comparison.strategies:
        if result.analysis is not None and result.analysis.measured is not None:
            yield result.name, result.analysis


def fit(made: Iterable[Analysis]) -> dict[str, float]:
    """The constants of `Efficiency` that are medians over launches, anew."""
    ratios: dict[str, list[float]] = {"memory": [], "matrix": [], "attention": [], "kernel_us": []}
    for analysis in made:
        device = analysis.device
        reached, peak = device.efficiency, dict(device.matrix_flops)["bf16"]
        for launch, us in timed_launches(analysis):
            moved, work = launch.bytes_read + launch.bytes_written, us - reached.kernel_us
            if moved < 1e6:
                ratios["kernel_us"].append(us)
            elif launch.limiter == "memory" and launch.estimated_us <= 1.01 * moved_us(launch, analysis):
                ratios["memory"].append(moved / device.memory_bandwidth * 1e6 / work)
            elif launch.limiter == "compute" and launch.kind not in EMITTERS:
                name = "attention" if "attention" in (launch.kernel or launch.name) else "matrix"
                ratios[name].append(launch.flops / peak / reached.power * 1e6 / work)
    return {name: median(values) for name, values in ratios.items()}


def moved_us(launch: Launch, analysis: Analysis) -> float:
    """The estimate of a launch by its HBM traffic alone."""
    device = analysis.device
    moved = (launch.bytes_read + launch.bytes_written) / device.memory_bandwidth * 1e6
    return moved / device.efficiency.memory + device.efficiency.kernel_us


def main() -> int:
    """Prints the table, or the fit."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--fit", action="store_true", help="print the medians that the constants come from")
    parser.add_argument("--models", action="store_true", help="the recorded public models in place of the block")
    options = parser.parse_args()
    if options.models:
        print_models()
        return 0
    if options.fit:
        found = fit(analysis for case in FIT for _, analysis in analyses(compared(*case)))
        print("\n".join(f"{name:12} {value:.3f}" for name, value in found.items()))
        return 0
    print("| shape | mode | strategy | launches within 1.5x, by time | total | wall clock | roofline | order |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for batch, length, mode in (*FIT, *HELD_OUT):
        comparison = compared(batch, length, mode)
        right = "right" if order_is_right(comparison) else "wrong"
        for name, analysis in analyses(comparison):
            row = accuracy(name, analysis)
            print(
                f"| {batch}x{length} | {mode} | {name} | {'changed' if row.close is None else f'{row.close:.1%}'} "
                f"| {row.total:.2f} | {row.wall:.2f} "
                f"| {row.roofline:.2f} | {right} |",
                flush=True,
            )
            if row.far:
                print(f"far off in {name}: {'; '.join(row.far[:5])}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
