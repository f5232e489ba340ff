"""Launch configurations of the cross-entropy kernels: what may be chosen, and what is chosen untuned."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import jax.numpy as jnp

from pallas_kernels.primitives.rows import ACCESS_BYTES, WARPS

REGISTER_COLUMNS = 12288
"""The longest row that one warpgroup holds in its registers; 16384 float32 ones spill."""
_SHARED_MEMORY_BYTES = 227 * 1024
"""What one block of Hopper may have."""
_OTHER_BYTES = 4096
"""Of it for barriers, the exchange between warpgroups, and Mosaic GPU's own scratch."""
WARP_LANES = 32
"""Threads of a warp."""
_LINE_BYTES = WARP_LANES * ACCESS_BYTES
"""What a warp takes in one access."""
_FEW_ROWS = 66
"""Up to here a row has two multiprocessors of an H200's 132 and more."""
_MANY_ROWS = 1024
"""From here on one warpgroup a row should fill the device (8192 rows are measured); fewer share theirs among more."""
_MOST_HELD = {4: 2, 3: 3, 2: 6}
"""Chunks that each of so many warpgroups may keep in registers: one more, and they spill."""
_MOST_BARRIERS = 32
"""One a place, and Mosaic GPU has no more in a group."""


@dataclass(frozen=True, kw_only=True)
class ForwardConfig:
    """How the kernel of the loss cuts its work.

    loads: "registers" gives a row to one warpgroup, which reads it once; "ring" gives it to the `warpgroups` of a
        persistent block, or to each share of them that works at one of its `rows_at_once`; they bring it to shared
        memory by TMA, `chunk_lines` lines of 512 bytes at a time, into `slots` places each, and with a gradient keep
        `held` more chunks each in registers, and blocks begin up to seven times `stagger` nanoseconds apart; "split"
        gives `chunk` columns of a row to each block, twice; "chunked" has one warpgroup walk along the row, `chunk`
        columns at a time (loss only).
    """

    loads: Literal["registers", "ring", "split", "chunked"]
    warpgroups: int = 4
    rows_at_once: int = 1
    chunk_lines: int = 16
    slots: int = 6
    held: int = 0
    stagger: int = 0
    chunk: int = 4096


@dataclass(frozen=True, kw_only=True)
class GradientConfig:
    """How the kernel of the gradient alone cuts its work: one block of one warpgroup for `chunk` columns of a row."""

    chunk: int = 8192


def default_forward(rows: int, vocabulary: int, itemsize: int, *, with_gradient: bool) -> ForwardConfig:
    """The untuned choice for `rows` rows of `vocabulary` values of `itemsize` bytes."""
    if vocabulary <= REGISTER_COLUMNS:
        return ForwardConfig(loads="registers")
    if rows <= _FEW_ROWS:
        return ForwardConfig(loads="split", chunk=8192 if with_gradient and rows * vocabulary >= 1 << 22 else 4096)
    # 8192 x 128256 bf16 on an H200: the loss alone takes 477 µs in chunks, 540 from the best ring.
    if not with_gradient and rows >= _MANY_ROWS:
        return ForwardConfig(loads="chunked")
    # 8192 x 32000 bf16, which shared memory holds: 4 warpgroups 272 µs, 3 take 303. 8192 x 128256, which needs
    # registers: 3 warpgroups 1077 µs, 4 take 1094, 2 take 1095; 4096 x 128256 float32: 1259, 1288, 1284.
    rings = [ring_config(vocabulary, itemsize, warpgroups=n, most_held=_MOST_HELD[n]) for n in (4, 3, 2)]
    possible = [ring for ring in rings if ring is not None]
    if not possible:
        return ForwardConfig(loads="chunked")
    needs_registers = with_gradient and possible[0].held > 0
    if not needs_registers or len(possible) == 1:
        return possible[0]
    # Blocks that begin together read together and write together: 1077 µs, a microsecond apart 1068 µs, two 1072 µs.
    return replace(possible[1], stagger=1000) if itemsize == 2 else possible[1]


