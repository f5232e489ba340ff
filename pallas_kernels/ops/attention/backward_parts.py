"""How many blocks share what one could do, where there are few: see TUNING-backward.md."""

from __future__ import annotations

from dataclasses import replace

from pallas_kernels.ops.attention.backward_config import WARPGROUP_ROWS, BackwardConfig, features_of, one_warpgroup
from pallas_kernels.ops.attention.folded import folded
from pallas_kernels.ops.attention.problem import Problem
from pallas_kernels.primitives.platform import target_device

_ROUNDS = 1.75
"""Blocks for each multiprocessor with which the longest one under a causal mask takes no longer than all together."""
_GAIN = 0.9
"""Of the time of the rounds, what has to be left of it for more parts without a mask."""
_STEPS = 3
"""That a block of dquery must have fewer, for which XLA's addition takes as long as one or two."""
_LARGEST_HEAD = 128
_STEPS_A_TILE = {True: 3.5, False: 5.0}
"""Causal or not: so many steps of a multiprocessor for each tile of a lane's keys make one kernel with parts the faster
form, although its blocks wait for each other in a row."""
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


def shares_in_order(problem: Problem) -> bool:
    """Whether one kernel's blocks have so much to do that it matters little how they wait for each other at first."""
    masking = problem.masking
    keys = masking.keys
    pairs = masking.queries * keys
    if masking.right is not None:
        keys = min(keys, masking.queries)
        pairs = masking.queries * keys - keys * keys // 2
    steps = problem.batch * problem.heads * pairs / (_ROW_TILE * _KEY_TILE * target_device().core_count)
    return steps >= _STEPS_A_TILE[masking.is_causal] * -(-keys // _KEY_TILE)


def shared_keys(problem: Problem, config: BackwardConfig) -> BackwardConfig:
    """config, where blocks of dquery share keys if there are few of them, and all see all of many keys."""
    masking = problem.masking
    is_plain = not features_of(problem) and masking.left is None and masking.right is None
    if not is_plain or problem.head_size > _LARGEST_HEAD:
        return config
    own = folded(problem) if config.folds else problem
    lanes, cores = own.batch * own.heads, target_device().core_count
    queries = config.queries
    if lanes * -(-own.masking.queries // WARPGROUP_ROWS) * 2 <= cores:
        queries = one_warpgroup(queries)
    blocks, tiles = lanes * -(-own.masking.queries // queries.rows), -(-masking.keys // queries.columns)
    each = -(-tiles // max(1, min(tiles, cores // max(1, blocks))))
    if tiles - each < _STEPS:
        return config
    return replace(config, queries=replace(queries, parts=-(-tiles // each)))
