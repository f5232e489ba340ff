"""Commands of `xlafuse` with their options; `xlafuse bench` and `tune` are in `bench.py`."""

from __future__ import annotations

from typing import Annotated

import typer

from xlafuse.cli import check, diff, explain, fuse, isolate, report
from xlafuse.cli.bench import bench, tune
from xlafuse.cli.errors import cli_errors
from xlafuse.cli.export import export
from xlafuse.cli.options import with_options
from xlafuse.cli.output import Json
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


app.command(no_args_is_help=True)(with_options(report.report, report.Request))


@app.command()
def targets(json: Json = False) -> None:
    """List the targets to compile for, with the peak rates that the roofline uses."""
    with cli_errors():
        from xlafuse.cli.lists import print_targets

        print_targets(as_json=json)


@app.command()
def strategies(json: Json = False) -> None:
    """List the fusion strategies."""
    with cli_errors():
        from xlafuse.cli.lists import print_strategies

        print_strategies(as_json=json)


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
    json: Json = False,
) -> None:
    """List the fused operations, or show what one does and which implementation its calls take.

    Needs no GPU.
    """
    with cli_errors():
        from xlafuse.cli.kernels import InputError, print_kernel, print_kernels

        if operation is not None:
            print_kernel(operation, arg or (), target, as_json=json)
        elif arg:
            raise InputError("--arg describes a call of one operation: name it, as in `xlafuse kernels attention`")
        else:
            print_kernels(as_json=json)


app.command()(with_options(fuse.fuse, fuse.Request))
app.add_typer(bench, name="bench")
app.command()(tune)
app.command()(study)
app.command()(with_options(explain.explain, explain.Request))
app.command()(with_options(diff.diff, diff.Request))
app.command(no_args_is_help=True)(with_options(isolate.isolate, isolate.Request))
app.command()(with_options(check.check, check.Request))
app.command()(export)
