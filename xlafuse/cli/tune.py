"""`xlafuse tune`: options to a request."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import typer


@dataclass(frozen=True, kw_only=True)
class TuneRequest:
    """The options of one `xlafuse tune`, as typed."""

    operations: tuple[str, ...]
    match: str
    output: Path | None
    results: Path | None
    anew: bool
    rounds: int
    seconds: float


def run_tune(request: TuneRequest) -> None:
    """Carries it out.

    Raises:
        XlafuseError: an unknown operation, no GPU, or nothing to measure.
    """
    from pallas_kernels import tuning
    from xlafuse.bench import tune
    from xlafuse.bench.environment import gpu_state
    from xlafuse.bench.kernels import NoGpuError, Settings
    from xlafuse.bench.results import load
    from xlafuse.errors import UnknownNameError

    known = tune.tunable()
    for name in request.operations:
        if name not in known:
            raise UnknownNameError("tuned operation", name, known)
    if request.results is not None:
        kept = load(request.results)
        kind = kept.runs[0].environment.device_kind
    else:
        kept, kind = None, gpu_state().get("gpu")  # JAX's name too, but asking JAX would take the worker's memory
    if kind is None:
        raise NoGpuError("xlafuse tune measures on an attached NVIDIA GPU, and nvidia-smi names none here.")
    table = request.output or tuning.cache_folder() / tuning.file_name(kind)
    if kept is not None:
        tuning.add(table, kind, tune.entries(kept, request.operations or known))
    else:
        settings = Settings(match=request.match, rounds=request.rounds, seconds=request.seconds)
        log = table.with_suffix(".log.json")
        tune.run(request.operations or known, settings, table, log, device_kind=kind, anew=request.anew)
    for line in tune.lines(tuning.read(table, kind)):
        typer.echo(line)
    typer.echo(f"wrote {table}")
