"""Implements `xlafuse report`: checks the options, compares, prints, and writes report.html and report.json."""

from __future__ import annotations

import gc
import itertools
import os
import sys
import time
import warnings
import webbrowser
from collections.abc import Callable, Collection, Sequence
from contextlib import nullcontext, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from xlafuse.cli.errors import InputError, StrategyFailedError
from xlafuse.cli.output import Format, FormatOption, Json, output_folder
from xlafuse.cli.programs import DEFAULT_TARGET, Mode, Source, refuse_beside_capture, use_cpu_without_gpu
from xlafuse.errors import ComparisonError
from xlafuse.files import write_files

if TYPE_CHECKING:
    from hlo_analysis.records import Analysis, Comparison
    from xlafuse.models import Layout
    from xlafuse.strategies import Strategy

DEFAULT_BLOCK = "llama3-8b"
BASELINE = "xla"
TRIES = 5
"""How many remedies a report tries by default."""
OPTIONS_STRATEGY = "xla_options"
DEFAULT_FOLDER = Path("xlafuse-report")
_FINISHED = ("done", "failed", "not applicable")


@dataclass(frozen=True, kw_only=True)
class Request(Source):
    """Options of `xlafuse report`."""

    capture: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="PATH",
            help="Read a saved capture, or a folder that xla_dump_to wrote, instead of compiling. Repeat to "
            "compare several.",
        ),
    ] = None
    module: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Module to take from a folder with several, such as jit_train_step. Default: the largest.",
        ),
    ] = None
    mesh: Annotated[
        str | None,
        typer.Option(
            metavar="AXIS=N,...",
            help="Shard the block over a mesh of GPUs, as data=2,tensor=2, in the way of --parallel. The --args of "
            "--fn have shardings of their own.",
        ),
    ] = None
    parallel: Annotated[
        str | None,
        typer.Option(
            metavar="KIND",
            help="How the block is sharded over --mesh: dp (data), fsdp (fully sharded), tp (tensor), sp (tensor and "
            "sequence), ep (experts, and tensor in attention).",
        ),
    ] = None
    strategies: Annotated[
        tuple[str, ...],
        typer.Option(metavar="A,B,C", help="Strategies to compare; see `xlafuse strategies`. Default: all that apply."),
    ] = ()
    option: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=VALUE",
            help="Add a strategy: XLA with this option, which a remedy may name. Several options are set together.",
        ),
    ] = None
    baseline: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Strategy to compare the others with. Default: xla, or the first capture."),
    ] = None
    output: Annotated[
        Path | None,
        typer.Option(
            "-o",
            "--output",
            metavar="DIR",
            help="Folder for report.html and report.json, which are overwritten. Default: xlafuse-report, or "
            "xlafuse-report-2 and so on if that holds a report; none with --json. The page has the PTX of kernels up "
            "to 0.5 MB, the JSON all of it.",
        ),
    ] = None
    json: Json = False
    format: FormatOption = Format.text
    open_page: Annotated[bool, typer.Option("--open", help="Open report.html in the browser.")] = False
    measure: Annotated[
        bool,
        typer.Option("--measure", help="Compile every strategy for the attached GPU and run it there."),
    ] = False
    measured: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Show times from the measured.json that --measure wrote elsewhere."),
    ] = None
    profile: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Show times from a profile of this program by jax.profiler."),
    ] = None
    numerics: Annotated[
        bool, typer.Option("--numerics/--no-numerics", help="Check a block's results on the CPU at a small size.")
    ] = True
    tries: Annotated[
        int | None,
        typer.Option(
            "--try",
            metavar="N",
            min=0,
            help="Compile again with the first N remedies that can be tried, and show what they save. Default: "
            "5 if the baseline is xla; 0 tries none.",
        ),
    ] = None
    keep_capture: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Save the capture of each strategy in this folder, for --capture."),
    ] = None
    redact: Annotated[
        bool,
        typer.Option("--redact", help="Leave the program's names, paths, HLO and PTX out of all output."),
    ] = False


def report(request: Request) -> None:
    """Compile a program under several strategies and compare their launches, traffic and missed fusions.

    The program is the block llama3-8b at 2x4096 unless another is named. Only --measure needs a GPU. Exits with 0 if
    the report has every requested strategy, 1 if one is missing (the report of the others is written), 2 on bad input.
    """
    use_cpu_without_gpu()
    if request.measure:  # another process runs the program; tracing it here would take GPU memory
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
    # A program of 200 layers is millions of objects, hardly any of them in cycles. This saves a quarter of the time.
    gc.set_threshold(100_000, 20, 100)
    _check(request)
    warnings.filterwarnings("ignore", "fuse left ")  # the report says so itself
    # The function may print while it is imported and traced; stdout is for the JSON alone.
    with redirect_stdout(sys.stderr) if request.json else nullcontext():
        comparison, written, failed = _made(request)
    _show(comparison, written, as_json=request.json, as_markdown=request.format is Format.markdown)
    if request.open_page and written:
        webbrowser.open(written[0].resolve().as_uri())
    if missing := _missing(request, comparison, failed):
        raise StrategyFailedError(missing)


