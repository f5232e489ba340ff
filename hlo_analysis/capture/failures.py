"""Turns XLA's errors into ours."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hlo_analysis.errors import CaptureError
from hlo_analysis.targets import Target


def is_missing_ptxas(error: str) -> bool:
    """True when XLA got as far as machine code and had no assembler."""
    return "ptxas" in error


def compile_error(result: Mapping[str, Any], target: Target, last_words: str) -> CaptureError:
    """The error to raise for a failed compilation."""
    return CaptureError(f"XLA could not compile for {target.name}: {result['error']}", last_words=last_words)
