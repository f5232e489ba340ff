"""Configurations of the backward pass: one kernel or two, tiles, stages, and parts. TUNING.md has the measurements."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial

from pallas_kernels import tuning
from pallas_kernels.ops.attention.forward.config import known
from pallas_kernels.ops.attention.problem import Problem
from pallas_kernels.primitives.platform import target_device

WARPGROUP_ROWS = 64
"""Rows of an accumulator of one warpgroup."""
WARPGROUPS = 2
"""Consumer warpgroups of the kernel by keys."""
KEY_ROWS = 64
"""Queries of a step of the kernel of dkey and dvalue alone."""
FUSED_KEYS = WARPGROUPS * WARPGROUP_ROWS
"""Keys of a block of the fused kernel."""
FUSED_ROWS = {64: 128, **dict.fromkeys((96, 128), 64)}
"""Queries of a step of the fused kernel, by head size: as many as there are registers for."""


@dataclass(frozen=True, kw_only=True)
class KeysConfig:
    """The kernel by keys: a block holds keys and loops over the queries that see them.

    adds_dquery: whether it adds up dquery, too; see `shares`.

    shares_keys: each of the two consumers computes dkey and dvalue of 64 keys. Else both have the same 64 keys, one
        computes dvalue and the other dkey, and both the scores: for large heads, whose accumulators would not fit in
        registers otherwise, and for more blocks.
    rows: queries of a step.
    stages: query tiles in shared memory at once.
    overlaps: whether a step's last products may still run when the next step's begin.
    parts: blocks that share a group's heads, a divisor of the group. Each rounds the sums over its heads, and XLA adds
        them up. 1: the accumulators sum over all heads of a group.
    """

    adds_dquery: bool = False
    shares_keys: bool = True
    rows: int = KEY_ROWS
    stages: int = 2
    overlaps: bool = False
    parts: int = 1

    @property
    def columns(self) -> int:
        """Keys of a block."""
        return WARPGROUP_ROWS * (WARPGROUPS if self.shares_keys else 1)


@dataclass(frozen=True, kw_only=True)
class QueriesConfig:
    """The kernel of dquery: a block holds 64 queries a warpgroup and loops over the keys that they see.

    columns: keys of a step.
    slots: key tiles plus value tiles in shared memory at once.
    overlaps: whether a step's last product may still run when the next step's begin; needs four slots.
    """

    warpgroups: int = 2
    columns: int = 128
    slots: int = 4
    overlaps: bool = False

    @property
    def rows(self) -> int:
        """Queries of a block."""
        return WARPGROUP_ROWS * self.warpgroups


@dataclass(frozen=True, kw_only=True)
class BackwardConfig:
    """The configurations of the two kernels. queries: None where that of keys adds up dquery."""

    keys: KeysConfig
    queries: QueriesConfig | None


def columns_at_once(size: int) -> int:
    """Columns of a tile to store at a time: those that lie together in shared memory, which takes fewer registers."""
    return math.gcd(size, 64)


def backward_config(head_size: int, *, features: int = 0) -> BackwardConfig:
    """The configuration of two kernels by head size.

    features: the number of softcap, dropout, segments, and dense mask or bias, each of which takes registers.
    """
    if head_size <= 64:
        return BackwardConfig(keys=KeysConfig(stages=3), queries=QueriesConfig(slots=6))
    if head_size <= 128:
        queries = QueriesConfig(columns=64, slots=8, overlaps=True) if features else QueriesConfig()
        return BackwardConfig(keys=KeysConfig(shares_keys=features < 2), queries=queries)
    slots = 4 if head_size <= 192 else 3
    return BackwardConfig(keys=KeysConfig(shares_keys=False), queries=QueriesConfig(columns=64, slots=slots))


def features_of(problem: Problem) -> int:
    """The number of features that take registers; see `backward_config`."""
    has = (problem.softcap, problem.dropout_rate, problem.masking.has_segments, problem.dense)
    return sum(map(bool, has))


def is_plain(problem: Problem) -> bool:
    """Whether queries see all keys, or all up to their own place, and there are no further features."""
    masking = problem.masking
    return not features_of(problem) and masking.left is None and masking.right in (None, 0)


_ROUNDS = 1.3
"""Blocks a multiprocessor with which, under a causal mask, the longest block takes no longer than all together."""
_GAIN = 0.87
"""Without a mask, more parts are worth it if the rounds take at most this share of the time."""
_SMALL_HEAD = 128
"""Larger heads leave no registers for another form."""
_SHORT_FROM, _SHORT_TO = 8, 2048
"""Lengths with which the same work is split into more blocks."""
_UNEVEN_KEYS = 512
"""From so many keys on, blocks under a causal mask differ by more than a second round of them costs."""
_TWO_TILES = 256
"""With more keys, smaller blocks under a causal mask gain more than a second round of them costs."""
_ONE_STEP = 128
"""Keys with which a block of one warpgroup does not spill under a causal mask."""
_LONG = 2048
"""The length from which on blocks of two kernels share a group's heads like those of the fused one."""


