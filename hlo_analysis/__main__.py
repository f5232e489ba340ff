"""`python -m hlo_analysis DUMP|module:function|file.py:function`: what XLA does with a program, in the terminal."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from contextlib import nullcontext, redirect_stdout
from pathlib import Path

from hlo_analysis.errors import HloAnalysisError
from hlo_analysis.records import Analysis, Comparison, StrategyResult


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command. Returns 0, or 2 after printing an error: bad input, or the program raised."""
    from hlo_analysis.report.console import write_plain_characters

    write_plain_characters()
    options = _parser().parse_args(arguments)
    try:
        # Output of the user's function, while it is imported and traced, must not come before the JSON.
        with redirect_stdout(sys.stderr) if options.json else nullcontext():
            analysis = _analysis(options)
    except HloAnalysisError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if options.json:
        from hlo_analysis.schema import to_json

        sys.stdout.write(to_json(analysis))
    else:
        _print(analysis)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m hlo_analysis", description=__doc__)
    parser.add_argument(
        "program",
        help="a folder that xla_dump_to wrote, a saved capture, or a function: package.module:name or file.py:name",
    )
    parser.add_argument(
        "--shape",
        action="append",
        default=[],
        metavar="DTYPE[SIZES]",
        help="one argument of the function, e.g. bf16[8192,4096]; once for each argument",
    )
    parser.add_argument("--target", default="h200", help="GPU to compile for (default: h200)")
    parser.add_argument("--mode", choices=("forward", "grad"), default="forward")
    parser.add_argument("--option", action="append", default=[], metavar="NAME=VALUE", help="an XLA compiler option")
    parser.add_argument("--json", action="store_true", help="print the analysis as JSON")
    return parser


def _analysis(options: argparse.Namespace) -> Analysis:
    # Without a GPU, the CUDA plugin serves only as a compiler. This process is ours, so nobody else depends on the
    # choice.
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    from hlo_analysis.analysis import analyze
    from hlo_analysis.capture import Capture, capture
    from hlo_analysis.loading import argument, compiler_options, load_function

    if ":" not in options.program or Path(options.program).exists():
        return analyze(Capture.load(options.program))
    function = load_function(options.program, "PROGRAM")
    shapes = map(argument, options.shape)
    settings = compiler_options(options.option)
    return analyze(capture(function, *shapes, target=options.target, mode=options.mode, compiler_options=settings))


def _print(analysis: Analysis) -> None:
    from rich.console import Console

    from hlo_analysis.report.terminal import render_terminal

    result = StrategyResult(name=analysis.label, description="", analysis=analysis)
    comparison = Comparison(title=analysis.label, baseline=analysis.label, strategies=(result,))
    render_terminal(comparison, Console())


if __name__ == "__main__":
    raise SystemExit(main())
