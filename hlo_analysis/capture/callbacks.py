"""Lets `jax.debug.print`, `io_callback` and `pure_callback` lower for a GPU that is not there.

JAX asks for the devices that will call back, of the platform that it lowers for, though for a GPU it then writes a
custom call that names none of them. While a capture lowers, the devices of this machine stand for them: nothing runs.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from hlo_analysis.capture.patches import Patch


def _any_backend(original: Callable[..., Any], _: bool, context: Any, optional: bool = False) -> Any:
    if optional or context.backend is None or tuple(context.platforms) != ("cuda",):
        return original(context, optional)
    return context.backend


_BACKEND = Patch("jax._src.interpreters.mlir", {"get_backend": _any_backend}, owner="ModuleContext")


def answer_for_callbacks() -> AbstractContextManager[None]:
    """Within the block, and in this thread only, any devices stand for the GPUs that call back."""
    return _BACKEND.applied(True)
