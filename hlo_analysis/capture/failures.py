"""Turns XLA's failures into errors with a remedy."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from hlo_analysis.errors import CaptureError, UnknownOptionError
from hlo_analysis.targets import Target

_NO_SUCH_OPTION = re.compile(r"No such compile option: '([^']*)'")
# XLA looks for both in CUDA's folder, and the nvidia-cuda-nvcc wheel brings both.
_TOOLCHAIN = ("ptxas", "libdevice")
_SENTENCE_LENGTH = 300
_PARTITIONER = re.compile(r"custom_partitioner: Traceback.*?\nRuntimeError: ([^\n]*)", re.DOTALL)
"""What the process that knows how calls are cut answered; see `partitions.py`."""


def is_toolchain_failure(error: str) -> bool:
    """True when XLA got as far as machine code, and had no (working) assembler or device library."""
    return any(tool in error for tool in _TOOLCHAIN)


def first_sentence(error: str) -> str:
    """The start of an error, up to its first line's first full stop: what follows lists paths by the dozen."""
    line = error.strip().partition("\n")[0]
    return line.partition(". ")[0][:_SENTENCE_LENGTH].rstrip(" .,:") + "."


def compile_error(result: Mapping[str, Any], target: Target, last_words: str) -> CaptureError:
    """The error to raise for a compilation that XLA gave up."""
    message = str(result["error"])
    unknown = _NO_SUCH_OPTION.search(message)
    if unknown:
        return UnknownOptionError(
            f"XLA has no compiler option {unknown[1]!r}: expected a field of DebugOptions, which "
            "https://github.com/openxla/xla/blob/main/xla/xla.proto lists"
        )
    if target.kind == "cuda" and "topology not implemented" in message:
        return CaptureError(
            f"compiling for {target.name} needs XLA's CUDA compiler, which is not installed: "
            "pip install 'xlafuse[deviceless]' (Linux), or use target='cpu'"
        )
    if "RESOURCE_EXHAUSTED" in message or "out of memory" in message.lower():
        return CaptureError(f"XLA ran out of memory while compiling for {target.name}: {message}")
    if answer := _PARTITIONER.search(message):
        return CaptureError(f"{answer[1]} (a call on one device's parts, as XLA cuts them for {target.name})")
    return CaptureError(f"XLA could not compile for {target.name}: {message.strip()}", last_words=last_words)
