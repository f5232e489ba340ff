"""The decorator of public operations: it settles where a call runs, before the operation runs.

A call runs at once where nothing is traced, or where XLA does not partition the program. Else it first runs only until
`dispatch.choose` takes a kernel, and then as what one device computes and what several share (`partitioned.py`), or as
parts that the axes of an explicit mesh cut (`explicit.py`).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.core import Tracer

from pallas_kernels.primitives.call import Call, KernelChosen, is_settled, open_to, uninterpretable
from pallas_kernels.primitives.context import assigned
from pallas_kernels.primitives.derivatives import first_order
from pallas_kernels.primitives.explicit import by_explicit_axes, is_explicit, on_one_device
from pallas_kernels.primitives.interpreter import reason_against
from pallas_kernels.primitives.partitioned import Reference, automatic_axes, by_devices, may_be_partitioned
from pallas_kernels.primitives.platform import is_interpreted
from pallas_kernels.primitives.settings import usual_promotion
from pallas_kernels.primitives.sharded import shared_by


def operation[**P, T](function: Callable[P, T]) -> Callable[P, T]:
    """Wraps the public function of an operation, which has an `implementation` and calls `dispatch.choose`.

    Its arrays are promoted as `usual_promotion` says. All implementations but "xla" refuse derivatives that the kernels
    do not have, and are cut over the devices of their arguments by the function's `dimensions` (see `shares`).
    """
    name = function.__name__

    @functools.wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> T:
        with usual_promotion():
            if kwargs.get("implementation") in ("xla", ("xla",), ["xla"]):
                return function(*args, **kwargs)
            args, kwargs = first_order(name, (args, kwargs))
            key = kwargs.get("dropout_key")
            if isinstance(key, jax.Array) and jnp.issubdtype(key.dtype, jax.dtypes.prng_key) and not key.ndim:
                kwargs = {**kwargs, "dropout_key": jax.random.key_data(key)}  # XLA's partitioner knows no keys
            if is_settled(name):
                return function(*args, **kwargs)
            call = Call.of(function, getattr(called, "dimensions", None), args, kwargs)
            is_asked = kwargs.get("implementation") is not None
            if is_interpreted():
                reason = reason_against(call, tuple(call.arrays), with_gradient=not is_asked)
                with assigned(uninterpretable, None if reason is None else (name, reason)):
                    return function(*args, **kwargs)
            if not any(isinstance(array, Tracer) for array in call.arrays):
                return function(*args, **kwargs)
            if call.dimensions is not None and is_explicit() and _is_cut(call):
                with on_one_device():
                    with assigned(open_to, name), contextlib.suppress(KernelChosen):  # checks and records the call
                        jax.eval_shape(call.unsettled, *call.structs)
                    shared = shared_by(call)
                if shared is not None:
                    return by_explicit_axes(shared)(*call.arrays)
            is_left_to_xla = call.dimensions is None and automatic_axes() and not is_asked
            if is_left_to_xla or not may_be_partitioned():
                return function(*args, **kwargs)
            with assigned(open_to, name), contextlib.suppress(KernelChosen):
                return function(*args, **kwargs)
            several = shared_by(call) or Reference(function=call.reference)
            return by_devices(name, call, several)(*call.arrays)

    return called


def _is_cut(call: Call) -> bool:
    """Returns whether axes of an explicit mesh cut one of the arrays."""
    return any(any(jax.typeof(array).sharding.spec) for array in call.arrays)
