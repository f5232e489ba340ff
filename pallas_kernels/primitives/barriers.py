"""Barriers of a kernel's warpgroups: one where all of a block meet, and those that roles use in turn over a ring."""

from __future__ import annotations

from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax


def meet(barrier: Any) -> None:
    """Waits for all warpgroups of a block, which then see what each has written to shared memory."""
    plgpu.commit_smem()
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