def _missing(request: Request, comparison: Comparison, failed: Collection[str]) -> dict[str, str]:
    """Returns the strategies that failed, or were named but have no analysis or no times, with the reason."""
    asked = {*request.strategies, *([OPTIONS_STRATEGY] if request.option else []), *failed}
    without = (result for result in comparison.strategies if result.analysis is None and result.name in asked)
    missing = {result.name: f"analysis: {result.error or 'no reason given'}" for result in without}
    if request.measure:
        done = ((result.name, result.analysis) for result in comparison.strategies if result.analysis is not None)
        missing |= {name: f"measured time: {_last_note(each)}" for name, each in done if not _has_times(each)}
    return missing


def _has_times(analysis: Analysis) -> bool:
    return analysis.measured is not None and analysis.measured.kernel_us is not None


def _last_note(analysis: Analysis) -> str:
    notes = analysis.provenance.notes if analysis.measured is None else analysis.measured.notes
    return notes[-1] if notes else "no reason given"


def _made(request: Request) -> tuple[Comparison, list[Path], list[str]]:
    """Returns the comparison, its files, and the names of the strategies that failed."""
    from hlo_analysis.measured import read_profile
    from hlo_analysis.report import redacted
    from xlafuse.measurements import load, with_measurements, with_profile

    program, shapes = _program(request) if not request.capture else (None, ())
    measured = load(request.measured) if request.measured else None
    profile = read_profile(request.profile) if request.profile else None
    folder = request.output or (None if request.json and not request.open_page else _unused_folder())

    def finished(comparison: Comparison) -> Comparison:
        if measured is not None:
            comparison = with_measurements(comparison, measured)
        if profile is not None:
            comparison = with_profile(comparison, profile)
        return redacted(comparison) if request.redact else comparison

    def ready(comparison: Comparison) -> None:
        for path in _write(finished(comparison), folder, has_times=False) if folder else ():
            print(f"wrote {path}, without tried remedies", file=sys.stderr)

    with output_folder(folder) if folder else nullcontext():
        if request.capture:
            from xlafuse.cli.captures import compare_captures

            comparison, failed = compare_captures(request.capture, request.baseline, request.module), []
        else:
            comparison, failed = _compare(request, program, shapes, ready)
        comparison = finished(comparison)
        written = _write(comparison, folder, has_times=request.measure) if folder else []
        return comparison, written, failed


def _unused_folder() -> Path:
    """Returns the default folder; if it holds a report, the first that holds none of those with a number."""
    names = itertools.chain([DEFAULT_FOLDER], (Path(f"{DEFAULT_FOLDER}-{number}") for number in itertools.count(2)))
    return next(folder for folder in names if not (folder / "report.html").exists())


def _check(request: Request) -> None:
    from hlo_analysis.loading import compiler_options
    from hlo_analysis.targets import load_target
    from xlafuse.strategies import get_strategy, resolve_strategies

    if request.block is not None and request.fn is not None:
        raise InputError("expected --block or --fn, got both")
    _layout(request)
    if request.args is not None and request.fn is None:
        raise InputError("--args gives the arguments of --fn; a block takes --shape BATCHxLENGTH")
    if sum((request.measure, request.measured is not None, request.profile is not None)) > 1:
        raise InputError("expected one of --measure, --measured and --profile")
    if request.module is not None and not request.capture:
        raise InputError("--module names one of the modules in a --capture")
    if request.capture:
        own = {"--block": request.block, "--fn": request.fn, "--shape": request.shape, "--args": request.args}
        own |= {"--strategies": request.strategies, "--option": request.option}
        own |= {"--measure": request.measure, "--keep-capture": request.keep_capture}
        own |= {"--target": request.target != DEFAULT_TARGET, "--mode": request.mode is not Mode.forward}
        refuse_beside_capture(own)
        if request.tries:
            raise InputError(
                "--try compiles the program again, and a --capture has none to compile: use --fn or --block"
            )
        return
    if not request.timeout > 0:  # also true for NaN
        raise InputError(f"expected a --timeout above zero, got {request.timeout:g}")
    if request.measure:
        _check_gpu(request.target)
    load_target(request.target)
    get_strategy(request.baseline or BASELINE)
    resolve_strategies(request.strategies or None)
    compiler_options(request.option or ())


