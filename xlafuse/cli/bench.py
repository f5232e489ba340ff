"""`xlafuse bench`: options to a request."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import typer


@dataclass(frozen=True, kw_only=True)
class KernelRequest:
    """The options of one `xlafuse bench kernels`, as typed."""

    operations: tuple[str, ...]
    phases: tuple[str, ...]
    match: str
    peers: tuple[str, ...]
    peer_bytes: int
    variants: bool
    rounds: int
    seconds: float
    output: Path


def run_kernels(request: KernelRequest) -> bool:
    """Carries it out; returns whether everything that is ours was measured.

    Raises:
        XlafuseError: an unknown name, no GPU, or nothing measured.
    """
    from pallas_kernels import REGISTRY
    from xlafuse.bench import peers, supervisor
    from xlafuse.bench.kernels import Settings
    from xlafuse.bench.lines import summary_lines
    from xlafuse.bench.results import PHASES
    from xlafuse.errors import UnknownNameError

    for name in request.operations:
        if name not in REGISTRY:
            raise UnknownNameError("operation", name, REGISTRY)
    for phase in request.phases:
        if phase not in PHASES:
            raise UnknownNameError("phase", phase, PHASES)
    peers.check_names(request.peers)
    settings = Settings(
        phases=request.phases or PHASES,
        match=request.match,
        peers=tuple(name for name in request.peers if name != "xla"),
        peer_bytes=request.peer_bytes,
        variants=request.variants,
        rounds=request.rounds,
        seconds=request.seconds,
    )
    results = supervisor.run(request.operations or tuple(REGISTRY), settings, request.output)
    for line in summary_lines(results):
        typer.echo(line)
    typer.echo(f"wrote {request.output}")
    ours = {"xla", "mosaic", "triton"}
    failed = [p for shape in results.shapes for p in shape.problems if p.kind == "failed" and p.candidate in ours]
    return not failed and not any(run.left_out for run in results.runs)