@dataclass(frozen=True, kw_only=True)
class RowPlan:
    """How the warpgroups that work at one row share it in the ring kernel, in accesses of a lane and in chunks of them.

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
    def make(cls, vocabulary: int, itemsize: int, config: ForwardConfig, *, with_gradient: bool) -> RowPlan:
        """Raises ValueError for rows that do not divide into accesses, or are too short."""
        accesses, left = divmod(vocabulary * itemsize, ACCESS_BYTES)
        if left:
            raise ValueError(f"a vocabulary of {vocabulary} is no multiple of {ACCESS_BYTES} bytes; use 'chunked'.")
        sharers, chunk = config.warpgroups // config.rows_at_once, config.chunk_lines * WARP_LANES
        share = _share(accesses, sharers)
        if share < chunk:
            raise ValueError(f"{accesses} accesses are too few for {sharers} warpgroups with chunks of {chunk}.")
        own = -(-(accesses - (sharers - 1) * share) // chunk)
        if with_gradient and own < config.held:
            raise ValueError(f"{own} chunks for each warpgroup are fewer than {config.held} to hold.")
        held = config.held if with_gradient else 0
        kept = min(own - held, config.slots) if with_gradient else 0
        return cls(accesses=accesses, sharers=sharers, chunk=chunk, own=own, held=held, kept=kept)

    @property
    def loads(self) -> int:
        """Of each warpgroup in a row: more than its chunks, where some come twice."""
        return 2 * self.own - self.held - self.kept if self.kept else self.own

    @property
    def most_repeated(self) -> int:
        """The most of a warpgroup's last chunk that was in the chunk before."""
        return self.own * self.chunk - _share(self.accesses, self.sharers)

    def part(self, sharer):
        """Where a warpgroup's part of the row begins, and how much of its last chunk was in the chunk before."""
        share = _share(self.accesses, self.sharers)
        rest = self.accesses - (self.sharers - 1) * share
        if self.sharers == 1 or rest == share:
            return sharer * share, self.own * self.chunk - share
        return sharer * share, self.own * self.chunk - jnp.where(sharer == self.sharers - 1, rest, share)

    def chunk_at(self, position):
        """The chunk that comes at `position` of a row's loads: all in turn, then those that did not stay, backwards."""
        if self.loads == self.own:
            return position
        return jnp.where(position < self.own, position, 2 * self.own - self.kept - 1 - position)


def _share(accesses: int, sharers: int) -> int:
    """Of each but the last, who has the rest; a multiple of a cache line."""
    return accesses // sharers // 8 * 8 if sharers > 1 else accesses


def ring_config(
    vocabulary: int,
    itemsize: int,
    *,
    warpgroups: int,
    rows_at_once: int = 1,
    chunk_bytes: int = 8192,
    most_held: int = 0,
) -> ForwardConfig | None:
    """As many places as fit; None where the row does not divide into accesses, or is too short for all warpgroups.

    What finds no place in a row, if a third of the places are to be free for the next row, stays in registers, up to
    `most_held` chunks of each warpgroup.
    """
    accesses, left = divmod(vocabulary * itemsize, ACCESS_BYTES)
    share = _share(accesses, warpgroups // rows_at_once)
    tallest = min(chunk_bytes // _LINE_BYTES, share // WARP_LANES) // WARPS * WARPS
    if left or not tallest:
        return None

    def slots_of(lines):
        places = (_SHARED_MEMORY_BYTES - _OTHER_BYTES) // (lines * _LINE_BYTES)
        return min(places, _MOST_BARRIERS) // warpgroups

    def cost(lines):
        """A last chunk that begins early costs what it repeats, and a chunk about as much as another line."""
        return -(-share // (lines * WARP_LANES)) * (lines + 1)

    most = slots_of(tallest) * tallest
    heights = [lines for lines in range(tallest, tallest // 2, -WARPS) if slots_of(lines) * lines >= 0.9 * most]
    lines = min(heights, key=cost)
    slots = slots_of(lines)
    if slots < 2:
        return None
    config = ForwardConfig(
        loads="ring", warpgroups=warpgroups, rows_at_once=rows_at_once, chunk_lines=lines, slots=slots
    )
    own = RowPlan.make(vocabulary, itemsize, config, with_gradient=True).own
    return replace(config, held=max(0, min(most_held, own + slots // 3 - slots, own)))


def forward_candidates(vocabulary: int, itemsize: int, *, with_gradient: bool) -> dict[str, ForwardConfig]:
    """The configurations worth measuring, by name."""
    candidates = {}
    if vocabulary <= REGISTER_COLUMNS:
        candidates["registers"] = ForwardConfig(loads="registers")
    for warpgroups, rows_at_once, held in ((4, 1, 2), (3, 1, 3), (2, 1, 6), (4, 2, 2)):
        config = ring_config(
            vocabulary,
            itemsize,
            warpgroups=warpgroups,
            rows_at_once=rows_at_once,
            most_held=held if with_gradient else 0,
        )
        if config is not None:
            size = f"{config.slots} x {config.chunk_lines} lines, {config.held} held"
            candidates[f"ring {warpgroups} warpgroups {rows_at_once} rows {size}"] = config
            if warpgroups == 3 and config.held:
                for stagger in (1000, 2000):
                    candidates[f"ring 3 warpgroups {size}, {stagger} ns apart"] = replace(config, stagger=stagger)
    for chunk in (2048, 4096, 8192):
        candidates[f"split {chunk}"] = ForwardConfig(loads="split", chunk=chunk)
    if not with_gradient and vocabulary > 4096:
        candidates["chunk 4096"] = ForwardConfig(loads="chunked")
    return candidates