def parts_of_heads(problem: Problem, columns: int) -> int:
    """The number of blocks of `columns` keys that share a group's heads; more than 1 if blocks would be few."""
    masking, cores = problem.masking, target_device().core_count
    keys = masking.keys if masking.right is None else min(masking.keys, masking.queries)
    blocks = problem.batch * problem.key_heads * -(-keys // columns)
    divisors = [n for n in range(1, problem.group + 1) if problem.group % n == 0]
    if masking.right is not None:
        return next((n for n in divisors if n * blocks >= _ROUNDS * cores), problem.group)
    best, least = 1, -(-blocks // cores)
    for n in divisors[1:]:
        rounds = -(-n * blocks // cores) / n
        if rounds <= _GAIN * least:
            best, least = n, rounds
    return best


def two_kernels(problem: Problem) -> BackwardConfig:
    """The default configuration of two kernels."""
    masking = problem.masking
    config = backward_config(problem.head_size, features=features_of(problem))
    if is_plain(problem) and problem.head_size <= 64:
        config = replace(config, keys=replace(config.keys, overlaps=True))
    config = _for_short_lengths(problem, config)
    if is_plain(problem) and max(masking.queries, masking.keys) >= _LONG:
        parts = max(config.keys.parts, parts_of_heads(problem, config.keys.columns))
        config = replace(config, keys=replace(config.keys, parts=parts))
    return config


def _for_short_lengths(problem: Problem, config: BackwardConfig) -> BackwardConfig:
    """config with more blocks if there are few."""
    masking, keys, queries = problem.masking, config.keys, config.queries
    assert queries is not None
    lengths = (masking.queries, masking.keys)
    if not is_plain(problem) or min(lengths) < _SHORT_FROM or max(lengths) > _SHORT_TO:
        return config
    if max(lengths) == _SHORT_TO and not masking.is_causal:
        return config  # The fused kernel takes them.
    # Blocks of this kernel and of the other.
    cores = target_device().core_count
    most = cores * (2 if masking.is_causal and masking.keys >= _UNEVEN_KEYS else 1)
    lanes = problem.batch * problem.key_heads
    blocks = lanes * -(-masking.keys // keys.columns)
    parts = max((n for n in range(1, most // blocks + 1) if problem.group % n == 0), default=1)
    halves = replace(keys, shares_keys=False)
    most = cores * (2 if masking.is_causal and masking.keys > _TWO_TILES else 1)
    if parts * lanes * -(-masking.keys // halves.columns) <= most:
        keys = halves
    query_blocks = problem.batch * problem.heads * -(-masking.queries // WARPGROUP_ROWS)
    # One warpgroup if a second would have no queries, or if all blocks of one run at once.
    is_one = masking.queries <= WARPGROUP_ROWS or (masking.keys <= _ONE_STEP and query_blocks <= cores)
    if problem.head_size <= _SMALL_HEAD and is_one:
        queries = replace(queries, warpgroups=1)
    return replace(config, keys=replace(keys, parts=parts), queries=queries)


_LEAST, _MOST = 480, (8192, 16384)
"""The shortest sequence for the fused kernel, and the longest with heads of 64 and with larger ones.

Only causal masks with deterministic gradients have a longest: blocks then wait for each other, the more the longer."""
_MANY_BLOCKS = (512, 256)
"""With so many blocks the fused kernel, causal and without parts, was faster from `_LEAST` on; heads of 64, larger."""
_LONG_ALONE = 1200
"""The length from which on it was faster with fewer blocks, too."""
_STEPS_PER_TILE = {True: 2.4, False: 0.9}
"""Causal or not: steps of a multiprocessor per key tile of a lane with which the fused kernel is faster, although its
blocks wait for each other, or add to two sums."""
_STEPS = (70, 140)
"""Least steps of a multiprocessor times key tiles of a lane with which it is faster without a mask; 64, larger heads.

XLA runs three kernels more, and the fewer tiles, the more of the time goes to sums."""
_STEPS_OF_PARTS = (70, 300)
"""The same with parts, which two kernels can have, too."""


def can_fuse(problem: Problem) -> bool:
    """Whether the fused kernel serves: it has no registers for features, nor for a masked last key tile."""
    masking = problem.masking
    is_whole = masking.keys % FUSED_KEYS == 0 or masking.right is None or masking.queries <= masking.keys
    return is_plain(problem) and is_whole and problem.head_size in FUSED_ROWS


def is_faster_fused(problem: Problem, parts: int) -> bool:
    """Whether there is so much work that the fused kernel is faster; parts: blocks that share a group's heads."""
    masking, is_large = problem.masking, problem.head_size > 64
    lengths = (masking.queries, masking.keys)
    is_chain = masking.is_causal and problem.deterministic
    if min(lengths) < _LEAST or (is_chain and max(lengths) > _MOST[is_large]):
        return False
    blocks = problem.batch * problem.key_heads * -(-masking.keys // FUSED_KEYS)
    has_many = min(lengths) >= _LONG_ALONE or blocks >= _MANY_BLOCKS[is_large]
    if masking.is_causal and parts == 1 and has_many:
        return True
    keys, pairs = masking.keys, masking.queries * masking.keys
    if masking.is_causal:
        keys = min(keys, masking.queries)
        pairs = masking.queries * keys - keys * keys // 2
    tiles = -(-keys // FUSED_KEYS)
    steps = problem.batch * problem.heads * pairs / (KEY_ROWS * FUSED_KEYS * target_device().core_count)
    least = (_STEPS if parts == 1 else _STEPS_OF_PARTS)[is_large]
    is_enough = masking.is_causal or steps * tiles >= least
    return is_enough and steps >= _STEPS_PER_TILE[masking.is_causal] * tiles


def one_kernel(problem: Problem, parts: int) -> BackwardConfig:
    """The configuration of one kernel.

    A step's product for dkey overlaps the next step where registers suffice: not with scores of 128 queries.
    """
    size = problem.head_size
    overlaps = size == 128 or (size == 64 and problem.masking.is_causal)
    keys = KeysConfig(adds_dquery=True, rows=FUSED_ROWS[size], overlaps=overlaps, parts=parts)
    return BackwardConfig(keys=keys, queries=None)


def default_backward(problem: Problem) -> BackwardConfig:
    """The default configuration: the fused kernel where it was faster."""
    parts = parts_of_heads(problem, FUSED_KEYS)
    is_one = can_fuse(problem) and is_faster_fused(problem, parts)
    return one_kernel(problem, parts) if is_one else two_kernels(problem)


def backward_candidates(problem: Problem) -> dict[str, BackwardConfig]:
    """The configurations worth measuring, by name. Each gives the same bits in every run if the problem is
    deterministic."""
    two = two_kernels(problem)
    found = {"two kernels": two}
    if two.keys.parts > 1:
        found["two kernels, blocks with all heads of a group"] = replace(two, keys=replace(two.keys, parts=1))
    if can_fuse(problem):
        found["one kernel"] = one_kernel(problem, 1)
        found["one kernel, blocks share a group"] = one_kernel(problem, parts_of_heads(problem, FUSED_KEYS))
    return found


def tuned_backward(problem: Problem) -> BackwardConfig:
    """The measured best of the candidates, else the default."""
    candidates, untuned = partial(backward_candidates, problem), default_backward(problem)
    return tuning.configuration("attention", "backward", known(problem), candidates, untuned=untuned)
