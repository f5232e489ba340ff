"""`python -m hlo_analysis DUMP|module:function`: what XLA does with a program, in the terminal."""

from __future__ import annotations

import argparse
import importlib
import os
import re
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext, redirect_stdout
from pathlib import Path
from typing import Any

from hlo_analysis.errors import CaptureError, HloAnalysisError, HloParseError
from hlo_analysis.records import Analysis, Comparison, StrategyResult


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command. Returns 0, or 1 after printing an error."""
    options = _parser().parse_args(arguments)
    try:
        # Output of the user's function, while it is imported and traced, must not come before the JSON.
        with redirect_stdout(sys.stderr) if options.json else nullcontext():
            analysis = _analysis(options)
    except HloAnalysisError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if options.json:
        from hlo_analysis.schema import to_json

        sys.stdout.write(to_json(analysis))
    else:
        _print(analysis)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m hlo_analysis", description=__doc__)
    parser.add_argument("program", help="a folder that xla_dump_to wrote, a saved capture, or package.module:function")
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

    if ":" not in options.program or Path(options.program).exists():
        return analyze(Capture.load(options.program))
    function = _function(options.program)
    shapes = [_argument(text) for text in options.shape]
    compiler_options = dict(_setting(text) for text in options.option)
    return analyze(
        capture(function, *shapes, target=options.target, mode=options.mode, compiler_options=compiler_options)
    )


def _function(name: str) -> Callable[..., Any]:
    module_name, _, attribute = name.partition(":")
    sys.path.insert(0, str(Path.cwd()))
    try:
        found: Any = importlib.import_module(module_name)
        for part in attribute.split("."):
            found = getattr(found, part)
    except (Exception, SystemExit) as error:  # the user's module may raise anything when imported
        raise CaptureError(f"{name!r}: expected package.module:function, and {error}") from error
    finally:
        sys.path.pop(0)
    if not callable(found):
        raise CaptureError(f"{name!r} is a {type(found).__name__}, not a function")
    return found


def _argument(text: str) -> Any:
    import jax
    import jax.numpy as jnp

    from hlo_analysis.hlo import parse_shape

    names = {
        "pred": "bool_",
        **{
            f"{kind}{bits}": f"{word}{bits}"
            for kind, word in (("s", "int"), ("u", "uint"))
            for bits in (4, 8, 16, 32, 64)
        },
    }
    expected = f"--shape {text!r}: expected an array such as bf16[8192,4096]"
    try:
        shape = parse_shape(text)
    except HloParseError as error:
        raise CaptureError(f"{expected}: {error.message}") from error
    names |= {"f16": "float16", "bf16": "bfloat16", "f32": "float32", "f64": "float64"}
    names |= {"c64": "complex64", "c128": "complex128"}
    name = names.get(shape.element_type, re.sub("^f([48])", r"float\1_", shape.element_type))
    dtype = getattr(jnp, name, None)
    if shape.is_tuple or dtype is None:
        raise CaptureError(expected)
    if (narrow := jax.dtypes.canonicalize_dtype(dtype)) != jnp.dtype(dtype):
        raise CaptureError(f"--shape {text!r}: JAX makes {narrow} of it unless JAX_ENABLE_X64=1 is set")
    return jax.ShapeDtypeStruct(shape.dimensions, dtype)


def _setting(text: str) -> tuple[str, Any]:
    name, separator, value = text.partition("=")
    if not separator:
        raise CaptureError(f"--option {text!r}: expected NAME=VALUE")
    return name, {"true": True, "false": False}.get(value.lower(), value)


def _print(analysis: Analysis) -> None:
    from rich.console import Console

    from hlo_analysis.report.terminal import render_terminal

    result = StrategyResult(name=analysis.label, description="", analysis=analysis)
    comparison = Comparison(title=analysis.label, baseline=analysis.label, strategies=(result,))
    render_terminal(comparison, Console())


if __name__ == "__main__":
    raise SystemExit(main())
