"""Lets `jax.nn.dot_product_attention(implementation="cudnn")` trace for a GPU that is not there.

JAX asks the attached GPU three things while it traces cuDNN attention: cuDNN's version, whether the compute capability
is at least some value, and whether it equals one. While a capture lowers, these questions are answered from the target.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

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


_CHECKS = Patch(
    "jax._src.cudnn.fused_attention_stablehlo",
    {
        "check_cudnn_version": _version,
        "check_compute_capability": _is_at_least,
        "is_cuda_compute_capability_equal": _is_equal,
    },
)


def answer_cudnn_checks(target: Target) -> AbstractContextManager[None]:
    """Within the block, and in this thread only, cuDNN's checks describe `target`."""
    return _CHECKS.applied(target)
