"""Launch configurations of the cross-entropy kernels: their parameters and the untuned defaults."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import jax.numpy as jnp

from pallas_kernels.primitives.hopper import SHARED_BYTES
from pallas_kernels.primitives.rows import ACCESS_BYTES, WARP_LANES, WARPS

REGISTER_COLUMNS = 12288
"""The longest row that one warpgroup holds in its registers; 16384 float32 ones spill."""
_OTHER_BYTES = 4096
"""Shared memory for barriers, the exchange between warpgroups, and Mosaic GPU's own scratch."""
_LINE_BYTES = WARP_LANES * ACCESS_BYTES
"""Bytes that a warp moves in one access."""
_CHUNK_BYTES = 8192
"""The most bytes of a chunk of a ring."""
_FEW_ROWS = 66
"""The most rows for which an H200's 132 multiprocessors give each row two or more."""
_MOST_HELD = {4: 2, 3: 3}
"""The most chunks that a warpgroup keeps in registers without spilling, by number of warpgroups."""
_MOST_BARRIERS = 32
"""The most stages: each has a barrier, and Mosaic GPU allows no more in a group."""


@dataclass(frozen=True, kw_only=True)
class ForwardConfig:
    """How the forward kernel splits its work.

    loads: "registers": one warpgroup reads a row once. "ring" (only with a gradient): the `warpgroups` of a persistent
        block share a row; each copies its part to shared memory by TMA, in chunks of `chunk_lines` lines of 512 bytes
        and a ring of `slots` stages, and keeps `held` more chunks in registers. "split": each block takes `chunk`
        columns of a row, in each of two launches.
    """

    loads: Literal["registers", "ring", "split"]
    warpgroups: int = 4
    chunk_lines: int = 16
    slots: int = 6
    held: int = 0
    chunk: int = 8192


def default_forward(rows: int, vocabulary: int, itemsize: int, *, with_gradient: bool) -> ForwardConfig:
    """Returns the untuned configuration for `rows` rows of `vocabulary` values of `itemsize` bytes."""
    if vocabulary <= REGISTER_COLUMNS:
        return ForwardConfig(loads="registers")
    if with_gradient and rows > _FEW_ROWS:
        # 8192 x 32000 bf16 fits in shared memory: 4 warpgroups take 272 µs, 3 take 303. 8192 x 128256 needs registers:
        # 3 warpgroups take 1077 µs, 4 take 1094; 4096 x 128256 float32 takes 1259 and 1288.
        rings = [ring_config(vocabulary, itemsize, warpgroups=n) for n in (4, 3)]
        found = rings[0] if rings[0] is None or not rings[0].held else rings[1] or rings[0]
        if found is not None:
            return found
    return ForwardConfig(loads="split", chunk=8192 if itemsize == 2 and rows * vocabulary >= 1 << 22 else 4096)


@dataclass(frozen=True, kw_only=True)
class RowPlan:
    """How the warpgroups of the ring kernel share a row. Sizes are in accesses (of one lane) and in chunks.

    accesses: the row's length. sharers: the number of warpgroups. chunk: accesses in a chunk. own: chunks of each
    warpgroup; the last overlaps the one before if the part is no multiple of a chunk. held: how many of the first
    chunks stay in registers. kept: how many of the last stay in shared memory.
    """

    accesses: int
    sharers: int
    chunk: int
    own: int
    held: int
    kept: int

    @classmethod
    def make(cls, vocabulary: int, itemsize: int, config: ForwardConfig) -> RowPlan:
        """Returns the plan of a row that divides into accesses, as `ring_config` checks."""
        accesses = vocabulary * itemsize // ACCESS_BYTES
        sharers, chunk = config.warpgroups, config.chunk_lines * WARP_LANES
        share = _share(accesses, sharers)
        own = -(-(accesses - (sharers - 1) * share) // chunk)
        kept = min(own - config.held, config.slots)
        return cls(accesses=accesses, sharers=sharers, chunk=chunk, own=own, held=config.held, kept=kept)

    @property
    def loads(self) -> int:
        """The number of loads of each warpgroup in a row: its chunks, and those that are loaded again."""
        return 2 * self.own - self.held - self.kept

    @property
    def most_repeated(self) -> int:
        """The largest overlap of a warpgroup's last chunk with the chunk before."""
        return self.own * self.chunk - _share(self.accesses, self.sharers)

    def part(self, sharer):
        """Returns where a warpgroup's part of the row begins, and how far its last chunk overlaps the one before."""
        share = _share(self.accesses, self.sharers)
        rest = self.accesses - (self.sharers - 1) * share
        if rest == share:
            return sharer * share, self.own * self.chunk - share
        return sharer * share, self.own * self.chunk - jnp.where(sharer == self.sharers - 1, rest, share)

    def chunk_at(self, position):
        """Returns the chunk at `position` of a row's loads: all chunks in order, then those not kept, latest first."""
        if self.loads == self.own:
            return position
        return jnp.where(position < self.own, position, 2 * self.own - self.kept - 1 - position)


def _share(accesses: int, sharers: int) -> int:
    """Returns the accesses of each warpgroup except the last, which has the remainder; a multiple of a cache line."""
    return accesses // sharers // 8 * 8


def ring_config(vocabulary: int, itemsize: int, *, warpgroups: int) -> ForwardConfig | None:
    """Returns a ring with as many stages as fit, or None if the row does not divide into accesses or is too short.

    A third of the stages is left free for the next row. As many of the chunks without a stage as fit stay in registers.
    """
    accesses, left = divmod(vocabulary * itemsize, ACCESS_BYTES)
    share = _share(accesses, warpgroups)
    tallest = min(_CHUNK_BYTES // _LINE_BYTES, share // WARP_LANES) // WARPS * WARPS
    if left or not tallest:
        return None

    def slots_of(lines):
        stages = (SHARED_BYTES - _OTHER_BYTES) // (lines * _LINE_BYTES)
        return min(stages, _MOST_BARRIERS) // warpgroups

    def cost(lines):
        """Returns the cost in lines: the overlap of the last chunk, and about one line for each chunk."""
        return -(-share // (lines * WARP_LANES)) * (lines + 1)

    most = slots_of(tallest) * tallest
    heights = [lines for lines in range(tallest, tallest // 2, -WARPS) if slots_of(lines) * lines >= 0.9 * most]
    lines = min(heights, key=cost)
    slots = slots_of(lines)
    if slots < 2:
        return None
    config = ForwardConfig(loads="ring", warpgroups=warpgroups, chunk_lines=lines, slots=slots)
    own = RowPlan.make(vocabulary, itemsize, config).own
    return replace(config, held=max(0, min(_MOST_HELD[warpgroups], own + slots // 3 - slots, own)))
