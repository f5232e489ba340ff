"""`xlafuse bench`: options to a request."""

from __future__ import annotations

import time
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
    from xlafuse.bench.kernels import Settings, check_match
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
    check_match(request.operations or tuple(REGISTRY), request.match)
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


@dataclass(frozen=True, kw_only=True)
class BlockRequest:
    """The options of one `xlafuse bench block`, as typed."""

    preset: str
    shapes: tuple[str, ...]
    strategies: tuple[str, ...]
    modes: tuple[str, ...]
    peers: tuple[str, ...]
    rounds: int
    seconds: float
    output: Path


def run_block(request: BlockRequest) -> bool:
    """Carries it out; returns whether every strategy that this block can have was measured.

    Raises:
        XlafuseError: an unknown name, no GPU, or nothing measured.
    """
    from xlafuse.bench import block, block_lines, supervisor
    from xlafuse.cli.inputs import block_shape
    from xlafuse.errors import UnknownNameError
    from xlafuse.models import get_preset
    from xlafuse.strategies import STRATEGIES, get_strategy

    get_preset(request.preset)
    shapes = ["x".join(map(str, block_shape((text,)))) for text in request.shapes]
    strategies = request.strategies or tuple(STRATEGIES)
    for name in strategies:
        get_strategy(name)
    for names, known, what in ((request.modes, block.MODES, "mode"), (request.peers, block.PEERS, "peer")):
        for name in names:
            if name not in known:
                raise UnknownNameError(what, name, known)
    settings = block.BlockSettings(
        preset=request.preset,
        strategies=strategies,
        modes=request.modes or block.MODES,
        peers=request.peers,
        rounds=request.rounds,
        seconds=request.seconds,
    )
    results = supervisor.run(shapes, settings, request.output, benchmark="block", stall_seconds=200.0)
    for line in block_lines.summary_lines(results):
        typer.echo(line)
    typer.echo(f"wrote {request.output}")
    failed = [p for s in results.shapes for p in s.problems if p.kind == "failed" and p.candidate in strategies]
    return not failed and not any(run.left_out for run in results.runs)


@dataclass(frozen=True, kw_only=True)
class ChoiceRequest:
    """The options of one `xlafuse bench choice`, as typed."""

    operations: tuple[str, ...]
    modes: tuple[str, ...]
    count: int
    numbers: tuple[str, ...]
    seed: int
    rounds: int
    seconds: float
    output: Path


def run_choice(request: ChoiceRequest) -> bool:
    """Carries it out; returns whether every call was measured, and none is below the bar.

    Raises:
        XlafuseError: an unknown name, no GPU, or nothing measured.
    """
    from pallas_kernels import REGISTRY
    from xlafuse.bench import choice, choice_lines, supervisor
    from xlafuse.cli.errors import InputError
    from xlafuse.errors import UnknownNameError

    for names, known, what in ((request.operations, REGISTRY, "operation"), (request.modes, choice.MODES, "mode")):
        for name in names:
            if name not in known:
                raise UnknownNameError(what, name, known)
    for number in request.numbers:
        if not number.isdecimal():
            raise InputError(f"expected numbers of calls with commas between, as 3,17, got {number!r}")
    settings = choice.ChoiceSettings(
        modes=request.modes or choice.MODES,
        rounds=request.rounds,
        seed=request.seed,
        until=time.time() + request.seconds,
    )
    numbers = [int(number) for number in request.numbers] or range(request.count)
    calls = dict.fromkeys(f"{name} {number}" for name in request.operations or REGISTRY for number in numbers)
    results = supervisor.run(tuple(calls), settings, request.output, benchmark="choice")
    for line in choice_lines.summary_lines(results):
        typer.echo(line)
    typer.echo(f"wrote {request.output}")
    return choice.is_kept(results)
