"""What jax 0.11.2's Mosaic GPU interpreter lacks of accumulators, for tests only: `accumulator[...] = values`."""

from __future__ import annotations

import functools

import jax
import numpy as np
from jax._src import callback
from jax._src.pallas.mosaic_gpu import primitives
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks, jaxpr_interpret, shared_memory


def extend(monkeypatch) -> None:
    """Adds it, until the test ends."""
    # The interpreter compares primitives with the module's attributes when it comes to them. This one is of tensor
    # memory, which Hopper has not.
    monkeypatch.setattr(primitives, "wait_load_tmem_p", primitives.wgmma_accumulator_store_p)
    monkeypatch.setattr(jaxpr_interpret.JaxprInterpreter, "_interpret_wait_load_tmem_p", _interpret_store)


def _interpret_store(self, eqn, token, invals):
    accumulator, value = invals
    store = functools.partial(_store, source_info=eqn.source_info)
    token = callback.io_callback(
        store,
        gpu_callbacks.TOKEN_SHAPE_DTYPE,
        token=token,
        mesh_location=self.mesh_location,
        thread=self.thread,
        key=accumulator,
        value=value,
    )
    # Nothing reads what the primitive returns before references are discharged.
    return token, jax.numpy.zeros(eqn.outvars[0].aval.shape, eqn.outvars[0].aval.dtype)


@gpu_callbacks.fail_on_exception
def _store(*, token, mesh_location, thread, key, value, source_info):
    memory = gpu_callbacks._get_shared_memory()
    logging_info = shared_memory.GPULoggingInfo(mesh_location, thread, source_info)
    key = shared_memory.HostAllocationKey.from_array(key)
    place = memory.access(key, ())
    memory.store_buffer_content(key, place, np.asarray(value), thread, logging_info=logging_info)
    return token
