"""The commands of `xlafuse` and their options; `xlafuse bench` and `tune` are in `bench.py`."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from xlafuse.cli.bench import bench, names, tune
from xlafuse.cli.errors import cli_errors

app = typer.Typer(
    name="xlafuse",
    help="Find what XLA fused in a JAX program, explain what it left apart and what that costs.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


class Mode(StrEnum):
    """What is compiled of the program."""

    forward = "forward"
    grad = "grad"


@app.callback(invoke_without_command=True)
def _tell_version(
    wanted: Annotated[bool, typer.Option("--version", help="Print the version and leave.")] = False,
) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"xlafuse {version('xlafuse')}")
        raise typer.Exit


@app.command()
def report(
    block: Annotated[
        str | None,
        typer.Option(metavar="PRESET", help="A transformer block: llama3-8b (the default), gpt2-medium, tiny."),
    ] = None,
    fn: Annotated[
        str | None,
        typer.Option(
            metavar="MODULE:FUNCTION", help="Any JAX function instead, as package.module:name or file.py:name."
        ),
    ] = None,
    shape: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SHAPE",
            help="For a block BATCHxLENGTH, as 2x4096 (the default). For a function one for each argument, as "
            "'bf16[8192,4096]' or 'f32[]'.",
        ),
    ] = None,
    args: Annotated[
        str | None,
        typer.Option(
            metavar="MODULE:FACTORY",
            help="For a function whose arguments are trees: what returns them as a tuple, of arrays or of "
            "jax.ShapeDtypeStruct.",
        ),
    ] = None,
    capture: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="PATH",
            help="Instead of compiling: a saved capture, or a folder that xla_dump_to wrote. Several are compared.",
        ),
    ] = None,
    module: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Which module of a folder that holds several, as jit_train_step: the largest by default.",
        ),
    ] = None,
    mode: Annotated[Mode, typer.Option(help="The program itself, or a training step's gradients too.")] = Mode.forward,
    target: Annotated[
        str,
        typer.Option(
            metavar="TARGET", help="What to compile for: see `xlafuse targets`, or the path of a target config."
        ),
    ] = "h200",
    strategies: Annotated[
        str | None,
        typer.Option(metavar="A,B,C", help="Which strategies: see `xlafuse strategies`. All that apply by default."),
    ] = None,
    option: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=VALUE",
            help="One strategy more: XLA with this option, as a remedy names it. Several options are set together.",
        ),
    ] = None,
    baseline: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="What differences are taken against: xla, or the first capture, by default."),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "-o",
            "--output",
            metavar="DIR",
            help="Where report.html and report.json go: xlafuse-report by default; with --json nowhere.",
        ),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON, and nothing else, on stdout.")] = False,
    open_page: Annotated[bool, typer.Option("--open", help="Open report.html in the browser.")] = False,
    measure: Annotated[
        bool,
        typer.Option("--measure", help="Also run every strategy on the attached GPU, for which it is then compiled."),
    ] = False,
    measured: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Times that --measure wrote elsewhere: its measured.json."),
    ] = None,
    profile: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Times out of a profile that jax.profiler wrote of this program."),
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write the measured launches as trace events, for ui.perfetto.dev."),
    ] = None,
    numerics: Annotated[
        bool, typer.Option("--numerics/--no-numerics", help="Check a block's results on the CPU, at a small size.")
    ] = True,
    timeout: Annotated[float, typer.Option(metavar="SECONDS", help="How long one compilation may take.")] = 300.0,
) -> None:
    """Compile a program under several strategies and show what became of it.

    Needs no GPU, but for --measure. Exits with 0 when every strategy asked for is in the report, 1 when one is not (the
    report of the others is written), 2 on bad input.
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
                timeout=timeout,
            )
        )


@app.command()
def targets() -> None:
    """List the targets that can be compiled for, with the peaks that the roofline uses."""
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
    operation: Annotated[str | None, typer.Argument(metavar="[NAME]", help="One operation; all by default.")] = None,
    arg: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=VALUE",
            help="An argument of a call: an array as x=bf16[8192,4096], a value as is_causal=True. Shows which "
            "implementation the call takes, and why none of the others.",
        ),
    ] = None,
    target: Annotated[str, typer.Option(metavar="TARGET", help="On which GPU: see `xlafuse targets`.")] = "h200",
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


app.add_typer(bench, name="bench")
app.command()(tune)