def _check_gpu(target: str) -> None:
    from hlo_analysis.capture.plugin_log import has_nvidia_gpu

    if target not in (DEFAULT_TARGET, "attached"):
        raise InputError(f"--measure compiles for the GPU that it runs on; it cannot run for --target {target}")
    if not has_nvidia_gpu():
        raise InputError("no GPU is attached: use --measured FILE or --profile DIR")


def _layout(request: Request) -> Layout | None:
    """Returns how the block is sharded over --mesh, by --parallel, or None for one GPU."""
    from xlafuse.models.shardings import layout_of, parse_mesh

    if request.mesh is None and request.parallel is None:
        return None
    if request.mesh is None or request.parallel is None:
        raise InputError("--mesh AXIS=N,... and --parallel dp|fsdp|tp|sp|ep go together")
    if request.fn is not None or request.capture:
        raise InputError("--mesh shards a block: leave out --fn, whose --args have shardings, and --capture")
    return layout_of(parse_mesh(request.mesh), request.parallel)


def _program(request: Request) -> tuple[Any, tuple[Any, ...]]:
    """Returns what `xlafuse.compare` takes: a preset's name or a function, and its shapes."""
    from xlafuse.cli import inputs

    if request.fn is None:
        from xlafuse.models import get_preset

        block = request.block or DEFAULT_BLOCK
        get_preset(block)
        return block, inputs.block_shape(request.shape or ())
    return inputs.load_program(request.fn, request.shape or (), request.args)


def _compare(
    request: Request, program: Any, shapes: tuple[Any, ...], ready: Callable[[Comparison], None]
) -> tuple[Comparison, list[str]]:
    from xlafuse.comparison import compare
    from xlafuse.strategies import resolve_strategies

    strategies: tuple[str | Strategy, ...] | None = request.strategies or None
    if (
        strategies is None and request.fn is not None
    ):  # strategies that choose kernels for a block's sites do not apply to a function
        strategies = tuple(strategy.name for strategy in resolve_strategies(None) if "block" not in strategy.requires)
    if request.option:
        strategies = (*resolve_strategies(strategies), _with_options(request.option))
    labels = [strategy.name for strategy in resolve_strategies(strategies)]
    baseline = request.baseline or BASELINE
    tries = request.tries if request.tries is not None else TRIES if baseline == BASELINE else 0
    states: dict[str, str] = {}
    started: dict[str, float] = {}

    def progress(name: str, state: str) -> None:
        states[name] = state
        if state == "compiling":
            started[name] = time.monotonic()
        elif state in _FINISHED:
            took = f" after {time.monotonic() - started[name]:.1f} s" if name in started else ""
            finished = sum(states.get(each) in _FINISHED for each in labels)
            of = f" ({finished} of {len(labels)})" if name in labels else ""
            print(f"{name}: {state}{took}{of}", file=sys.stderr)

    try:
        comparison = compare(
            program,
            shapes,
            strategies=strategies,
            target="attached" if request.measure else request.target,
            mode=request.mode.value,
            baseline=baseline,
            numerics=request.numerics,
            tries=tries,
            keep_captures=request.keep_capture,
            progress=progress,
            ready=ready,
            timeout=request.timeout,
            layout=_layout(request),
            **({"measure": True} if request.measure else {}),
        )
    except ComparisonError as error:
        # If the others failed, it does not matter that some strategies do not apply.
        reasons = {name: reason for name, reason in error.reasons.items() if states.get(name) == "failed"}
        raise ComparisonError(reasons or error.reasons) from None
    return comparison, [name for name, state in states.items() if state == "failed"]


def _with_options(options: Sequence[str]) -> Strategy:
    from hlo_analysis.loading import compiler_options
    from xlafuse.strategies import Strategy

    return Strategy(
        name=OPTIONS_STRATEGY,
        description=f"XLA with {', '.join(options)}.",
        compiler_options=compiler_options(options),
    )


def _write(comparison: Comparison, folder: Path, *, has_times: bool) -> list[Path]:
    from hlo_analysis.report import render_html
    from hlo_analysis.schema import to_json
    from xlafuse import measurements

    files = {"report.html": render_html(comparison), "report.json": to_json(comparison) + "\n"}
    if has_times:
        files["measured.json"] = measurements.to_json(measurements.measurements_of(comparison))
    return write_files(folder, files)


def _show(comparison: Comparison, written: list[Path], *, as_json: bool, as_markdown: bool) -> None:
    from rich.console import Console

    from hlo_analysis.report import render_markdown, render_terminal
    from hlo_analysis.schema import to_json

    if as_json:
        sys.stdout.write(to_json(comparison) + "\n")
    elif as_markdown:
        sys.stdout.write(render_markdown(comparison))
    else:
        render_terminal(comparison, Console())
    console = Console(stderr=True) if as_json or as_markdown else Console()
    for path in written:
        console.print(f"wrote {path}", markup=False, highlight=False, soft_wrap=True)
