"""Compiles a program and keeps everything that XLA reports: `capture(fn, *shapes, target="h200")`."""

from __future__ import annotations

from hlo_analysis.capture.api import capture, record_autotune
from hlo_analysis.capture.archive import Capture
from hlo_analysis.capture.autotune import merge_autotune
from hlo_analysis.capture.limits import Limits
from hlo_analysis.capture.manifest import Manifest
from hlo_analysis.capture.plugin_log import has_nvidia_gpu, silence_missing_gpu

__all__ = [
    "Capture",
    "Limits",
    "Manifest",
    "capture",
    "has_nvidia_gpu",
    "merge_autotune",
    "record_autotune",
    "silence_missing_gpu",
]
