"""What jax 0.11.2's Mosaic GPU interpreter lacks and our kernels use, for tests only.

- `plgpu.async_store_smem`: a store to the shared memory of another block of the cluster, and an arrival at a barrier
  there. Clusters have one axis here.
- `plgpu.wgmma` with its left operand in registers.
"""

from __future__ import annotations

import functools
import time
from typing import Any

import jax
import numpy as np
from jax._src import callback
from jax._src.pallas.mosaic_gpu import primitives
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks, jaxpr_interpret, shared_memory

_PATIENCE_SECONDS = 60.0
"""How long a block may take to allocate what another one stores to."""


def extend(monkeypatch) -> None:
    """Adds it, until the test ends."""
    # The interpreter compares primitives with the module's attributes when it comes to them. Those of tensor memory,
    # which Hopper has not, are free.
    monkeypatch.setattr(primitives, "async_load_tmem_p", primitives.async_store_smem_p)
    monkeypatch.setattr(jaxpr_interpret.JaxprInterpreter, "_interpret_async_load_tmem_p", _interpret_async_store_smem)
    monkeypatch.setattr(gpu_callbacks, "wgmma", _wgmma)


def _interpret_async_store_smem(self, eqn, token, invals):
    value, ref, barrier, block, *leaves = invals
    ref_tree, barrier_tree = eqn.params["ref_transforms_treedef"], eqn.params["barrier_transforms_treedef"]
    ref_leaves, barrier_leaves = leaves[: ref_tree.num_leaves], leaves[ref_tree.num_leaves :]
    ref, transforms = jaxpr_interpret.resolve_ref(eqn.invars[1].aval, ref, jax.tree.unflatten(ref_tree, ref_leaves))
    if eqn.params["atomic"] is not None:
        raise NotImplementedError("atomic stores to another block are not interpreted")
    token = callback.io_callback(
        functools.partial(_async_store_smem, source_info=eqn.source_info),
        gpu_callbacks.TOKEN_SHAPE_DTYPE,
        token=token,
        mesh_location=self.mesh_location,
        thread=self.thread,
        block=block,
        key=ref,
        transforms=transforms,
        barrier=jaxpr_interpret._get_barrier_allocation_key_from_inval(barrier, barrier_tree, barrier_leaves),
        value=value,
    )
    return token, []


@gpu_callbacks.fail_on_exception
def _async_store_smem(*, token, mesh_location, thread, block, key, transforms, barrier, value, source_info):
    memory = gpu_callbacks._get_shared_memory()
    key, barrier = (_in_block(array, int(block)) for array in (key, barrier))
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while not (key in memory.mem and barrier in memory.mem):
        memory.check_failed()
        if time.monotonic() > deadline:
            raise TimeoutError(f"block {int(block)} has not allocated what {thread} stores to")
        time.sleep(0.001)
    gpu_callbacks._swap(
        token, mesh_location, thread, key.as_np_array, transforms, np.asarray(value), None, source_info=source_info
    )
    gpu_callbacks._barrier_arrive(token, mesh_location, thread, barrier.as_np_array, source_info=source_info)
    return token


def _in_block(key_as_array, block: int) -> Any:
    key = shared_memory.HostAllocationKey.from_array(key_as_array)
    return shared_memory.HostAllocationKey(
        memory_space_id=key.memory_space_id,
        device_id=key.device_id,
        block_id=block,
        thread_id=key.thread_id,
        initial_ref_count=key.initial_ref_count,
        buffer_id=key.buffer_id,
    )


_wgmma_of_refs = gpu_callbacks.wgmma


def _wgmma(*, a_allocation_key_as_array, a_transforms, **others):
    if np.ndim(a_allocation_key_as_array) == 1:
        return _wgmma_of_refs(a_allocation_key_as_array=a_allocation_key_as_array, a_transforms=a_transforms, **others)
    return _wgmma_of_registers(a=a_allocation_key_as_array, **others)


@gpu_callbacks.fail_on_exception
def _wgmma_of_registers(
    *,
    token,
    a,
    mesh_location,
    thread,
    acc_allocation_key_as_array,
    acc_transforms,
    b_allocation_key_as_array,
    b_transforms,
    source_info=None,
):
    memory = gpu_callbacks._get_shared_memory()
    logging_info = shared_memory.GPULoggingInfo(mesh_location, thread, source_info)

    def content(key_as_array, transforms) -> tuple[Any, Any, Any]:
        key = shared_memory.HostAllocationKey.from_array(key_as_array)
        transforms = jax.tree.map(int, gpu_callbacks._remove_noop_transforms(transforms))
        place = memory.access(key, transforms)
        value, _, _ = memory.get_buffer_content(key, place, thread, logging_info=logging_info)
        return key, place, value

    _, _, b = content(b_allocation_key_as_array, b_transforms)
    key, place, accumulator = content(acc_allocation_key_as_array, acc_transforms)
    product = np.asarray(a).astype(np.float32) @ np.asarray(b).astype(np.float32)
    memory.store_buffer_content(
        key, place, accumulator + product.astype(accumulator.dtype), thread, logging_info=logging_info
    )
    return token
