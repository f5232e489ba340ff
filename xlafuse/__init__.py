"""Compares fusion strategies on a JAX program and offers fused operations for it (`xlafuse.kernels`).

Names load on first use, so that `import xlafuse` is quick and asks for no device.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from hlo_analysis.capture.plugin_log import silence_missing_gpu

if TYPE_CHECKING:
    from xlafuse import kernels, losses, nnx
    from xlafuse.attention import dot_product_attention
    from xlafuse.comparison import compare
    from xlafuse.errors import ComparisonError, InapplicablePlanError, UnknownNameError, XlafuseError
    from xlafuse.fusion import fuse
    from xlafuse.models import PRESETS, BlockConfig, FusionPlan, TransformerBlock, block_function
    from xlafuse.strategies import STRATEGIES, Strategy, get_strategy
    from xlafuse.trials import try_remedies

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
    "dot_product_attention",
    "fuse",
    "get_strategy",
    "kernels",
    "losses",
    "nnx",
    "try_remedies",
]

_HOMES = {
    "xlafuse.attention": ("dot_product_attention",),
    "xlafuse.comparison": ("compare",),
    "xlafuse.errors": ("ComparisonError", "InapplicablePlanError", "UnknownNameError", "XlafuseError"),
    "xlafuse.fusion": ("fuse",),
    "xlafuse.models": ("PRESETS", "BlockConfig", "FusionPlan", "TransformerBlock", "block_function"),
    "xlafuse.strategies": ("STRATEGIES", "Strategy", "get_strategy"),
    "xlafuse.trials": ("try_remedies",),
}
_MODULES = ("kernels", "losses", "nnx")
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(f"xlafuse.{name}")
    if name not in _HOME_OF and name != "__version__":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name == "__version__":
        from importlib.metadata import version

        return version("xlafuse")
    value = getattr(import_module(_HOME_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)


# At import, because JAX may be used before any capture and would then print the CUDA plugin's complaint about the
# missing GPU.
silence_missing_gpu()
