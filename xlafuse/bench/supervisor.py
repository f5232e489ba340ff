"""Runs a benchmark in a worker process and starts a new one if it dies.

One worker measures all operations or calls, since starting JAX and PyTorch takes many seconds; but each case of a block
or model has a worker of its own, because its wall clock must be taken before CUPTI is in use. An illegal access, a
deadlock or a crash of a kernel ends the worker; the next one continues with the next operation. The supervisor itself
uses no GPU.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from xlafuse.bench import ptxas
from xlafuse.bench.results import Results, load, merge, write
from xlafuse.errors import XlafuseError

_POLL_SECONDS = 0.2
_ALONE = ("block", "model")
"""Benchmarks whose cases have a process each."""
_PYTORCH_PEERS = ("torch", "liger", "fa4", "quack")
"""Prefixes of the names of peers that run in PyTorch."""
WORKER = (sys.executable, "-m", "xlafuse.bench.worker")


class BenchError(XlafuseError, RuntimeError):
    """Nothing could be measured; the message gives the reason."""


def worker_environment(settings: Any, environment: Mapping[str, str]) -> dict[str, str]:
    """Returns the environment variables of a worker.

    If PyTorch runs beside JAX, JAX must not preallocate the memory. If the worker times a kernel's configurations,
    ptxas reports the spills and serialized products of each.
    """
    added = {}
    if any(name.startswith(_PYTORCH_PEERS) for name in getattr(settings, "peers", ())):
        added["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    if getattr(settings, "variants", False):
        added[ptxas.VARIABLE] = "1"
    return {**added, **environment}


def run(
    operations: Sequence[str],
    settings: Any,
    output: Path,
    *,
    benchmark: str = "kernels",
    stall_seconds: float = 240.0,
    worker: Sequence[str] = WORKER,
    kept: Callable[[Results], None] = lambda _: None,
) -> Results:
    """Measures operations and writes `output` after every shape.

    Args:
        operations: names in `pallas_kernels.REGISTRY`; cases such as "forward 2x4096" for the block and model
            benchmarks, "gradient fsdp 4x4096" for the mesh benchmark; calls such as "attention 7" for the choice
            benchmark.
        settings: those of `xlafuse.bench.settings` for the benchmark.
        output: the JSON file.
        benchmark: "kernels", "block", "choice", "mesh" or "model".
        stall_seconds: how long a worker may go without a new result before it is killed.
        worker: the command, which gets a folder as its last argument.
        kept: called with all results after each write.

    Raises:
        BenchError: the worker refused the request, or died before it measured anything.
    """
    parts: list[Results] = []
    notes: list[str] = []
    remaining = list(operations)
    while remaining:
        with tempfile.TemporaryDirectory(prefix="xlafuse-bench-") as name:
            folder = Path(name)
            begun = remaining[:1] if benchmark in _ALONE else remaining
            request = {"benchmark": benchmark, "operations": begun, "settings": asdict(settings)}
            (folder / "request.json").write_text(json.dumps(request), encoding="utf-8")
            keep = partial(_keep, output, parts, kept)
            ended = _run_worker([*worker, name], folder, settings, keep, stall_seconds)
            if (folder / "error.txt").is_file():
                raise BenchError((folder / "error.txt").read_text(encoding="utf-8"))
            if (folder / "results.json").is_file():
                parts.append(load(folder / "results.json"))
            progress = folder / "progress.txt"
            current = progress.read_text(encoding="utf-8") if progress.is_file() else None
        if ended is None:
            remaining = remaining[len(begun) :]
            continue
        if current is None:
            raise BenchError(f"the measuring process {ended} before it began; its own output is above")
        notes.append(f"{current}: the measuring process {ended}")
        remaining = remaining[remaining.index(current) + 1 :]
    results = merge(parts)
    if not results.shapes:
        reasons = [*notes, *(note for run in results.runs for note in run.left_out)]
        details = "; ".join(reasons) or "no shape has such a name, phase or operation"
        raise BenchError(f"nothing was measured: {details}")
    results = _with_notes(results, notes)
    write(output, results)
    return results


def _keep(output: Path, parts: Sequence[Results], kept: Callable[[Results], None], latest: Path) -> None:
    results = merge([*parts, load(latest)])
    write(output, results)
    kept(results)


def _with_notes(results: Results, notes: Sequence[str]) -> Results:
    *first, last = results.runs
    return replace(results, runs=(*first, replace(last, left_out=(*last.left_out, *notes))))


def _run_worker(
    command: Sequence[str], folder: Path, settings: Any, keep: Callable[[Path], None], stall_seconds: float
) -> str | None:
    """Runs a worker to its end and keeps each new result; returns how it ended, or None if it went well."""
    process = subprocess.Popen(command, env=worker_environment(settings, os.environ))
    results = folder / "results.json"
    last, seen = time.monotonic(), 0
    try:
        while True:
            code = process.poll()
            written = results.stat().st_mtime_ns if results.is_file() else 0
            if written != seen:
                last, seen = time.monotonic(), written
                keep(results)
            if code is not None:
                return None if code == 0 else f"ended with exit code {code}"
            if time.monotonic() - last > stall_seconds:
                return f"was ended after {stall_seconds:.0f} s without a result"
            time.sleep(_POLL_SECONDS)
    finally:
        process.kill()
        process.wait()
