"""How the backward pass is cut up: tiles, stages and registers, by head size."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from pallas_kernels.ops.attention.problem import Problem

COLUMNS = 64
"""Head sizes but 96 are padded to whole multiples of the 128 bytes over which TMA swizzles 16-bit values."""

WARPGROUP_ROWS = 64
"""Of an accumulator of one warpgroup."""


@dataclass(frozen=True, kw_only=True)
class KeysConfig:
    """The kernel of dkey and dvalue: a block holds some keys and goes over the queries that see them.

    shares_keys: the two computing warpgroups have 64 keys each and both results of them. Else both have the same 64
        keys, one makes dvalue and the other dkey, and the scores are computed twice: for large heads, whose
        accumulators would not fit in registers otherwise.
    rows: queries a step.
    stages: steps of queries in shared memory at once.
    waves: blocks are taken in sections of so many times those that run at once; 0: of what the L2 cache holds. See
        `block_place`.
    overlaps: whether a step's last products may be unfinished when the next step's begin.
    parts: blocks that share a group's heads; a divisor of their number. Each rounds the sums of its own heads, and XLA
        adds them up: for keys that make too few blocks. 1: all heads of a group are summed in the accumulators.
    tiles: of keys, that a block takes one after the other: with more than one, keys are brought while those before them
        are computed with, for queries that are few, and see all of many keys. Takes `shares_keys`.
    memory_registers, compute_registers: of a thread of the warpgroup that brings queries, and of the others. One of
        the former and two of the latter are at most 504, three times the 168 that a thread begins with: a warpgroup
        that asks for more than are left waits for ever.
    """

    shares_keys: bool = True
    rows: int = 64
    stages: int = 2
    waves: int = 2
    overlaps: bool = False
    parts: int = 1
    tiles: int = 1
    memory_registers: int = 24
    compute_registers: int = 240
    automatic_barriers: bool = True

    @property
    def warpgroups(self) -> int:
        """That compute."""
        return 2

    @property
    def columns(self) -> int:
        """Keys of a block."""
        return WARPGROUP_ROWS * (self.warpgroups if self.shares_keys else 1)


@dataclass(frozen=True, kw_only=True)
class QueriesConfig:
    """The kernel of dquery: a block holds 64 queries a warpgroup and goes over the keys that they see.

    columns: keys a step.
    slots: tiles of keys and values, each counted, in shared memory at once.
    overlaps: whether a step's last product may be unfinished when the next step's begin; takes four slots.
    parts: blocks that share the keys of a tile of queries. Each rounds what it sums, and XLA adds that up: for queries
        that make few blocks, and see all of many keys.
    """

    warpgroups: int = 2
    columns: int = 128
    slots: int = 4
    overlaps: bool = False
    parts: int = 1
    memory_registers: int = 24
    compute_registers: int = 240
    automatic_barriers: bool = True

    @property
    def rows(self) -> int:
        """Queries of a block."""
        return WARPGROUP_ROWS * self.warpgroups


@dataclass(frozen=True, kw_only=True)
class FusedConfig:
    """The kernel that makes all three gradients.

    stages, waves, parts: as in `KeysConfig`.
    heads_inside: whether a block goes over the heads of a group for each tile of queries; else over all tiles for each
        head. A block comes to a tile of any head after so many steps as the block that it waits for, then: under a
        causal mask, short blocks need not wait for long ones to come to the group's last head.
    shares: of dquery, in shared memory at once: with two, a block computes on while it waits for its turn to add one.
    finishers: whether more blocks make dquery of the sums, see `fused.finish`; else the last block that has a share
        of it does, without storing a sum of its own.
    overlaps: whether a step's product for dkey may be unfinished when the next step's products begin, where that step's
        tile is not masked: there are no registers for a mask beside it.
    halves: with a head size of 64, whether scores are computed of half of a step's 128 queries after the other: it
        takes fewer registers, and masked steps are taken so at any rate.
    warps_apart: whether one warp brings queries, and for each of the shares there is another one that adds it: queries
        come, and a share is added, while the one before waits for its turn or to be done. Else one warp does it all.
    pads: whether arrays whose lengths are no whole groups of eight rows are padded before, and results cut behind. Else
        their tiles lie in panels, of 32 columns with a head size of 96, for which products take longer.
    automatic_barriers: of a warpgroup's threads around each store, by Pallas. The kernel needs none: what a warpgroup
        stores is read by TMA or by products, after `commit_smem`; or by its own threads, after one of the block's
        barriers, at which all of them arrive.
    """

    stages: int = 2
    waves: int = 2
    heads_inside: bool = False
    shares: int = 2
    finishers: bool = False
    overlaps: bool = False
    halves: bool = False
    warps_apart: bool = False
    parts: int = 1
    pads: bool = False
    memory_registers: int = 24
    compute_registers: int = 240
    automatic_barriers: bool = True


@dataclass(frozen=True, kw_only=True)
class BackwardConfig:
    """Of both kernels, and of the one that takes their place where it can, if any.

    packs: whether the queries of a group's heads are rows of one tile, where they can be; see `gqa_packing`.
    """

    keys: KeysConfig
    queries: QueriesConfig
    fused: FusedConfig | None = None
    packs: bool = False


def columns_at_once(size: int) -> int:
    """Of tiles of rows of that size, so many that they lie together, for work that takes fewer registers so."""
    return math.gcd(size, COLUMNS)


def padded_head(head_size: int) -> int:
    """The head size in shared memory: of 96 columns, TMA swizzles 32 at a time."""
    return 96 if COLUMNS < head_size <= 96 else -(-head_size // COLUMNS) * COLUMNS


def backward_config(head_size: int, *, features: int = 0) -> BackwardConfig:
    """The configuration for a head size; see TUNING.md.

    features: how many there are of softcap, dropout, segments and a dense mask or bias. Each takes registers, so that
    other things have to take fewer.
    """
    size = padded_head(head_size)
    if size <= 64:
        return BackwardConfig(keys=KeysConfig(stages=3), queries=QueriesConfig(slots=6))
    if size <= 128:
        queries = QueriesConfig(columns=64, slots=8, overlaps=True) if features else QueriesConfig()
        return BackwardConfig(keys=KeysConfig(shares_keys=features < 2), queries=queries)
    slots = 4 if size <= 192 else 3
    return BackwardConfig(keys=KeysConfig(shares_keys=False), queries=QueriesConfig(columns=64, slots=slots))


def one_warpgroup(queries: QueriesConfig) -> QueriesConfig:
    """The same with blocks of 64 queries."""
    return replace(queries, warpgroups=1, memory_registers=40, compute_registers=232)


def features_of(problem: Problem) -> int:
    """How many of them a launch has."""
    has = (problem.softcap, problem.dropout_rate, problem.masking.has_segments, problem.dense)
    return sum(map(bool, has))
