"""Barriers of a kernel's warpgroups: one where all of a block meet, and those that roles use in turn over a ring."""

from __future__ import annotations

from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jaxlib.mlir.dialects import nvvm

from pallas_kernels.primitives.platform import is_interpreted


def fence() -> None:
    """Lets TMA and products that start after a barrier see what a thread wrote to shared memory before it arrived.

    `plgpu.commit_smem` also lets the warpgroup's threads wait for each other, which the barrier does anyway.
    """
    if is_interpreted():
        plgpu.commit_smem()
        return

    @plgpu.inline_mgpu()
    def order(_):
        nvvm.fence_proxy(nvvm.ProxyKind.async_shared, space=nvvm.SharedSpace.shared_cta)

    order()  # pyright: ignore[reportCallIssue]: JAX gives the argument


def meet(barrier: Any) -> None:
    """Waits for all warpgroups of a block, which then see what each has written to shared memory."""
    fence()
    plgpu.barrier_arrive(barrier)
    plgpu.barrier_wait(barrier)


def drain(barriers: Any, count: int, steps: jax.Array, first: int | None = None) -> None:
    """Waits once more for each of `count` barriers that were used in turn over the steps, the `first` to begin with.

    Every arrival must be waited for, and no block of a cluster may exit early.
    """

    def one(i, _):
        place = lax.rem(i, count)
        plgpu.barrier_wait(barriers.at[place if first is None else first + place])

    lax.fori_loop(jnp.maximum(steps - count, 0), steps, one, None)
