"""Callbacks that take NumPy arrays, and warpgroups that share a program and their arguments, for tests only.

jax 0.11.2 gives the callbacks of a program JAX arrays, which takes longer than what the interpreter does with them: it
makes NumPy arrays of them. The program of a block's warpgroups it traces and lowers anew for each of them, and moves
the arguments, which are the same, to the device for each.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax._src import callback
from jax._src.pallas.mosaic.interpret import thread_map
from jax._src.pallas.mosaic_gpu.interpret import shared_memory


def extend(monkeypatch) -> None:
    """Adds it, until the test ends."""
    plain = shared_memory._to_int
    monkeypatch.setattr(shared_memory, "_to_int", lambda x: x.item() if isinstance(x, np.ndarray) else plain(x))
    monkeypatch.setattr(callback, "io_callback_impl", _called)
    monkeypatch.setattr(thread_map, "_thread_map_callback", _in_threads)


def _called(*arguments: np.ndarray, callback: Any, **_: Any) -> Any:
    # The arrays are the program's own, and gone when the callback ends.
    return [np.asarray(result) for result in callback(*map(np.array, arguments))]


def _in_threads(jaxpr, token, device_id, num_threads, consts, invals, *, on_exception):
    shared = jax.block_until_ready(jax.device_put((consts, invals)))
    consts, flat = shared[0], jax.tree.leaves(shared[1])
    count = int(num_threads)
    program = jax.jit(thread_map._run, static_argnums=0).lower(jaxpr, consts, _number(0), *flat).compile()
    with ThreadPoolExecutor(max_workers=count) as threads:
        running = [threads.submit(program, consts, _number(i), *flat) for i in range(count)]
    exceptions = [thread.exception() for thread in running]
    for exception in filter(None, exceptions):
        on_exception(exception, device_id=None if device_id is None else int(device_id), token=token)
        raise exception
    return token


@cache
def _number(number: int) -> jax.Array:
    return jnp.int32(number)
