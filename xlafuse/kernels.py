"""Fused transformer operations: the public functions of the package `pallas_kernels`, which load on first use."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pallas_kernels

if TYPE_CHECKING:
    from pallas_kernels import *  # noqa: F403

__all__ = pallas_kernels.__all__  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(pallas_kernels, name)


def __dir__() -> list[str]:
    return sorted(__all__)
