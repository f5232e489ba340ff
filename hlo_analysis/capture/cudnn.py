"""Lets `jax.nn.dot_product_attention(implementation="cudnn")` trace for a GPU that is not there.

JAX asks the attached GPU three things while it traces cuDNN attention: cuDNN's version, whether the compute capability
is at least some value, and whether it equals one. While a capture lowers, these questions are answered from the target;
in other threads, and outside a capture, JAX's own functions answer as ever.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

from hlo_analysis.targets import Target

_ANSWERING: ContextVar[Target | None] = ContextVar("cudnn_target", default=None)
_LOCK = threading.Lock()
_originals: dict[str, Callable[..., Any]] = {}
_depth = 0


def _cudnn_version(target: Target) -> int:
    major, minor, patch = target.cudnn_version
    return major * 10000 + minor * 100 + patch


def _capability(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split("."))


_ANSWERS: dict[str, Callable[..., Any]] = {
    "check_cudnn_version": _cudnn_version,
    "check_compute_capability": lambda target, capability: target.compute_capability >= _capability(capability),
    "is_cuda_compute_capability_equal": lambda target, capability: target.compute_capability == _capability(capability),
}


def _answer(name: str) -> Callable[..., Any]:
    def ask(*arguments: Any) -> Any:
        target = _ANSWERING.get()
        return _originals[name](*arguments) if target is None else _ANSWERS[name](target, *arguments)

    return ask


@contextlib.contextmanager
def answer_cudnn_checks(target: Target) -> Iterator[None]:
    """Within the block, and in this thread only, cuDNN's checks describe `target`."""
    global _depth
    from jax._src.cudnn import fused_attention_stablehlo as module

    with _LOCK:
        if _depth == 0:
            for name in _ANSWERS:
                _originals[name] = getattr(module, name)
                setattr(module, name, _answer(name))
        _depth += 1
    token = _ANSWERING.set(target)
    try:
        yield
    finally:
        _ANSWERING.reset(token)
        with _LOCK:
            _depth -= 1
            if _depth == 0:
                for name, original in _originals.items():
                    setattr(module, name, original)
