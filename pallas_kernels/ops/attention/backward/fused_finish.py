"""Blocks that make dquery of what the other blocks of a launch summed.

They come last, so that they run where the last round of the others leaves multiprocessors free: of 1024 blocks of as
much work each, 132 at a time, the last 100 leave 32 multiprocessors free for an eighth of the launch. A kernel of its
own behind all of them takes its time in addition.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.ops.attention.masking import Masking

_SWIZZLE = 128
"""Bytes, at most."""
TILES = 16
"""Of queries, that a block takes: few, so that the last ones to be ready are shared out among many blocks."""

Part = Callable[..., Any]
"""From (reference, batch, head, tile of queries, warpgroup) to what the warpgroup has of the tile."""


@dataclass(frozen=True)
class Done:
    """Where parts of dquery lie on their way to device memory, as TMA takes rows that are no whole groups.

    ref: to (slots, warpgroups, panels, rows, columns of a panel).
    """

    ref: Any

    @staticmethod
    def scratch(slots: int, warpgroups: int, rows: int, columns: int, dtype: jnp.dtype) -> Any:
        """The scratch type; columns: of a part. As many bytes as the part's sum has, which begins at the same place."""
        width = math.gcd(columns, _SWIZZLE // dtype.itemsize)
        swizzle = plgpu.SwizzleTransform(width * dtype.itemsize)  # pyright: ignore[reportAbstractUsage]
        room = jnp.dtype(jnp.float32).itemsize // dtype.itemsize
        return plgpu.SMEM((slots, warpgroups, room * columns // width, rows, width), dtype, transforms=(swizzle,))

    def _panels(self, slot: Any, warpgroup: Any, columns: int) -> Iterator[tuple[Any, Any]]:
        width = self.ref.shape[-1]
        for i in range(columns // width):
            yield pl.ds(i * width, width), self.ref.at[slot, warpgroup, i]

    def store(self, slot: Any, warpgroup: Any, values: jax.Array) -> None:
        """By the threads of a warpgroup."""
        for columns, panel in self._panels(slot, warpgroup, values.shape[1]):
            panel[...] = values[:, columns.start : columns.start + columns.size]

    def send(self, slot: Any, warpgroup: Any, target: Any) -> None:
        """By TMA."""
        for columns, panel in self._panels(slot, warpgroup, target.shape[1]):
            plgpu.copy_smem_to_gmem(panel, target.at[:, columns])


@dataclass(frozen=True, kw_only=True)
class Finishers:
    """Those blocks.

    rows: of a tile of queries. columns: of a tile of keys, for each of which one block adds to the sums. warpgroups:
    that compute. slots: tiles in shared memory at once.
    """

    masking: Masking
    batch: int
    heads: int
    rows: int
    columns: int
    warpgroups: int
    slots: int

    @property
    def tiles(self) -> int:
        """Of queries, in a head."""
        return pl.cdiv(self.masking.queries, self.rows)

    @property
    def blocks(self) -> int:
        """How many there are."""
        return self.batch * self.heads * pl.cdiv(self.tiles, TILES)

    def places(self, number: Any) -> tuple[Any, Callable[[Any], tuple[Any, Any, Any]]]:
        """How many tiles a block takes, by its number, and from n to the n-th one's (batch, head, tile).

        Blocks come in the order of heads, and tiles from a head's last one down, as they are ready.
        """
        of_a_head = pl.cdiv(self.tiles, TILES)
        place, i = lax.div(number, of_a_head), lax.rem(number, of_a_head)
        first = (of_a_head - 1 - i) * TILES
        count = jnp.minimum(self.tiles - first, TILES)
        b, head = lax.div(place, self.heads), lax.rem(place, self.heads)
        return count, lambda n: (b, head, first + count - 1 - n)

    def bring(self, number: Any, part_of: Part, sums: Any, share: Any, turns: Any, fetched: Any, read: Any) -> None:
        """What the warpgroup does that brings sums to shared memory, once all blocks have added."""
        count, at = self.places(number)

        def step(n, _):
            slot = lax.rem(n, self.slots)
            pl.when(n >= self.slots)(lambda: plgpu.barrier_wait(read.at[slot]))
            b, head, tile = at(n)
            adders = self.masking.key_tiles(tile * self.rows, self.rows, self.columns).last
            place = (b * self.heads + head) * self.tiles + tile
            plgpu.semaphore_wait(turns.at[place], adders, decrement=False, memory_scope="gpu")
            for i in range(self.warpgroups):
                plgpu.copy_gmem_to_smem(part_of(sums, b, head, tile, i), share.at[slot, i], fetched.at[slot])

        # No barrier may be left with an arrival that nobody has seen.
        def drain(n, _):
            plgpu.barrier_wait(read.at[lax.rem(n, self.slots)])

        lax.fori_loop(0, count, step, None)
        lax.fori_loop(jnp.maximum(count - self.slots, 0), count, drain, None)

    def finish(
        self,
        number: Any,
        part_of: Part,
        dquery: Any,
        share: Any,
        done: Done,
        fetched: Any,
        read: Any,
        *,
        warpgroup: Any,
        scale: float,
    ) -> None:
        """What a warpgroup does that computes; done: dquery, in the place of share."""
        count, at = self.places(number)

        def step(n, _):
            slot = lax.rem(n, self.slots)
            plgpu.barrier_wait(fetched.at[slot])
            total = share.at[slot, warpgroup][...]
            made = (total * scale).astype(dquery.dtype)
            plgpu.commit_smem()  # all have read
            done.store(slot, warpgroup, made)
            plgpu.commit_smem()
            done.send(slot, warpgroup, part_of(dquery, *at(n), warpgroup))
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            plgpu.barrier_arrive(read.at[slot])

        lax.fori_loop(0, count, step, None)
