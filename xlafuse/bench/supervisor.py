"""Runs a benchmark in a process of its own and starts a new one if it dies.

One process measures all operations or calls, since starting JAX and PyTorch takes many seconds; but each case of a
block or model has its own, because its wall clock must be taken before CUPTI is in use. An illegal access, a deadlock
or a crash of a kernel ends the process; the next one continues with the next operation. The supervisor itself uses no
GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from itertools import count
from multiprocessing import get_context
from pathlib import Path
from threading import Lock, Thread
from typing import Any

from xlafuse.bench import worker
from xlafuse.bench.environment import Environment
from xlafuse.bench.results import Results, Run, ShapeResult, merge, write
from xlafuse.bench.worker import BenchError

_ALONE = ("block", "model", "public")
"""Benchmarks whose cases have a process each; of those of public models, several compile at the same time."""


def run(
    items: Sequence[str],
    settings: Any,
    output: Path,
    *,
    benchmark: str = "kernels",
    stall_seconds: float = 240.0,
    measure: Callable[..., None] = worker.main,
    kept: Callable[[Results], None] = lambda _: None,
) -> Results:
    """Measures operations and writes `output` after every shape.

    Args:
        items: names in `pallas_kernels.REGISTRY`; cases such as "forward 2x4096" for the block and model benchmarks,
            "gradient fsdp 4x4096" for the mesh benchmark, "llama train" for public models; calls such as "attention 7"
            for the choice benchmark.
        settings: those of `xlafuse.bench.settings` for the benchmark.
        output: the JSON file.
        benchmark: "kernels", "block", "choice", "mesh", "model" or "public".
        stall_seconds: how long a process may go without a new result before it is killed.
        measure: what the process runs; see `xlafuse.bench.worker.main`.
        kept: called with all results after each write.

    Raises:
        BenchError: the process refused the request, or died before it measured anything.
    """
    runs: dict[int, Run] = {}
    numbers, lock = count(), Lock()

    def results_of() -> Results:
        return merge([Results(runs=tuple(run for _, run in sorted(runs.items())))])

    def measured(begun: Sequence[str]) -> str | None:
        """Measures items in one process; returns the one that it died of, if it did."""
        with lock:
            number = next(numbers)

        def keep(latest: Run) -> None:
            with lock:
                runs[number] = latest
                results = results_of()
                if results.shapes:
                    write(output, results)
                    kept(results)

        found, died = _measured(measure, benchmark, begun, settings, stall_seconds, keep)
        with lock:
            runs[number] = found
        return died

    remaining = list(items)
    jobs = settings.jobs if benchmark == "public" else 1
    refusals: list[BenchError] = []

    def measured_beside_others(item: str) -> None:
        try:
            measured([item])
        except BenchError as error:
            refusals.append(error)

    while remaining:
        if benchmark in _ALONE:
            threads = [Thread(target=measured_beside_others, args=(item,)) for item in remaining[:jobs]]
            for act in (Thread.start, Thread.join):
                for thread in threads:
                    act(thread)
            if refusals:
                raise refusals[0]
            remaining = remaining[jobs:]
        else:
            died = measured(remaining)
            remaining = [] if died is None else remaining[remaining.index(died) + 1 :]
    results = results_of()
    if not results.shapes:
        details = "; ".join(note for run in runs.values() for note in run.left_out)
        raise BenchError(f"nothing was measured: {details or 'no shape has such a name, phase or operation'}")
    write(output, results)
    return results


def _measured(
    measure: Callable[..., None],
    benchmark: str,
    items: Sequence[str],
    settings: Any,
    stall_seconds: float,
    keep: Callable[[Run], None],
) -> tuple[Run, str | None]:
    """Measures items in one process; returns what it measured, and the item that it died of, if it did."""
    context = get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=measure, args=(sender, benchmark, items, settings))
    process.start()
    sender.close()
    run, item = None, None
    ended = f"was ended after {stall_seconds:.0f} s without a result"
    try:
        while receiver.poll(stall_seconds):
            match receiver.recv():
                case BenchError() as error:
                    raise error
                case Environment() as found:
                    # Folders are this machine's.
                    kept = {name: value for name, value in asdict(settings).items() if not isinstance(value, Path)}
                    given = {name: None if value == float("inf") else value for name, value in kept.items()}
                    started = datetime.now(UTC).isoformat(timespec="seconds")
                    run = Run(started=started, environment=found, settings=given)
                case ("begun", item):
                    pass
                case ShapeResult() as shape if run is not None:
                    run = replace(run, shapes=(*run.shapes, shape))
                    keep(run)
                case str() as note if run is not None:
                    run = replace(run, left_out=(*run.left_out, note))
    except EOFError:
        process.join()
        ended = f"ended with exit code {process.exitcode}" if process.exitcode else None
    finally:
        process.kill()
        process.join()
        receiver.close()
    if run is None or (ended and item is None):
        raise BenchError(f"the measuring process {ended or 'ended'} before it began; its own output is above")
    if ended:
        run = replace(run, left_out=(*run.left_out, f"{item}: the measuring process {ended}"))
    return run, item if ended else None
