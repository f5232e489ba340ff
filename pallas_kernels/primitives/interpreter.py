"""Says which kernels JAX's interpreter for Mosaic GPU (`plgpu.force_gpu_interpret_mode`) cannot run.

It ends some of them with an error about its own internals, and gives NaN for others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax._src.pallas.mosaic_gpu import primitives
from jax._src.pallas.mosaic_gpu.core import AbstractRefUnion
from jax._src.state import AbstractRef
from jax.extend.core import jaxprs_in_params

from pallas_kernels.primitives.derivatives import with_pullback

_ABSENT = {
    primitives.async_store_smem_p: "stores to the shared memory of another block",
    primitives.wgmma_accumulator_store_p: "stores to accumulators",
    primitives.semaphore_signal_p: "semaphores",
    primitives.semaphore_wait_p: "semaphores",
}
"""What the interpreter of jax 0.11.2 has no code for, by primitive."""

IS_COMPLETE = False
"""Tests that add all this to the interpreter set it."""


class NotInterpretable(NotImplementedError):
    """The interpreter lacks something that a kernel needs."""

    def __init__(self, missing: str) -> None:
        self.reason = f"the kernel needs {missing}, which JAX's interpreter for Mosaic GPU lacks"
        super().__init__(f"{self.reason}. Pass implementation='xla', or None for the best that runs here.")


def check(launch: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    """Raises `NotInterpretable` if the interpreter cannot run the kernel that `launch` calls."""
    if IS_COMPLETE:
        return
    closed = jax.make_jaxpr(launch)(*args, **kwargs)
    if found := next(_lacking(closed.jaxpr), None):
        raise NotInterpretable(found)


def reason_against(call: Callable[..., Any], arrays: tuple[Any, ...], *, with_gradient: bool) -> str | None:
    """Returns why the interpreter cannot run a function's kernels, or None if it can.

    with_gradient: whether to ask for its gradient's kernels, too.
    """

    def traced(*arrays: Any) -> Any:
        if not with_gradient:
            return call(*arrays)
        wanted = [jnp.issubdtype(array.dtype, jnp.inexact) for array in arrays]
        results, pullback = with_pullback(call, wanted, *arrays)
        return pullback(jax.tree.map(jnp.ones_like, results))

    if IS_COMPLETE:
        return None
    try:
        jax.make_jaxpr(traced)(*arrays)
    except NotInterpretable as error:
        return error.reason
    return None


def _lacking(jaxpr: Any) -> Iterator[str]:
    if any(isinstance(variable.aval, AbstractRefUnion) for variable in jaxpr.invars):
        yield "one memory under several references"
    for equation in jaxpr.eqns:
        if equation.primitive in _ABSENT:
            yield _ABSENT[equation.primitive]
        elif equation.primitive is primitives.wgmma_ref_p and not isinstance(equation.invars[1].aval, AbstractRef):
            yield "wgmma with its left operand in registers"
        elif equation.primitive is primitives.copy_smem_to_gmem_p and equation.params["reduction_op"] is not None:
            yield "TMA copies that add"
        for inner in jaxprs_in_params(equation.params):
            yield from _lacking(inner)
