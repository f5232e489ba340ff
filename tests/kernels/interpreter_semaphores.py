"""What jax 0.11.2's Mosaic GPU interpreter lacks of semaphores, for tests only: those that all blocks share.

The interpreter runs one block after the other, so that a wait for another block is over when it begins, or never will
be; only a warpgroup of the same block may still signal.
"""

from __future__ import annotations

import time
from collections import Counter
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax._src import callback
from jax._src.pallas import primitives as pallas_primitives
from jax._src.pallas.mosaic_gpu import primitives
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks, jaxpr_interpret

_SECONDS = 5.0
"""After which no warpgroup of the same block is thought to signal any more."""


def extend(monkeypatch) -> Counter:
    """Adds it, until the test ends; gives the counts of signals by the semaphore's number and place."""
    counts: Counter = Counter()
    clocks: dict = {}
    # The interpreter compares primitives with the module's attributes when it comes to them. The first two are of
    # cancelled clusters and the last of tensor memory, neither of which Hopper has.
    monkeypatch.setattr(primitives, "try_cluster_cancel_p", pallas_primitives.get_global_p)
    monkeypatch.setattr(primitives, "query_cluster_cancel_p", primitives.semaphore_signal_p)
    monkeypatch.setattr(primitives, "commit_tmem_p", primitives.semaphore_wait_p)

    def get_global(self, eqn, token, get_invals):
        del self, get_invals
        return token, jnp.int32(hash(eqn.outvars[0]) % 2**30)

    def signal(self, eqn, token, get_invals):
        reference, transforms, value, *_ = jax.tree.unflatten(eqn.params["args_tree"], get_invals())
        return _call(self, partial(_signal, counts, clocks), token, reference, transforms, value), []

    def wait(self, eqn, token, invals):
        reference, transforms, value, decrements = jax.tree.unflatten(eqn.params["args_tree"], invals)
        if decrements:
            raise NotImplementedError("waits that decrement the semaphore are not interpreted")
        return _call(self, partial(_wait, counts, clocks), token, reference, transforms, value), []

    interpreter = jaxpr_interpret.JaxprInterpreter
    monkeypatch.setattr(interpreter, "_interpret_try_cluster_cancel_p", get_global)
    monkeypatch.setattr(interpreter, "_interpret_query_cluster_cancel_p", signal)
    monkeypatch.setattr(interpreter, "_interpret_commit_tmem_p", wait)
    return counts


def _call(self, function, token, reference, transforms, value):
    places = [index for transform in transforms for index in jax.tree.leaves(transform)]
    return callback.io_callback(function, gpu_callbacks.TOKEN_SHAPE_DTYPE, token, self.thread, reference, places, value)


@gpu_callbacks.fail_on_exception
def _signal(counts, clocks, token, thread, reference, places, value):
    place = (int(reference), *map(int, places))
    memory = gpu_callbacks._get_shared_memory()
    if memory.detect_races:
        with memory.lock:
            memory.incr_clock(thread, take_lock=False)
            # A wait sees what all who signalled had seen.
            clocks.setdefault(place, memory.clocks[thread].copy()).update(memory.clocks[thread])
    counts[place] += int(value)
    return np.asarray(token)


@gpu_callbacks.fail_on_exception
def _wait(counts, clocks, token, thread, reference, places, value):
    place = (int(reference), *map(int, places))
    end = time.monotonic() + _SECONDS
    while counts[place] < int(value) and time.monotonic() < end:
        time.sleep(1e-3)
    if counts[place] < int(value):
        raise RuntimeError(f"a block waits for {int(value)} signals, and those before it gave {counts[place]}")
    memory = gpu_callbacks._get_shared_memory()
    if memory.detect_races and place in clocks:
        with memory.lock:
            memory.clocks[thread].update(clocks[place])
    return np.asarray(token)
