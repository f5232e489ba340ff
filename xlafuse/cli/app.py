"""Commands of `xlafuse` with their options; `xlafuse bench` and `tune` are in `bench.py`."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from xlafuse.cli.bench import bench, names, tune
from xlafuse.cli.check import check
from xlafuse.cli.diff import diff
from xlafuse.cli.errors import cli_errors
from xlafuse.cli.explain import explain
from xlafuse.cli.export import export
from xlafuse.cli.study import study

app = typer.Typer(
    name="xlafuse",
    help="Find what XLA fused in a JAX program, and explain what it did not fuse and what that costs.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


class Mode(StrEnum):
    """Which function of the program is compiled."""

    forward = "forward"
    grad = "grad"


@app.callback(invoke_without_command=True)
def _tell_version(
    wanted: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    from hlo_analysis.report.console import write_plain_characters

    write_plain_characters()
    if wanted:
        from importlib.metadata import version

        print(f"xlafuse {version('xlafuse')}")
        raise typer.Exit


@app.command(no_args_is_help=True)
def report(
    block: Annotated[
        str | None,
        typer.Option(metavar="PRESET", help="A transformer block: llama3-8b (the default), gpt2-medium, tiny."),
    ] = None,
    fn: Annotated[
        str | None,
        typer.Option(
            metavar="MODULE:FUNCTION", help="A JAX function instead, given as package.module:name or file.py:name."
        ),
    ] = None,
    shape: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SHAPE",
            help="For a block: BATCHxLENGTH, such as 2x4096 (the default). For a function: one for each "
            "argument, such as 'bf16[8192,4096]' or 'f32[]'.",
        ),
    ] = None,
    args: Annotated[
        str | None,
        typer.Option(
            metavar="MODULE:FACTORY",
            help="For a function whose arguments are trees: a function that returns them as a tuple of arrays "
            "or jax.ShapeDtypeStruct.",
        ),
    ] = None,
    capture: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="PATH",
            help="Read a saved capture, or a folder that xla_dump_to wrote, instead of compiling. Repeat to "
            "compare several.",
        ),
    ] = None,
    module: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Module to take from a folder with several, such as jit_train_step. Default: the largest.",
        ),
    ] = None,
    mode: Annotated[
        Mode, typer.Option(help="forward: the program itself; grad: with the gradients of a training step.")
    ] = Mode.forward,
    target: Annotated[
        str,
        typer.Option(
            metavar="TARGET", help="GPU to compile for: a name from `xlafuse targets`, or the path of a target config."
        ),
    ] = "h200",
    strategies: Annotated[
        str | None,
        typer.Option(metavar="A,B,C", help="Strategies to compare; see `xlafuse strategies`. Default: all that apply."),
    ] = None,
    option: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=VALUE",
            help="Add a strategy: XLA with this option, which a remedy may name. Several options are set together.",
        ),
    ] = None,
    baseline: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Strategy to compare the others with. Default: xla, or the first capture."),
    ] = None,
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
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print only JSON on stdout.")] = False,
    open_page: Annotated[bool, typer.Option("--open", help="Open report.html in the browser.")] = False,
    measure: Annotated[
        bool,
        typer.Option("--measure", help="Compile every strategy for the attached GPU and run it there."),
    ] = False,
    measured: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Show times from the measured.json that --measure wrote elsewhere."),
    ] = None,
    profile: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Show times from a profile of this program by jax.profiler."),
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write the measured launches as trace events, for ui.perfetto.dev."),
    ] = None,
    numerics: Annotated[
        bool, typer.Option("--numerics/--no-numerics", help="Check a block's results on the CPU at a small size.")
    ] = True,
    tries: Annotated[
        int | None,
        typer.Option(
            "--try",
            metavar="N",
            min=0,
            help="Compile again with the first N remedies that can be tried, and show what they save. Default: "
            "5 if the baseline is xla; 0 tries none.",
        ),
    ] = None,
    keep_capture: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Save the capture of each strategy in this folder, for --capture."),
    ] = None,
    redact: Annotated[
        bool,
        typer.Option("--redact", help="Leave the program's names, paths, HLO and PTX out of all output."),
    ] = False,
    timeout: Annotated[float, typer.Option(metavar="SECONDS", help="Time limit of one compilation.")] = 300.0,
) -> None:
    """Compile a program under several strategies and compare their launches, traffic and missed fusions.

    Only --measure needs a GPU. Exits with 0 if the report has every requested strategy, 1 if one is missing (the report
    of the others is written), 2 on bad input.
    """
    with cli_errors():
        from xlafuse.cli.report import Request, run

        run(
            Request(
                block=block,
                fn=fn,
                shapes=tuple(shape or ()),
                args=args,
                captures=tuple(capture or ()),
                module=module,
                mode=mode.value,
                target=target,
                strategies=names(strategies) or None,
                options=tuple(option or ()),
                baseline=baseline,
                output=output,
                json=json,
                open_page=open_page,
                measure=measure,
                measured=measured,
                profile=profile,
                trace=trace,
                numerics=numerics,
                tries=tries,
                keep_capture=keep_capture,
                redact=redact,
                timeout=timeout,
            )
        )


@app.command()
def targets() -> None:
    """List the targets to compile for, with the peak rates that the roofline uses."""
    with cli_errors():
        from xlafuse.cli.lists import print_targets

        print_targets()


@app.command()
def strategies() -> None:
    """List the fusion strategies."""
    with cli_errors():
        from xlafuse.cli.lists import print_strategies

        print_strategies()


@app.command()
def kernels(
    operation: Annotated[str | None, typer.Argument(metavar="NAME", help="An operation. Default: all.")] = None,
    arg: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=VALUE",
            help="An argument of a call: an array such as x=bf16[8192,4096], or a value such as is_causal=True."
            " Shows which implementation the call takes and why not the others.",
        ),
    ] = None,
    target: Annotated[str, typer.Option(metavar="TARGET", help="GPU of the call; see `xlafuse targets`.")] = "h200",
) -> None:
    """List the fused operations, or show what one does and which implementation its calls take.

    Needs no GPU.
    """
    with cli_errors():
        from xlafuse.cli.kernels import InputError, print_kernel, print_kernels

        if operation is not None:
            print_kernel(operation, arg or (), target)
        elif arg:
            raise InputError("--arg describes a call of one operation: name it, as in `xlafuse kernels attention`")
        else:
            print_kernels()


@app.command()
def fuse(
    fn: Annotated[
        str,
        typer.Option(metavar="MODULE:FUNCTION", help="A JAX function, given as package.module:name or file.py:name."),
    ],
    shape: Annotated[
        list[str] | None,
        typer.Option(metavar="SHAPE", help="One for each argument, such as 'bf16[8192,4096]' or 'f32[]'."),
    ] = None,
    args: Annotated[
        str | None,
        typer.Option(
            metavar="MODULE:FACTORY", help="For arguments that are trees: a function that returns them as a tuple."
        ),
    ] = None,
    ops: Annotated[str | None, typer.Option(metavar="A,B,C", help="Operations to look for. Default: all.")] = None,
    skip: Annotated[str | None, typer.Option(metavar="A,B,C", help="Operations to leave out. Default: none.")] = None,
    allow: Annotated[
        str | None,
        typer.Option(metavar="A,B", help="Differences to accept: rounding, empty_rows. Default: none."),
    ] = None,
    target: Annotated[
        str,
        typer.Option(metavar="TARGET", help="GPU for which operations choose implementations; see `xlafuse targets`."),
    ] = "h200",
    compiles: Annotated[
        bool,
        typer.Option(
            "--compile/--no-compile",
            help="Compile forward pass and gradient with and without fuse, and name what makes them worse.",
        ),
    ] = True,
    json: Annotated[bool, typer.Option("--json", help="Print only JSON on stdout.")] = False,
) -> None:
    """Show as a diff which fused operations `xlafuse.fuse` puts into a function, and what it refuses.

    Needs no GPU. Exits with 0, even if there is no site, and with 2 on bad input.
    """
    with cli_errors():
        from xlafuse.cli.fuse import Request, run

        run(
            Request(
                fn=fn,
                shapes=tuple(shape or ()),
                args=args,
                ops=names(ops) or None,
                skip=names(skip),
                allow=names(allow),
                compiles=compiles,
                target=target,
                json=json,
            )
        )


app.add_typer(bench, name="bench")
app.command()(tune)
app.command()(study)
app.command()(explain)
app.command()(diff)
app.command()(check)
app.command()(export)
