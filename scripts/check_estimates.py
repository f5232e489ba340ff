#!/usr/bin/env python3
"""Sets estimates beside what a GPU took: of the block presets on an H200, of public models on an H100 or an H200.

Needs no GPU and about a minute:

    PYTHONPATH=. python3 scripts/check_estimates.py            # a row a strategy of each recording of the block
    PYTHONPATH=. python3 scripts/check_estimates.py --models   # a row a program of the public models
    PYTHONPATH=. python3 scripts/check_estimates.py --fit      # the medians that the constants come from
    PYTHONPATH=. python3 scripts/check_estimates.py --models --fit   # from public models, 14 CPU minutes

The constants are in `hlo_analysis/targets/efficiency.py`. They were fitted on `FIT` and `FIT_MODELS`; the other shapes
and models are held out. `scripts/public_models/record.py` makes the recordings of the models, of two layers each.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from itertools import chain, repeat
from math import log
from multiprocessing import get_context
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from hlo_analysis import Capture, analyze
from hlo_analysis.hotspots import timed
from hlo_analysis.measured import with_measured
from hlo_analysis.program.launch_kinds import EMITTERS
from hlo_analysis.records import Analysis, Comparison, Efficiency, Launch
from hlo_analysis.targets.efficiency import EFFICIENCY
from xlafuse import compare
from xlafuse.measurements import load

PRESET = "llama3-8b"
FIT = ((2, 4096, "forward"), (2, 4096, "grad"))
HELD_OUT = ((1, 512, "forward"), (1, 512, "grad"), (1, 1, "forward"), (16, 1, "forward"))
STRATEGIES = ("xla", "best", "xla_cudnn")
RECORDINGS = Path(__file__).parent / "public_models" / "recordings"
FIT_MODELS = ("bert", "e3nn", "gemma", "gpt2", "graphnet", "griffin", "lstm", "mamba2", "resnet", "s5", "vit")
TIMES = ("load_us", "repeated_us", "contended_clocks", "clocks_per_instruction")
"""Constants that are the longer the more; the others are rates and shares."""
OFF = {
    **dict.fromkeys(TIMES, 1e-9),
    **dict.fromkeys(("issued_per_clock", "blocks_per_clock", "bytes_per_clock", "column_bytes_per_clock"), 0.0),
    **dict.fromkeys(("cache_bytes_per_clock", "atomics_per_clock", "atomic_sectors_per_clock"), 0.0),
    **dict.fromkeys(("direct_flops_per_clock",), 0.0),
    **dict.fromkeys(("slow_loads", "transposed", "complex", "few_channels"), 1.0),
}
"""What turns a constant off."""
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
    far = [(launch, us) for launch, us in timed if not is_close(launch, us)]
    busy = sum(us * launch.repeat for launch, us in timed)
    return Accuracy(
        strategy=strategy,
        close=1 - sum(us * launch.repeat for launch, us in far) / busy if busy else None,
        total=analysis.estimated_us / (measured.kernel_us + (measured.gap_us or 0)),
        wall=analysis.estimated_us / measured.wall_us,
        roofline=analysis.roofline_us / measured.kernel_us,
    )


def against_xla(made: Iterable[Analysis]) -> dict[str, tuple[float, float]]:
    """By kind of launch: the share of the time where ours and XLA's estimate differ by more than 2x, and the share of
    that where ours is closer to the measured time."""
    times: dict[str, list[float]] = {}
    for analysis in made:
        for launch, us in timed_launches(analysis):
            ours, xla = launch.estimated_us, launch.xla_estimate_us
            if xla:
                total = times.setdefault(launch.kind, [0.0, 0.0, 0.0])
                differs = abs(log(ours / xla)) > log(2)
                is_closer = abs(log(ours / us)) < abs(log(xla / us))
                for place, counts in enumerate((True, differs, differs and is_closer)):
                    total[place] += us * launch.repeat * counts
    return {kind: (far / every, ours / far if far else 1.0) for kind, (every, far, ours) in times.items()}


def is_close(launch: Launch, us: float) -> bool:
    """Whether a measured time is near the estimate, or in its range where the data decides."""
    return launch.estimated_us / CLOSE <= us <= CLOSE * (launch.longest_us or launch.estimated_us)


def recordings() -> list[Path]:
    """The recorded programs of public models, in folders of the GPU that ran them."""
    return sorted(RECORDINGS.glob("*/*.zip"), key=lambda file: file.stem)


def recorded_model(file: Path, efficiency: Efficiency = EFFICIENCY) -> Analysis:
    """The analysis of a recorded program, by today's constants or others, with its measured times."""
    capture = Capture.load(file)
    device = replace(capture.manifest.device, efficiency=efficiency)
    capture.manifest = replace(capture.manifest, device=device)
    return with_measured(analyze(capture), load(file.with_suffix(".json")).strategies["xla"])


def estimated_and_measured(file: Path, efficiency: Efficiency) -> list[tuple[float, float]]:
    """The microseconds of each launch of a recorded program that has a measured time."""
    return [(launch.estimated_us, us) for launch, us in timed_launches(recorded_model(file, efficiency))]


