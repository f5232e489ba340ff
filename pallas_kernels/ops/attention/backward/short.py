"""What the backward pass does differently where lengths are short: see TUNING.md."""

from __future__ import annotations

from dataclasses import replace

from pallas_kernels.ops.attention.backward.config import WARPGROUP_ROWS, BackwardConfig, features_of, one_warpgroup
from pallas_kernels.ops.attention.folded import can_fold, folded
from pallas_kernels.ops.attention.problem import Problem
from pallas_kernels.primitives.platform import target_device

_LEAST, _MOST = 8, 2048
"""Lengths with which more blocks are made of the same work."""
_LONG = 512
"""From so many keys on, blocks under a causal mask differ by more than a second round of them costs."""
_TWO_TILES = 256
"""With more keys, smaller blocks under a causal mask gain more than a second round of them costs."""
_SMALL_HEAD = 128
_ONE_STEP = 128
"""Keys with which a block of one warpgroup does not spill under a causal mask."""


def short_lengths(problem: Problem, config: BackwardConfig) -> BackwardConfig:
    """config, with more blocks where there are few, or with one tile for a group's queries where those are few."""
    if can_fold(problem):
        # A second warpgroup would have no queries.
        is_one = folded(problem).masking.queries <= WARPGROUP_ROWS
        return replace(config, queries=one_warpgroup(config.queries) if is_one else config.queries, folds=True)
    masking = problem.masking
    lengths = (masking.queries, masking.keys)
    is_small = problem.head_size <= _SMALL_HEAD
    if features_of(problem) or min(lengths) < _LEAST or max(lengths) > _MOST:
        return config
    if masking.left is not None:
        return _with_smaller_blocks(problem, config)
    if masking.right not in (None, 0):
        return config
    if max(lengths) == _MOST and not masking.is_causal:
        return config  # One kernel makes all gradients.
    keys, queries = config.keys, config.queries
    # Blocks of this kernel and of the other.
    cores = target_device().core_count
    most = cores * (2 if masking.is_causal and masking.keys >= _LONG else 1)
    lanes = problem.batch * problem.key_heads
    blocks = lanes * -(-masking.keys // keys.columns)
    parts = max((n for n in range(1, most // blocks + 1) if problem.group % n == 0), default=1)
    halves = replace(keys, shares_keys=False)
    most = cores * (2 if masking.is_causal and masking.keys > _TWO_TILES else 1)
    if parts * lanes * -(-masking.keys // halves.columns) <= most:
        keys = halves
    of_queries = problem.batch * problem.heads * -(-masking.queries // WARPGROUP_ROWS)
    # A second warpgroup would have no queries, or blocks of one are more and no more than run at once.
    is_one = masking.queries <= WARPGROUP_ROWS or (masking.keys <= _ONE_STEP and of_queries <= cores)
    if is_small and is_one:
        queries = one_warpgroup(queries)
    return replace(config, keys=replace(keys, parts=parts), queries=queries)


def _with_smaller_blocks(problem: Problem, config: BackwardConfig) -> BackwardConfig:
    """config, with blocks of 64 keys where those are no more than run at once."""
    halves = replace(config.keys, shares_keys=False)
    blocks = problem.batch * problem.key_heads * -(-problem.masking.keys // halves.columns)
    return replace(config, keys=halves) if blocks <= target_device().core_count else config
