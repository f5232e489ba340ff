"""Compares saved captures or folders that `xla_dump_to` wrote."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from xlafuse.cli.errors import InputError

if TYPE_CHECKING:
    from hlo_analysis.records import Comparison


def compare_captures(paths: Sequence[Path], baseline: str | None, module: str | None) -> Comparison:
    """Analyzes each capture as one strategy, named after its file or folder.

    Args:
        paths: saved captures, or folders that `xla_dump_to` wrote.
        baseline: name of the capture that the others are compared with; None takes the first.
        module: which module of a folder with several; None takes the largest.

    Raises:
        InputError: `baseline` is none of the names, or there is no module to choose.
        DumpError: a path holds no capture, or a truncated one.
    """
    from hlo_analysis.analysis import analyze
    from hlo_analysis.capture import Capture
    from hlo_analysis.diff import compare_analyses
    from hlo_analysis.errors import nearest_names
    from hlo_analysis.records import StrategyResult
    from hlo_analysis.report.sentences import program_name
    from hlo_analysis.saved import is_json
    from xlafuse.catalogue import KERNELS

    names = capture_names(paths)
    if baseline is not None and baseline not in names:
        raise InputError(
            f"expected --baseline to be one of the captures {', '.join(names)}, got {baseline!r}"
            f"{nearest_names(baseline, names)}"
        )
    if reports := [str(path) for path in paths if is_json(path)]:
        raise InputError(
            f"{', '.join(reports)} is a report already, and --capture takes what XLA wrote: a file that "
            "--keep-capture saved, or a folder of xla_dump_to. `xlafuse explain`, `diff` and `check` read a report"
        )
    captures = [Capture.load(path, module=module) for path in paths]
    if module is not None and not any(found.provenance.mode == "unknown" for found in captures):  # as a dump's mode is
        raise InputError(
            "--module names one of the modules in a folder that xla_dump_to wrote; "
            f"{', '.join(names)} holds one program"
        )
    analyses = [analyze(found, label=name, catalogue=KERNELS) for found, name in zip(captures, names, strict=True)]
    results = [
        StrategyResult(name=name, description=program_name(found.provenance), analysis=found)
        for name, found in zip(names, analyses, strict=True)
    ]
    return compare_analyses(" and ".join(names), results, baseline or names[0])


def capture_names(paths: Sequence[Path]) -> list[str]:
    """Names each path: its last part without '.zip', with as many folders as needed to make names differ."""
    names = [path.resolve().with_suffix("") if path.suffix == ".zip" else path.resolve() for path in paths]
    for count in range(1, max((len(name.parts) for name in names), default=1) + 1):
        short = ["/".join(name.parts[-count:]) for name in names]
        if len(set(short)) == len(short):
            return short
    raise InputError(f"the same --capture twice: {', '.join(map(str, paths))}")
