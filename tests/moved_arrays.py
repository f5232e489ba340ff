"""Arrays that are only copied or laid out anew outside of `jit` are made by NumPy.

JAX compiles a program for each shape of each such call, also for that of `jnp.asarray` of a NumPy array: 15 ms of a
processor, and 480 of 1,880 programs of a part of tests/kernels. The bits are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np
from jax._src import core
from jax._src.array import ArrayImpl
from jax._src.lax import lax
from jax._src.literals import TypedNdArray
from jax.sharding import SingleDeviceSharding


def extend() -> None:
    """Has this process make them so."""
    moves = {core.stage_p: _same, lax.broadcast_in_dim_p: _broadcast, lax.reshape_p: _reshaped}
    for primitive, move in moves.items():
        primitive.def_impl(partial(_moved, primitive.impl, move))


def _moved(compiled: Callable[..., Any], move: Callable[..., np.ndarray], *operands: Any, **parameters: Any) -> Any:
    """What `move` makes of an array of one device, and otherwise what JAX's own program does."""
    if len(operands) > 1 or parameters.get("sharding") is not None or not _is_plain(operands[0]):
        return compiled(*operands, **parameters)
    return jax.device_put(np.array(move(np.asarray(operands[0]), **parameters)))  # of its own: NumPy's may change


def _is_plain(x: Any) -> bool:
    if not jax.sharding.get_abstract_mesh().empty:
        return False
    if isinstance(x, TypedNdArray):
        return not x.weak_type and x.dtype != jax.dtypes.float0 and jax.dtypes.canonicalize_dtype(x.dtype) == x.dtype
    return type(x) is ArrayImpl and isinstance(x.sharding, SingleDeviceSharding) and not (x.committed or x.weak_type)


def _same(x: np.ndarray) -> np.ndarray:
    return x


def _broadcast(x: np.ndarray, *, shape: Sequence[int], broadcast_dimensions: Sequence[int], **_: Any) -> np.ndarray:
    sizes = dict(zip(broadcast_dimensions, x.shape, strict=True))
    return np.broadcast_to(x.reshape([sizes.get(i, 1) for i in range(len(shape))]), shape)


def _reshaped(x: np.ndarray, *, new_sizes: Sequence[int], dimensions: Sequence[int] | None, **_: Any) -> np.ndarray:
    return (x if dimensions is None else x.transpose(dimensions)).reshape(new_sizes)
