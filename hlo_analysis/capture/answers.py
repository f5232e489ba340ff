"""Answers what JAX asks of a GPU while it traces and lowers for one that is not there.

For cuDNN attention JAX asks for cuDNN's version and the compute capability: both are the target's. For
`jax.debug.print`, `io_callback` and `pure_callback` it asks for the devices that will call back, of the platform that
it lowers for, though for a GPU it then writes a custom call that names none of them: the devices of this machine stand
for them, as nothing runs.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from hlo_analysis.capture.patches import Patch
from hlo_analysis.targets import Target


def _version(_: Callable[..., int], target: Target) -> int:
    major, minor, patch = target.cudnn_version
    return major * 10000 + minor * 100 + patch


def _is_at_least(_: Callable[..., bool], target: Target, capability: str) -> bool:
    return target.compute_capability >= _capability(capability)


def _is_equal(_: Callable[..., bool], target: Target, capability: str) -> bool:
    return target.compute_capability == _capability(capability)


def _capability(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split("."))


def _any_backend(original: Callable[..., Any], _: bool, context: Any, optional: bool = False) -> Any:
    if optional or context.backend is None or tuple(context.platforms) != ("cuda",):
        return original(context, optional)
    return context.backend


_CHECKS = Patch(
    "jax._src.cudnn.fused_attention_stablehlo",
    {
        "check_cudnn_version": _version,
        "check_compute_capability": _is_at_least,
        "is_cuda_compute_capability_equal": _is_equal,
    },
)
_BACKEND = Patch("jax._src.interpreters.mlir", {"get_backend": _any_backend}, owner="ModuleContext")


def answer_cudnn_checks(target: Target) -> AbstractContextManager[None]:
    """Within the block, and in this thread only, cuDNN's checks describe `target`."""
    return _CHECKS.applied(target)


def answer_for_callbacks() -> AbstractContextManager[None]:
    """Within the block, and in this thread only, any devices stand for the GPUs that call back."""
    return _BACKEND.applied(True)
