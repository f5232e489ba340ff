"""The decorator of public operations: it settles where a call runs, before the operation runs.

A call runs at once where nothing is traced, or where XLA does not partition the program. Else it first runs only until
`dispatch.choose` takes a kernel, and then as what one device computes and what several share (`partitioned.py`), or as
parts that the axes of an explicit mesh cut (`explicit.py`).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer

from pallas_kernels.primitives.call import Call, KernelChosen, is_settled, open_to, uninterpretable
from pallas_kernels.primitives.context import assigned
from pallas_kernels.primitives.derivatives import first_order
from pallas_kernels.primitives.dimensions import BlockInPlace, Dimensions, Parts
from pallas_kernels.primitives.explicit import by_explicit_axes, is_explicit, on_one_device
from pallas_kernels.primitives.interpreter import reason_against
from pallas_kernels.primitives.partitioned import Reference, by_devices, may_be_partitioned
from pallas_kernels.primitives.platform import is_interpreted
from pallas_kernels.primitives.settings import usual_promotion
from pallas_kernels.primitives.sharded import shared_by


def operation[F: Callable[..., Any]](
    text: str | Callable[[Mapping[str, Any]], str],
    parts: Parts | None = None,
    *,
    scatters: bool = False,
    in_place: BlockInPlace | None = None,
) -> Callable[[F], F]:
    """Decorates the public function of an operation, which has an `implementation` and calls `dispatch.choose`.

        @operation("x: ... +k, w: k n, bias: n -> ... n", _by_features)

    Its arrays are promoted as `usual_promotion` says. All implementations but "xla" refuse derivatives that the kernels
    do not have, and are cut over the devices of their arguments.

    Args:
        text: the dimensions of each argument that is an array, and of the results, or a function of the arguments, by
            name, that returns it. "..." are leading dimensions, and "(g r)" is one dimension of two names, g the major
            one. "norm.scale" and "bias.0" are parts of arguments, and "t d | b t d" alternatives of different ranks. A
            name without a mark may be cut wherever it occurs. "!d": devices need it whole. So they do if it is in no
            result. "+k": `parts` sums over it, also "+..." over the leading dimensions. "key of ... d": a key from
            which bits are drawn for an array of these dimensions, "_" for one of size 1. "sizes of m": the sizes of
            runs of m, one after the other. A call with an array that the text does not have is left to XLA.
        parts: computes the results where a name with "+" is cut.
        scatters: whether `parts` has one sum over a name, of an array with the results' leading dimensions, before all
            that has not this name. Each device may then keep its rows of the sum alone.
        in_place: computes the results for one block of x's rows, for `overlapped_collectives`. Raises
            `NotImplementedError` where no kernel can.
    """
    dimensions = Dimensions(text=text, parts=parts, scatters=scatters, in_place=in_place)

    def decorated(function: F) -> F:
        name = function.__name__

        @functools.wraps(function)
        def called(*args: Any, **kwargs: Any) -> Any:
            with usual_promotion():
                if kwargs.get("implementation") in ("xla", ("xla",), ["xla"]):
                    return function(*args, **kwargs)
                args, kwargs = first_order(name, (args, kwargs))
                key = kwargs.get("dropout_key")
                if isinstance(key, jax.Array) and jnp.issubdtype(key.dtype, jax.dtypes.prng_key) and not key.ndim:
                    kwargs = {**kwargs, "dropout_key": jax.random.key_data(key)}  # XLA's partitioner knows no keys
                if is_settled(name):
                    return function(*args, **kwargs)
                call = Call.of(function, dimensions, args, kwargs)
                if is_interpreted():
                    with_gradient = kwargs.get("implementation") is None
                    reason = reason_against(call, tuple(call.arrays), with_gradient=with_gradient)
                    with assigned(uninterpretable, None if reason is None else (name, reason)):
                        return function(*args, **kwargs)
                is_traced = any(isinstance(array, Tracer) for array in call.arrays)
                if is_traced and is_explicit() and any(any(jax.typeof(array).sharding.spec) for array in call.arrays):
                    with on_one_device():
                        with assigned(open_to, name), contextlib.suppress(KernelChosen):  # checks the call
                            jax.eval_shape(call, *call.structs)
                        shared = shared_by(call)
                    if shared is not None:
                        return by_explicit_axes(shared)(*call.arrays)
                if not is_traced or not may_be_partitioned():
                    return function(*args, **kwargs)
                with assigned(open_to, name), contextlib.suppress(KernelChosen):
                    return function(*args, **kwargs)
                several = shared_by(call) or Reference(function=call.reference)
                return by_devices(name, call, several)(*call.arrays)

        called.dimensions = dimensions  # pyright: ignore[reportAttributeAccessIssue]
        return called  # pyright: ignore[reportReturnType]

    return decorated
