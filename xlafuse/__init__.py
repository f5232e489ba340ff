"""Compares fusion strategies on a JAX program, and has fused operations for it (`xlafuse.kernels`).

Names are loaded when first used, so that `import xlafuse` costs nothing and asks no device.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from hlo_analysis.capture.plugin_log import silence_missing_gpu

if TYPE_CHECKING:
    from xlafuse import kernels
    from xlafuse.comparison import compare
    from xlafuse.errors import ComparisonError, InapplicablePlanError, UnknownNameError, XlafuseError
    from xlafuse.models import PRESETS, BlockConfig, FusionPlan, TransformerBlock, block_function
    from xlafuse.strategies import STRATEGIES, Strategy, get_strategy

__all__ = [
    "PRESETS",
    "STRATEGIES",
    "BlockConfig",
    "ComparisonError",
    "FusionPlan",
    "InapplicablePlanError",
    "Strategy",
    "TransformerBlock",
    "UnknownNameError",
    "XlafuseError",
    "block_function",
    "compare",
    "get_strategy",
    "kernels",
]

_HOMES = {
    "xlafuse.comparison": ("compare",),
    "xlafuse.errors": ("ComparisonError", "InapplicablePlanError", "UnknownNameError", "XlafuseError"),
    "xlafuse.models": ("PRESETS", "BlockConfig", "FusionPlan", "TransformerBlock", "block_function"),
    "xlafuse.strategies": ("STRATEGIES", "Strategy", "get_strategy"),
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name == "kernels":
        return import_module("xlafuse.kernels")
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_HOME_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)


# At import: a first use of JAX before any capture would show the CUDA plugin's complaint about the missing GPU.
silence_missing_gpu()
