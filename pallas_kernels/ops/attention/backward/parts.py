"""How many blocks share what one could do, where there are few: see TUNING.md."""

from __future__ import annotations

from dataclasses import replace

from pallas_kernels.ops.attention.backward.config import (
    WARPGROUP_ROWS,
    BackwardConfig,
    features_of,
    one_warpgroup,
    padded_head,
)
from pallas_kernels.ops.attention.folded import folded
from pallas_kernels.ops.attention.problem import Problem
from pallas_kernels.primitives.platform import target_device

_ROUNDS = 1.3
"""Blocks for each multiprocessor with which the longest one under a causal mask takes no longer than all together."""
_GAIN = 0.87
"""Of the time of the rounds, what has to be left of it for more parts without a mask."""
_SPARED = 3
"""Steps that a block of dquery must have fewer, for which XLA's addition takes as long as one or two."""
_LARGEST_HEAD = 128
_STEPS_A_TILE = {True: 2.4, False: 0.9}
"""Causal or not: so many steps of a multiprocessor for each tile of a lane's keys make one kernel the faster form,
although its blocks wait for each other in a row, or add to two sums."""
_STEPS = {64: 70, 96: 140, 128: 140}
"""Of a multiprocessor, times tiles of a lane's keys, by head size, with which it is so without a mask: XLA has three
kernels more to run, and the fewer tiles, the more of the time goes to sums."""
_STEPS_OF_PARTS = {64: 70, 96: 300, 128: 300}
"""Likewise, where blocks share a group's heads: those of two kernels can, too."""
_SPREAD_TILES, _SPREAD_BYTES = {False: 9, True: 11}, 3 * 10**6
"""Tiles of a lane's keys with which blocks that begin apart are faster than those that begin together, where at most
two share a group's heads or more do; with fewer they are if both sums have no more bytes for each of them."""
_MOST_SPLITS, _LEAST_STEPS, _FURTHER_GAIN = 4, 6, 0.7
"""Parts of a head's queries, what each must have to do, and what has to be left of the rounds' time for more than
two."""
_MOST_STEPS = 8
"""Of a tile of keys, with which blocks that take several tiles were measured."""
_ROW_TILE, _KEY_TILE = 64, 128


def parts_of_heads(problem: Problem, columns: int) -> int:
    """Blocks that share the heads of a group, where a block has so many keys, and few blocks would be made of them all.

    Of queries that see all keys, or under a causal mask.
    """
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


def divided(problem: Problem, columns: int, rows: int) -> tuple[int, int]:
    """(parts of a group's heads, parts of a head's queries) that different blocks of one kernel go over.

    Queries are parted where heads are too few to fill the last round of blocks: by whole tiles of so many rows.
    """
    masking, cores = problem.masking, target_device().core_count
    best, splits = parts_of_heads(problem, columns), 1
    if masking.right is not None:
        return best, splits
    tiles = -(-masking.queries // rows)
    blocks = problem.batch * problem.key_heads * -(-masking.keys // columns)
    least = -(-best * blocks // cores) / best
    for n in range(2, _MOST_SPLITS + 1):
        rounds = -(-n * best * blocks // cores) / (n * best)
        steps = problem.group // best * tiles // n
        gain = _GAIN if splits == 1 else _FURTHER_GAIN
        if tiles % n == 0 and steps >= _LEAST_STEPS and rounds <= gain * least:
            splits, least = n, rounds
    return best, splits


def has_steps_for_one(problem: Problem, parts: int) -> bool:
    """Whether there is so much to do that one kernel is faster than two; parts: blocks that share a group's heads."""
    masking = problem.masking
    keys = masking.keys
    pairs = masking.queries * keys
    if masking.right is not None:
        keys = min(keys, masking.queries)
        pairs = masking.queries * keys - keys * keys // 2
    steps = problem.batch * problem.heads * pairs / (_ROW_TILE * _KEY_TILE * target_device().core_count)
    tiles = -(-keys // _KEY_TILE)
    least = (_STEPS if parts == 1 else _STEPS_OF_PARTS)[problem.head_size]
    is_enough = masking.is_causal or steps * tiles >= least
    return is_enough and steps >= _STEPS_A_TILE[masking.is_causal] * tiles


def spread_heads(problem: Problem, rows: int, parts: int, splits: int = 1) -> int:
    """Heads over whose queries one kernel's blocks begin apart, or 0 for blocks that begin together.

    rows: of a tile of queries. parts, splits: as in `divided`.
    """
    masking = problem.masking
    keys, queries = -(-masking.keys // _KEY_TILE), -(-masking.queries // rows)
    sums = 8 * problem.batch * problem.heads * queries * rows * problem.head_size
    queries //= splits
    is_less = keys < _SPREAD_TILES[parts > 2] and sums > _SPREAD_BYTES * (keys - 1)
    if masking.has_band or is_less:
        return 0
    heads = problem.group // parts
    # At least one of two blocks has a tile of its own.
    return next((n for n in range(1, heads) if heads % n == 0 and 2 * n * queries >= keys), heads)


def tiles_in_turn(problem: Problem, config: BackwardConfig) -> BackwardConfig:
    """config, where blocks of dkey and dvalue take several tiles of keys each, if these are more than run at once and
    take few steps: as many as can be at no more rounds of tiles."""
    own = folded(problem) if config.folds else problem
    masking, keys, cores = own.masking, config.keys, target_device().core_count
    heads = own.group // keys.parts
    is_plain = not features_of(problem) and not masking.has_band and keys.shares_keys
    if not is_plain or heads * -(-masking.queries // keys.rows) > _MOST_STEPS:
        return config
    lanes, tiles = own.batch * own.key_heads * keys.parts, -(-masking.keys // keys.columns)
    most = min(tiles, -(-lanes * tiles // cores))
    rounds = {n: n * -(-lanes * -(-tiles // n) // cores) for n in range(1, most + 1)}
    best = max(n for n in rounds if rounds[n] == min(rounds.values()))
    return replace(config, keys=replace(keys, tiles=best))


def shared_keys(problem: Problem, config: BackwardConfig) -> BackwardConfig:
    """config, where blocks of dquery share keys if there are few of them, and all see all of many keys."""
    masking = problem.masking
    is_plain = not features_of(problem) and masking.left is None and masking.right is None
    if not is_plain or problem.head_size > _LARGEST_HEAD:
        return config
    own = folded(problem) if config.folds else problem
    lanes, cores = own.batch * own.heads, target_device().core_count
    queries = config.queries
    rows = -(-own.masking.queries // WARPGROUP_ROWS)
    # Two have no more rows then, and take half of the steps.
    is_even = rows % 2 == 0 and padded_head(problem.head_size) != 96
    if lanes * rows * 2 <= cores and not is_even:
        queries = one_warpgroup(queries)
    blocks, tiles = lanes * -(-own.masking.queries // queries.rows), -(-masking.keys // queries.columns)
    each = -(-tiles // max(1, min(tiles, cores // max(1, blocks))))
    if tiles - each < _SPARED:
        return config
    return replace(config, queries=replace(queries, parts=-(-tiles // each)))