def longest_in_common(analysis: Analysis, count: int = 5) -> int:
    """How many of the launches that take longest the estimates name, too."""
    timed = timed_launches(analysis)
    measured = sorted(timed, key=lambda item: -item[1] * item[0].repeat)[:count]
    estimated = sorted(timed, key=lambda item: -item[0].estimated_us * item[0].repeat)[:count]
    return len({launch.index for launch, _ in measured} & {launch.index for launch, _ in estimated})


def largest_is_named(analysis: Analysis, count: int = 3) -> bool:
    """Whether the hotspot furthest above its need by the measured times is one of the first by the estimates."""
    unmeasured = [replace(launch, measured_us=None) for launch in analysis.launches]
    named = [each.launches for each in timed(analysis.hotspots, unmeasured, analysis.missed)[:count]]
    return analysis.hotspots[0].launches in named


def print_models() -> None:
    """Prints a row for each recorded program of a public model, and how many meet the bars."""
    print("| program | | launches within 1.5x, by time | total | wall clock | of the longest five | largest excess |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    rows: dict[str, list[tuple[Accuracy, int, bool]]] = {"fitted": [], "held out": []}
    made: list[Analysis] = []
    for file in recordings():
        analysis = recorded_model(file)
        made.append(analysis)
        row, longest, is_named = accuracy(file.stem, analysis), longest_in_common(analysis), largest_is_named(analysis)
        use = "fitted" if file.stem.partition("-")[0] in FIT_MODELS else "held out"
        rows[use].append((row, longest, is_named))
        print(
            f"| {file.stem} | {use} | {row.close:.1%} | {row.total:.2f} | {row.wall:.2f} | {longest} "
            f"| {'among the first 3' if is_named else 'not among them'} |",
            flush=True,
        )
    for use, found in rows.items():
        walls = [max(row.wall, 1 / row.wall) for row, *_ in found]
        close = [row.close is not None and row.close >= 0.9 for row, *_ in found]
        print(
            f"{use}, of {len(found)}: {sum(wall <= 1.25 for wall in walls)} within 1.25x of the wall clock, "
            f"{sum(wall <= 1.6 for wall in walls)} within 1.6x; {sum(close)} with 90% of "
            f"their time in launches within 1.5x; {sum(longest >= 4 for _, longest, _ in found)} with four of the "
            f"longest five; {sum(named for *_, named in found)} whose largest excess is among the first three"
        )
    print("| kind | differ by more than 2x, by time | of that, ours is closer |")
    print("| --- | --- | --- |")
    for kind, (share, ours) in sorted(against_xla(made).items()):
        print(f"| {kind} | {share:.0%} | {ours:.0%} |")


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
            moved, work = launch.bytes_moved, us - reached.kernel_us
            if moved < 1e6:
                ratios["kernel_us"].append(us)
            elif launch.limiter == "memory" and launch.estimated_us <= 1.01 * moved_us(launch, analysis):
                ratios["memory"].append(moved / device.memory_bandwidth * 1e6 / work)
            elif launch.limiter == "compute" and launch.kind not in EMITTERS:
                name = "attention" if "attention" in (launch.kernel or launch.name) else "matrix"
                ratios[name].append(launch.flops / peak / reached.power * 1e6 / work)
    return {name: median(values) for name, values in ratios.items()}


def fit_models(
    files: Sequence[Path], run: Callable[..., Iterable[list[tuple[float, float]]]] = map
) -> Iterator[tuple[str, list[float]]]:
    """Yields the constants of `Efficiency` that come from public models: the values of the launches that tell them.

    run: as `map`.

    Without a constant, the launches that it decides are estimated at less than two thirds. Each tells the value with
    which its estimate would be right.
    """
    constants = [EFFICIENCY, *(replace(EFFICIENCY, **{name: off}) for name, off in OFF.items())]
    known, *others = [[*run(estimated_and_measured, files, repeat(each))] for each in constants]
    for name, made in zip(OFF, others, strict=True):
        values: list[float] = []
        least = 0.0 if name == "repeated_us" else EFFICIENCY.kernel_us
        for (with_it, us), (without, _) in zip(chain(*known), chain(*made), strict=True):
            took, estimated = us - least, with_it - least
            if took > 0 and estimated > 1.5 * max(0.0, without - least):
                ratio = estimated / took
                values.append(getattr(EFFICIENCY, name) * (1 / ratio if name in TIMES else ratio))
        yield name, values


def moved_us(launch: Launch, analysis: Analysis) -> float:
    """The estimate of a launch by its HBM traffic alone."""
    device = analysis.device
    moved = launch.bytes_moved / device.memory_bandwidth * 1e6
    return moved / device.efficiency.memory + device.efficiency.kernel_us


def main() -> int:
    """Prints the table, or the fit."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--fit", action="store_true", help="print the medians that the constants come from")
    parser.add_argument("--models", action="store_true", help="the recorded public models in place of the block")
    options = parser.parse_args()
    if options.models and options.fit:
        files = [file for file in recordings() if file.stem.partition("-")[0] in FIT_MODELS]
        with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:  # each analysis takes seconds
            for name, values in fit_models(files, pool.map):
                told = f"median {median(values):7.3f}, {min(values):.3f} to {max(values):.3f}" if values else ""
                print(f"{name:24} {len(values):3} launches {told}", flush=True)
        return 0
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
    return 0


if __name__ == "__main__":
    sys.exit(main())
