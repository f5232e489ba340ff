"""Loads the saved program of a command, or compiles one under one strategy."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from xlafuse.cli.errors import InputError

if TYPE_CHECKING:
    from hlo_analysis.capture import Capture
    from hlo_analysis.records import Analysis, Comparison

FUSED = "fused"
"""The strategy that applies `xlafuse.fuse` to a function."""

DEFAULT_TARGET = "h200"
# JAX uses these files to decide whether there is an NVIDIA GPU.
_NVIDIA_DEVICES = ("/dev/nvidia0", "/dev/nvidiactl", "/dev/dxg")


class Mode(StrEnum):
    """Which function of the program is compiled."""

    forward = "forward"
    grad = "grad"


FN = typer.Option(metavar="MODULE:FUNCTION", help="A JAX function, given as package.module:name or file.py:name.")
Args = Annotated[
    str | None,
    typer.Option(
        metavar="MODULE:FACTORY",
        help="For arguments that are trees: a function that returns them as a tuple of arrays or jax.ShapeDtypeStruct.",
    ),
]
Target = Annotated[
    str,
    typer.Option(
        metavar="TARGET", help="GPU to compile for: a name from `xlafuse targets`, or the path of a target config."
    ),
]


@dataclass(frozen=True, kw_only=True)
class Source:
    """A program to compile, as typed: a block, or a function with its arguments."""

    fn: Annotated[str | None, FN] = None
    shape: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SHAPE",
            help="For a block: BATCHxLENGTH, such as 2x4096. For a function: one for each argument, such as "
            "'bf16[8192,4096]' or 'f32[]'.",
        ),
    ] = None
    args: Args = None
    block: Annotated[
        str | None,
        typer.Option(
            metavar="PRESET",
            help="A transformer block: llama3-8b, gpt2-medium, mixtral-8x7b, qwen3-30b-a3b, tiny.",
        ),
    ] = None
    mode: Annotated[
        Mode, typer.Option(help="forward: the program itself; grad: with the gradients of a training step.")
    ] = Mode.forward
    target: Target = DEFAULT_TARGET
    timeout: Annotated[float, typer.Option(metavar="SECONDS", help="Time limit of one compilation.")] = 300.0


@dataclass(frozen=True, kw_only=True)
class Program(Source):
    """One program, as typed: a saved one, or one to compile under one strategy."""

    capture: Annotated[
        str | None,
        typer.Option(
            metavar="PATH",
            help="Read this instead of compiling: a saved capture, a folder that xla_dump_to wrote, or a "
            "report.json (report.json:STRATEGY for a strategy other than its baseline).",
        ),
    ] = None
    strategy: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="How to compile: a name from `xlafuse strategies`, or fused for a function under xlafuse.fuse.",
        ),
    ] = "xla"


def analysis_of(program: Program, *, keep: str | None = None) -> Analysis:
    """Loads or compiles the program; `keep` is a folder for its capture.

    Raises:
        InputError: not exactly one program, or bad names, shapes or files.
        ComparisonError: the program does not compile.
    """
    given = [program.block is not None, program.fn is not None, program.capture is not None]
    if sum(given) != 1:
        raise InputError(f"expected one of --fn, --block and --capture, got {sum(given)} of them")
    if program.capture is None:
        return _compiled(program, keep)
    own = {"--shape": program.shape, "--args": program.args, "--mode": program.mode is not Mode.forward}
    refuse_beside_capture(own | {"--target": program.target != DEFAULT_TARGET, "--strategy": program.strategy != "xla"})
    return load_analysis(program.capture)


def capture_of(program: Program) -> Capture:
    """Loads or compiles the program as `analysis_of` does, and returns what XLA wrote of it.

    Raises:
        InputError: as `analysis_of`; a report.json, which has no module.
    """
    from hlo_analysis.capture import Capture
    from hlo_analysis.saved import is_json

    if program.capture is None:
        with tempfile.TemporaryDirectory() as folder:
            label = analysis_of(program, keep=folder).label
            return Capture.load(Path(folder, f"{'xla' if label == FUSED else label}.zip"))
    if is_json(program.capture.partition(":")[0]):
        raise InputError("a report.json has no module: name the capture that `xlafuse report --keep-capture` saved")
    return Capture.load(program.capture)


def refuse_beside_capture(options: Mapping[str, Any]) -> None:
    """Raises InputError if one of the options is given, which say how to compile."""
    if named := [option for option, value in options.items() if value]:
        raise InputError(f"a --capture is compiled already: {', '.join(named)} cannot change it")


def use_cpu_without_gpu() -> None:
    """Sets JAX_PLATFORMS=cpu on a machine without an NVIDIA GPU; call it before jax is imported.

    Otherwise the CUDA plugin would log that it found no driver. The command line owns its process, so that it may set
    this; a library may not.
    """
    if not any(Path(device).exists() for device in _NVIDIA_DEVICES):
        os.environ.setdefault("JAX_PLATFORMS", "cpu")


def load_analysis(text: str) -> Analysis:
    """Loads the analysis at PATH or PATH:STRATEGY; a report without a strategy gives its baseline's.

    See `load_analyses`.
    """
    from hlo_analysis.records import Comparison

    path, strategy = _split(text)
    record = _record(path, strategy)
    if not isinstance(record, Comparison):
        return record
    return _strategy(record, path, strategy or record.baseline)


def load_analyses(text: str) -> list[Analysis]:
    """Loads the analyses at PATH or PATH:STRATEGY, from a capture, a dump, or the JSON of a report or an analysis.

    Raises:
        InputError: there is no such strategy, or none has an analysis.
        DumpError: there is nothing there, or nothing readable.
    """
    from hlo_analysis.records import Comparison

    path, strategy = _split(text)
    record = _record(path, strategy)
    if not isinstance(record, Comparison):
        return [record]
    if strategy:
        return [_strategy(record, path, strategy)]
    return [result.analysis for result in record.strategies if result.analysis is not None]


def _record(path: Path, strategy: str) -> Analysis | Comparison:
    from hlo_analysis.analysis import analyze
    from hlo_analysis.capture import Capture
    from hlo_analysis.records import Analysis
    from hlo_analysis.saved import is_json, load
    from xlafuse.catalogue import KERNELS

    if is_json(path):
        record = load(path)
        if isinstance(record, Analysis) and strategy not in ("", record.label):
            raise InputError(f"{path} holds the analysis {record.label!r} alone, got {strategy!r}")
        return record
    if strategy:
        raise InputError(f"{path} holds one program: {strategy!r} names a strategy of a report.json")
    return analyze(Capture.load(path), catalogue=KERNELS)


def _strategy(comparison: Comparison, path: Path, wanted: str) -> Analysis:
    from hlo_analysis.errors import nearest_names

    names = [result.name for result in comparison.strategies]
    if wanted not in names:
        raise InputError(f"{path} has no strategy {wanted!r}{nearest_names(wanted, names)}; it has {', '.join(names)}")
    found = comparison[wanted]
    if found.analysis is None:
        raise InputError(f"{path}: {wanted} has no analysis: {found.error or 'no reason given'}")
    return found.analysis


def _split(text: str) -> tuple[Path, str]:
    path, colon, strategy = text.rpartition(":")
    return (Path(path), strategy) if colon and not Path(text).exists() else (Path(text), "")


def _compiled(program: Program, keep: str | None) -> Analysis:
    use_cpu_without_gpu()
    from xlafuse.cli import inputs
    from xlafuse.comparison import compare

    strategy = "xla" if program.strategy == FUSED else program.strategy
    if program.fn is None:
        if program.strategy == FUSED or program.args is not None:
            raise InputError(f"{FUSED} and --args are for --fn; a block takes --shape BATCHxLENGTH and a strategy")
        made: Any = program.block
        shapes: tuple[Any, ...] = inputs.block_shape(program.shape or ())
    else:
        made, shapes = inputs.load_program(program.fn, program.shape or (), program.args)
        if program.strategy == FUSED:
            from xlafuse.fusion import fuse

            made = fuse(made)
    comparison = compare(
        made,
        shapes,
        strategies=[strategy],
        baseline=strategy,
        target=program.target,
        mode=program.mode.value,
        numerics=False,
        timeout=program.timeout,
        keep_captures=keep,
    )
    analysis = comparison[strategy].analysis
    assert analysis is not None  # compare raises if its only strategy has none
    return replace(analysis, label=program.strategy)
