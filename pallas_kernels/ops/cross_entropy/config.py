"""Launch configurations of the cross-entropy kernels: the choices, and the untuned defaults."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import jax.numpy as jnp

from pallas_kernels.primitives.rows import ACCESS_BYTES, WARPS

REGISTER_COLUMNS = 12288
"""The longest row that one warpgroup holds in its registers; 16384 float32 ones spill."""
_SHARED_MEMORY_BYTES = 227 * 1024
"""Shared memory that one block of Hopper may have."""
_OTHER_BYTES = 4096
"""Of it for barriers, the exchange between warpgroups, and Mosaic GPU's own scratch."""
WARP_LANES = 32
"""Threads of a warp."""
_LINE_BYTES = WARP_LANES * ACCESS_BYTES
"""Bytes that a warp moves in one access."""
_FEW_ROWS = 66
"""The most rows of which each has two multiprocessors of an H200's 132 or more."""
_MOST_HELD = {4: 2, 3: 3}
"""Chunks that each of so many warpgroups may keep in registers: one more, and they spill."""
_MOST_BARRIERS = 32
"""One a stage, and Mosaic GPU has no more in a group."""


@dataclass(frozen=True, kw_only=True)
class ForwardConfig:
    """How the kernel of the loss splits its work.

    loads: "registers" gives a row to one warpgroup, which reads it once; "ring", with a gradient only, gives it to the
        `warpgroups` of a persistent block, which bring it to shared memory by TMA, `chunk_lines` lines of 512 bytes at
        a time, into `slots` stages each, and keep `held` more chunks each in registers; "split" gives `chunk` columns
        of a row to each block, twice.
    """

    loads: Literal["registers", "ring", "split"]
    warpgroups: int = 4
    chunk_lines: int = 16
    slots: int = 6
    held: int = 0
    chunk: int = 8192


def default_forward(rows: int, vocabulary: int, itemsize: int, *, with_gradient: bool) -> ForwardConfig:
    """The untuned choice for `rows` rows of `vocabulary` values of `itemsize` bytes."""
    if vocabulary <= REGISTER_COLUMNS:
        return ForwardConfig(loads="registers")
    if with_gradient and rows > _FEW_ROWS:
        # 8192 x 32000 bf16, which shared memory holds: 4 warpgroups 272 µs, 3 take 303. 8192 x 128256, which needs
        # registers: 3 warpgroups 1077 µs, 4 take 1094; 4096 x 128256 float32: 1259 and 1288.
        rings = [ring_config(vocabulary, itemsize, warpgroups=n) for n in (4, 3)]
        found = rings[0] if rings[0] is None or not rings[0].held else rings[1] or rings[0]
        if found is not None:
            return found
    return ForwardConfig(loads="split", chunk=8192 if itemsize == 2 and rows * vocabulary >= 1 << 22 else 4096)


@dataclass(frozen=True, kw_only=True)
class RowPlan:
    """How the warpgroups of the ring kernel share a row, in accesses of a lane and in chunks of them.

    accesses: in the row. sharers: warpgroups. chunk: accesses in a chunk. own: chunks of each warpgroup, of which the
    last begins early where its part is no multiple of a chunk. held: how many of them, the first, stay in registers;
    kept: how many, the last, stay in shared memory.
    """

    accesses: int
    sharers: int
    chunk: int
    own: int
    held: int
    kept: int

    @classmethod
    def make(cls, vocabulary: int, itemsize: int, config: ForwardConfig) -> RowPlan:
        """Raises ValueError for rows that do not divide into accesses, or are too short."""
        accesses, left = divmod(vocabulary * itemsize, ACCESS_BYTES)
        if left:
            raise ValueError(f"a vocabulary of {vocabulary} is no multiple of {ACCESS_BYTES} bytes; use 'split'.")
        sharers, chunk = config.warpgroups, config.chunk_lines * WARP_LANES
        share = _share(accesses, sharers)
        if share < chunk:
            raise ValueError(f"{accesses} accesses are too few for {sharers} warpgroups with chunks of {chunk}.")
        own = -(-(accesses - (sharers - 1) * share) // chunk)
        if own < config.held:
            raise ValueError(f"{own} chunks for each warpgroup are fewer than {config.held} to hold.")
        kept = min(own - config.held, config.slots)
        return cls(accesses=accesses, sharers=sharers, chunk=chunk, own=own, held=config.held, kept=kept)

    @property
    def loads(self) -> int:
        """Loads of each warpgroup in a row: more than its chunks, where some come twice."""
        return 2 * self.own - self.held - self.kept

    @property
    def most_repeated(self) -> int:
        """The most of a warpgroup's last chunk that was in the chunk before."""
        return self.own * self.chunk - _share(self.accesses, self.sharers)

    def part(self, sharer):
        """Where a warpgroup's part of the row begins, and how much of its last chunk was in the chunk before."""
        share = _share(self.accesses, self.sharers)
        rest = self.accesses - (self.sharers - 1) * share
        if rest == share:
            return sharer * share, self.own * self.chunk - share
        return sharer * share, self.own * self.chunk - jnp.where(sharer == self.sharers - 1, rest, share)

    def chunk_at(self, position):
        """The chunk at `position` of a row's loads: all in turn, then backwards those that stayed nowhere."""
        if self.loads == self.own:
            return position
        return jnp.where(position < self.own, position, 2 * self.own - self.kept - 1 - position)


def _share(accesses: int, sharers: int) -> int:
    """Accesses of each warpgroup but the last, which has the rest; a multiple of a cache line."""
    return accesses // sharers // 8 * 8


def ring_config(vocabulary: int, itemsize: int, *, warpgroups: int, chunk_bytes: int = 8192) -> ForwardConfig | None:
    """As many stages as fit; None where the row does not divide into accesses, or is too short for all warpgroups.

    Chunks that find no stage in a row, if a third of the stages are to be free for the next row, stay in registers, as
    many as these hold.
    """
    accesses, left = divmod(vocabulary * itemsize, ACCESS_BYTES)
    share = _share(accesses, warpgroups)
    tallest = min(chunk_bytes // _LINE_BYTES, share // WARP_LANES) // WARPS * WARPS
    if left or not tallest:
        return None

    def slots_of(lines):
        stages = (_SHARED_MEMORY_BYTES - _OTHER_BYTES) // (lines * _LINE_BYTES)
        return min(stages, _MOST_BARRIERS) // warpgroups

    def cost(lines):
        """A last chunk that begins early costs what it repeats, and a chunk about as much as another line."""
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


def forward_candidates(vocabulary: int, itemsize: int, *, with_gradient: bool) -> dict[str, ForwardConfig]:
    """The configurations worth measuring, by name."""
    candidates = {}
    if vocabulary <= REGISTER_COLUMNS:
        candidates["registers"] = ForwardConfig(loads="registers")
    for warpgroups in (4, 3) if with_gradient else ():
        config = ring_config(vocabulary, itemsize, warpgroups=warpgroups)
        if config is not None:
            size = f"{config.slots} x {config.chunk_lines} lines, {config.held} held"
            candidates[f"ring {warpgroups} warpgroups {size}"] = config
    for chunk in (2048, 4096, 8192):
        candidates[f"split {chunk}"] = ForwardConfig(loads="split", chunk=chunk)
    return candidates
