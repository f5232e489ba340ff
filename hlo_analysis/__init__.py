"""Reads what XLA did with a program: launches, fusion decisions, traffic. Knows nothing of the other packages.

>>> from hlo_analysis import analyze, capture
>>> analysis = analyze(capture(fn, *shapes, target="h200"))       # doctest: +SKIP
>>> analysis.launch_count, analysis.traffic.saved_bytes             # doctest: +SKIP
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

from hlo_analysis.quiet import silence_missing_gpu

if TYPE_CHECKING:
    from hlo_analysis.analysis import analyze as analyze
    from hlo_analysis.capture import Capture as Capture
    from hlo_analysis.capture import capture as capture
    from hlo_analysis.diff import compare_analyses as compare_analyses
    from hlo_analysis.errors import CaptureError as CaptureError
    from hlo_analysis.errors import DumpError as DumpError
    from hlo_analysis.errors import HloAnalysisError as HloAnalysisError
    from hlo_analysis.errors import HloParseError as HloParseError
    from hlo_analysis.errors import UnknownOptionError as UnknownOptionError
    from hlo_analysis.errors import UnknownTargetError as UnknownTargetError
    from hlo_analysis.hlo import parse_module as parse_module
    from hlo_analysis.records import Analysis as Analysis
    from hlo_analysis.records import Comparison as Comparison
    from hlo_analysis.records import Launch as Launch
    from hlo_analysis.schema import from_json as from_json
    from hlo_analysis.schema import json_schema as json_schema
    from hlo_analysis.schema import to_json as to_json
    from hlo_analysis.targets import load_target as load_target
    from hlo_analysis.targets import target_names as target_names

# Found on first use: `import hlo_analysis` alone must not take a second to import JAX.
_HOMES = {
    "Analysis": "records",
    "Capture": "capture",
    "CaptureError": "errors",
    "Comparison": "records",
    "DumpError": "errors",
    "HloAnalysisError": "errors",
    "HloParseError": "errors",
    "Launch": "records",
    "UnknownOptionError": "errors",
    "UnknownTargetError": "errors",
    "analyze": "analysis",
    "capture": "capture",
    "compare_analyses": "diff",
    "from_json": "schema",
    "json_schema": "schema",
    "load_target": "targets",
    "parse_module": "hlo",
    "target_names": "targets",
    "to_json": "schema",
}

__all__ = [  # noqa: RUF022
    "analyze",
    "capture",
    "compare_analyses",
    "from_json",
    "json_schema",
    "load_target",
    "parse_module",
    "target_names",
    "to_json",
    "Analysis",
    "Capture",
    "Comparison",
    "Launch",
    "CaptureError",
    "DumpError",
    "HloAnalysisError",
    "HloParseError",
    "UnknownOptionError",
    "UnknownTargetError",
]


class _Package(ModuleType):
    """Keeps `hlo_analysis.capture` the function: the import system would bind the folder of that name over it."""

    def __setattr__(self, name: str, value: object) -> None:
        if name not in _HOMES or not isinstance(value, ModuleType):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})


# At import: a library user's first use of JAX, before any capture, would show the CUDA plugin's complaint otherwise.
silence_missing_gpu()
