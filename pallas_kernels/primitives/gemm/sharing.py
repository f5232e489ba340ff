"""Stream-K: the last wave's tiles are shared by all blocks, where they would keep only some of them busy.

Of 1024 tiles 132 blocks take seven each, and then 100 of them one more while 32 wait. Here they take six each; what is
left, 232 tiles side by side, is one row of steps that is cut into 132 ranges of nearly the same length, at least a
tile's. A range's first tile was begun by the block before, whose range ends in it. So a block first multiplies the
beginning of the range's last tile and leaves the float32 sums in device memory, then takes the tile between, if there
is one, and at last goes on from where the block before it left off: that one has done so by then, as no range is
shorter than a tile. Each tile's steps are added up in their order, so that the results have the bits of one block's.

The semaphores by which blocks wait must be zero when the launch begins: XLA clears them in a launch of its own.

Source: Osama et al., "Stream-K: Work-centric Parallel Decomposition for Dense Matrix-Matrix Multiplication on the GPU",
2023, https://arxiv.org/abs/2301.03598
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.primitives.gemm.problem import Problem

_COLUMNS = 8
"""Of the float32 sums that lie together in memory, so that the threads of a warp write whole lines."""


class Part(NamedTuple):
    """Consecutive steps of a tile, all of them if nothing else is said.

    boundary: of the ranges: the number of the one that begins where the part's first or last step is.
    begins, ends: whether the tile's first and last steps are among them; known before the launch, or a traced boolean.
    """

    first: Any
    steps: Any
    boundary: Any = 0
    begins: Any = True
    ends: Any = True


@dataclass(frozen=True, kw_only=True)
class Sharing:
    """tiles: of the launch. blocks: or clusters, that take them. steps: of a tile. fewest: of a part of a tile."""

    tiles: int
    blocks: int
    steps: int
    fewest: int = 1

    @property
    def waves(self) -> int:
        """Whole tiles of each block, before the shared ones."""
        return self.tiles // self.blocks - 1

    @property
    def has_shared(self) -> bool:
        """Whether there is a last wave to share, and ranges are not shorter than a tile."""
        return self.tiles > self.blocks and self.tiles % self.blocks > 0 and self.steps >= 2 * self.fewest

    def start(self, block: Any) -> Any:
        """The first of a block's steps, counted over all shared tiles."""
        steps = self.steps
        start = lax.div((self.tiles - self.waves * self.blocks) * steps * block, self.blocks)
        tile, rest = lax.div(start, steps), lax.rem(start, steps)
        rest = jnp.where(rest < self.fewest, 0, jnp.where(rest > steps - self.fewest, steps, rest))
        return tile * steps + rest

    def for_each(self, block: Any, work: Callable[[Any, Part, Any], None]) -> Any:
        """Calls work(tile, part, steps before) for what a block takes, in turn; returns how many steps those are."""
        steps, waves = self.steps, self.waves
        first, last = self.start(block), self.start(block + 1)
        first_tile, done = lax.div(first, steps), lax.rem(first, steps)
        last_tile, head = lax.div(last, steps), lax.rem(last, steps)
        heads, tails = (head > 0).astype(jnp.int32), (done > 0).astype(jnp.int32)
        whole = last_tile - first_tile - tails

        def one(n, before):
            place = n - waves
            is_whole_wave = place < 0
            is_head = (place == 0) & (head > 0)
            is_tail = place == heads + whole
            shared = jnp.where(is_head, last_tile, jnp.where(is_tail, first_tile, first_tile + tails + place - heads))
            tile = jnp.where(is_whole_wave, n * self.blocks + block, waves * self.blocks + shared)
            part = Part(
                first=jnp.where(is_tail, done, 0),
                steps=jnp.where(is_head, head, jnp.where(is_tail, steps - done, steps)),
                boundary=jnp.where(is_head, block + 1, block),
                begins=place != heads + whole,
                ends=(place != 0) | (head == 0),
            )
            work(tile, part, before)
            return before + part.steps

        return lax.fori_loop(0, waves + heads + whole + tails, one, jnp.int32(0))


@dataclass(frozen=True, kw_only=True)
class Sums:
    """Where a warpgroup leaves the float32 sums of a tile's first steps, and finds those of the block before.

    places: the array of `type_of` in device memory. turns: a semaphore for each place. first, stride: the places of
    this warpgroup, from one boundary to the next.
    """

    places: Any
    turns: Any
    first: Any
    stride: int

    @staticmethod
    def type_of(problem: Problem, sharing: Sharing) -> jax.ShapeDtypeStruct:
        """(places, accumulators, columns / 8, rows, 8) float32, with a place for each warpgroup at each boundary."""
        count = sharing.blocks * problem.cluster_size * problem.config.warpgroups
        rows, columns = problem.config.warpgroup_rows, problem.width
        return jax.ShapeDtypeStruct((count, problem.accumulators, columns // _COLUMNS, rows, _COLUMNS), jnp.float32)

    @classmethod
    def of(cls, problem: Problem, places: Any, warpgroup: Any) -> Sums:
        """Those of a warpgroup, called in the kernel."""
        stride, first = problem.cluster_size * problem.config.warpgroups, warpgroup
        if problem.cluster_size > 1:
            first = lax.axis_index("cluster") * problem.config.warpgroups + warpgroup
        turns = pl.get_global(plgpu.SemaphoreType.REGULAR((places.shape[0],)))
        return cls(places=places, turns=turns, first=first, stride=stride)

    def leave(self, part: Part, values: Sequence[jax.Array]) -> None:
        """Writes them, and says so."""
        place = self._place_of(part)
        for i, value in enumerate(values):
            for j in range(value.shape[1] // _COLUMNS):
                self.places[place, i, j] = value[:, j * _COLUMNS : (j + 1) * _COLUMNS]
        plgpu.semaphore_signal(self.turns.at[place], memory_scope="gpu")

    def fetch(self, part: Part, accumulators: Sequence[Any]) -> list[jax.Array]:
        """What a part's accumulators begin with: zeros, or sums, for which it waits."""

        def sums():
            place = self._place_of(part)
            plgpu.semaphore_wait(self.turns.at[place], decrement=False, memory_scope="gpu")
            return [self._load(place, i, accumulator.shape[1]) for i, accumulator in enumerate(accumulators)]

        def zeros():
            return [plgpu.layout_cast(jnp.zeros(a.shape, jnp.float32), plgpu.Layout.WGMMA) for a in accumulators]

        return lax.cond(part.begins, zeros, sums)

    def _place_of(self, part: Part) -> Any:
        return part.boundary * self.stride + self.first

    def _load(self, place: Any, i: int, columns: int) -> jax.Array:
        pieces = [
            plgpu.load(self.places.at[place, i, j], layout=plgpu.Layout.WGMMA, optimized=False)
            for j in range(columns // _COLUMNS)
        ]
        return jnp.concatenate(pieces, axis=1)


def apart(shared: Callable[..., Any], unshared: Callable[..., Any]) -> Callable[..., Any]:
    """`shared`, and `unshared` under `jax.vmap`, since the copies that it makes of a kernel share its semaphores."""

    @jax.custom_batching.custom_vmap
    def launch(*operands):
        return shared(*operands)

    @launch.def_vmap
    def _mapped(count, is_mapped, *operands):
        axes = tuple(jax.tree.map(lambda mapped: 0 if mapped else None, is_mapped))
        results = jax.vmap(unshared, in_axes=axes, axis_size=count)(*operands)
        return results, jax.tree.map(lambda _: True, results)

    return launch
