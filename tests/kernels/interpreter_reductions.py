"""What jax 0.11.2's Mosaic GPU interpreter lacks of TMA, for tests only: copies from shared memory that add."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import numpy as np
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks


def extend(monkeypatch) -> None:
    """Adds it, until the test ends."""
    monkeypatch.setattr(gpu_callbacks, "copy_smem_to_gmem", partial(_copy, gpu_callbacks.copy_smem_to_gmem))


class _AddingTask(gpu_callbacks.AsyncCopySmemToGmemTask):
    """Stores the sum of what is there and what comes. Two at once in one place count as a race, though TMA has none."""

    def __call__(self, tma_thread_id: int) -> None:
        shared_memory = gpu_callbacks._get_shared_memory()
        self.pre_read(tma_thread_id, shared_memory)
        value = self._read(shared_memory, self.src_allocation_key, self.src_access)
        self.post_read(tma_thread_id, shared_memory)
        shape = tuple(shared_memory.buffer_shape_and_dtype(self.dst_allocation_key).shape)
        store = gpu_callbacks._clip_store_to_shape(self.dst_access, value, shape)
        if store is not None:
            place, value = store
            total = np.asarray(self._read(shared_memory, self.dst_allocation_key, place)) + np.asarray(value)
            shared_memory.store_buffer_content(
                self.dst_allocation_key, place, total, self.thread, logging_info=self.logging_info
            )
        self.post_write(tma_thread_id, shared_memory)

    def _read(self, shared_memory: Any, key: Any, place: Any) -> Any:
        value, _, _ = shared_memory.get_buffer_content(key, place, self.thread, logging_info=self.logging_info)
        return value


@gpu_callbacks.fail_on_exception
def _copy(plain: Any, *, reduction_op: Any, **arguments: Any) -> Any:
    if reduction_op is None:
        return plain(reduction_op=None, **arguments)
    if reduction_op != "add" or arguments["predicate"] is not None:
        raise NotImplementedError(f"reductions of {reduction_op!r}, and with a predicate, are not interpreted")
    shared_memory = gpu_callbacks._get_shared_memory()
    thread = arguments["thread"]
    keys, places = [], []
    for side in ("src", "dst"):
        key = gpu_callbacks.HostAllocationKey.from_array(arguments[f"{side}_allocation_key_as_array"])
        transforms = gpu_callbacks._remove_noop_transforms(arguments[f"{side}_transforms"])
        keys.append(key)
        places.append(shared_memory.access(key, jax.tree.map(int, transforms)))
    task = _AddingTask(
        mesh_location=arguments["mesh_location"],
        thread=thread,
        src_allocation_key=keys[0],
        src_access=places[0],
        dst_allocation_key=keys[1],
        dst_access=places[1],
        source_info=arguments["source_info"],
        clock=shared_memory.incr_clock(thread) if shared_memory.detect_races else None,
    )
    shared_memory.execute_async_task(task)
    return arguments["token"]
