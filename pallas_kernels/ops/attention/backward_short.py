"""What the backward pass does differently where lengths are short: see TUNING-backward.md."""

from __future__ import annotations

from dataclasses import replace

from pallas_kernels.ops.attention.backward_config import WARPGROUP_ROWS, BackwardConfig, features_of
from pallas_kernels.ops.attention.folded import can_fold, folded
from pallas_kernels.ops.attention.problem import Problem
from pallas_kernels.primitives.platform import target_device

_LEAST, _MOST = 256, 2048
"""Lengths with which blocks share a group's heads."""
_LONG = 1024
"""From so many keys on, blocks under a causal mask differ by more than a second round of them costs."""


def short_lengths(problem: Problem, config: BackwardConfig) -> BackwardConfig:
    """config, with more blocks where keys make few, or with one tile for a group's queries where those are few."""
    if not can_fold(problem):
        return replace(config, keys=replace(config.keys, parts=_parts(problem, config.keys.columns)))
    queries = config.queries
    if folded(problem).masking.queries <= WARPGROUP_ROWS:
        # A second warpgroup would have no queries.
        queries = replace(queries, warpgroups=1, memory_registers=40, compute_registers=232)
    return replace(config, queries=queries, folds=True)


def _parts(problem: Problem, columns: int) -> int:
    """Blocks that share a group's heads, of `columns` keys each: as many as there are multiprocessors for."""
    masking = problem.masking
    lengths = (masking.queries, masking.keys)
    is_plain = not features_of(problem) and masking.left is None and masking.right in (None, 0)
    if not is_plain or min(lengths) < _LEAST or max(lengths) > _MOST:
        return 1
    if max(lengths) == _MOST and (problem.head_size != 128 or not masking.is_causal):
        return 1  # One kernel makes all gradients.
    rounds = 2 if masking.is_causal and masking.keys >= _LONG else 1
    blocks = problem.batch * problem.key_heads * -(-masking.keys // columns)
    most = rounds * target_device().core_count // blocks
    return max((parts for parts in range(1, most + 1) if problem.group % parts == 0), default=1)
