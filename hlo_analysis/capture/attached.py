"""The GPU in this machine as a target: asked in a process of its own, so that the user's process stays as it is."""

from __future__ import annotations

import functools
import os
import tempfile
from dataclasses import replace
from pathlib import Path

from hlo_analysis.capture.plugin_log import has_nvidia_gpu
from hlo_analysis.capture.process import Worker
from hlo_analysis.errors import DumpError, UnknownTargetError
from hlo_analysis.targets import Target, load_target, target_from_config

# The parent may hold most of the GPU's memory: take what the tuning needs, when it needs it.
ENVIRONMENT = {"JAX_PLATFORMS": "cuda,cpu", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
_ASKING_SECONDS = 120.0


def attached_target() -> Target:
    """The first GPU that a new JAX process sees, named as the lowering needs it; its peaks come after compiling.

    Raises:
      UnknownTargetError: no GPU, or none that JAX can use.
    """
    if not has_nvidia_gpu():
        raise UnknownTargetError(
            "target 'attached' needs an NVIDIA GPU, and this machine shows none; for a GPU that is not here use a "
            "named target such as 'h200'"
        )
    return _ask(os.environ.get("CUDA_VISIBLE_DEVICES"))


@functools.cache
def _ask(visible_devices: str | None) -> Target:
    del visible_devices  # only the cache's key
    with tempfile.TemporaryDirectory(prefix="hlo_capture_") as folder, Worker(Path(folder), ENVIRONMENT) as worker:
        answer = worker.ask({"kind": "describe"}, _ASKING_SECONDS)
        if not answer["ok"]:
            raise UnknownTargetError(f"target 'attached': JAX cannot use the GPU: {answer['error']}")
    major, _, minor = str(answer["compute_capability"]).partition(".")
    if int(major) < 8:
        raise UnknownTargetError(
            f"target 'attached' ({answer['device_kind']}) has compute capability {major}.{minor}: 8.0 (Ampere) or "
            "later is needed"
        )
    cudnn = int(answer["cudnn_version"])
    return replace(
        load_target("attached"),
        device_kind=answer["device_kind"],
        core_count=int(answer["core_count"]),
        compute_capability=(int(major), int(minor or 0)),
        cudnn_version=(cudnn // 10000, cudnn // 100 % 100, cudnn % 100),
    )


def with_config(target: Target, config_text: str | None) -> Target:
    """The attached GPU with its peaks, once XLA has written its target config."""
    if config_text is None:
        return target
    try:
        described = target_from_config(target.name, config_text)
    except (DumpError, UnknownTargetError):
        return target
    return replace(target, device=described.device, config_text=config_text)
