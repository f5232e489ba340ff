"""Which form the backward pass takes: the untuned choice, what is worth measuring, and the measured best."""

from __future__ import annotations

from dataclasses import replace

from pallas_kernels import tuning
from pallas_kernels.ops.attention.backward_config import (
    BackwardConfig,
    FusedConfig,
    backward_config,
    features_of,
    padded_head,
)
from pallas_kernels.ops.attention.backward_fused import COLUMNS, HEAD_SIZE
from pallas_kernels.ops.attention.config import known
from pallas_kernels.ops.attention.problem import Problem

_LEAST, _MOST, _MOST_CAUSAL = 2048, 8192, 16384
"""Lengths with which one kernel is taken. Blocks wait for each other, the more the longer."""


def can_fuse(problem: Problem) -> bool:
    """Whether one kernel can make all gradients: its registers are full with a head size of 128 and a causal mask."""
    masking = problem.masking
    is_simple = masking.left is None and not masking.has_segments and problem.dense != "bias"
    return is_simple and padded_head(problem.head_size) == HEAD_SIZE


def default_backward(problem: Problem) -> BackwardConfig:
    """The untuned choice: one kernel where it was the faster form. TUNING-backward.md says what of it was measured: not
    the full one since it stores first and rounds."""
    config = backward_config(problem.head_size, features=features_of(problem))
    masking = problem.masking
    is_plain = not features_of(problem) and masking.right in (None, 0)
    # With a last tile of keys that is not whole ptxas spills.
    is_whole = masking.keys % COLUMNS == 0 and problem.head_size == HEAD_SIZE
    most = _MOST_CAUSAL if masking.is_causal else _MOST
    is_measured = all(_LEAST <= length <= most for length in (masking.queries, masking.keys))
    if not (can_fuse(problem) and is_plain and is_whole and is_measured):
        return config
    return replace(config, fused=FusedConfig(heads_inside=True) if masking.is_causal else FusedConfig(waves=0))


def backward_candidates(problem: Problem) -> dict[str, BackwardConfig]:
    """The configurations worth measuring, by name. All of them give the same bits each time."""
    two = replace(default_backward(problem), fused=None)
    found = {
        "two kernels": two,
        "two kernels, sections for the cache": replace(two, keys=replace(two.keys, waves=0)),
    }
    if can_fuse(problem) and not features_of(problem):
        one = {
            "one kernel": FusedConfig(),
            "one kernel, sections for the cache": FusedConfig(waves=0),
            "one kernel, heads inside": FusedConfig(heads_inside=True),
            "one kernel, heads inside, 4 waves": FusedConfig(heads_inside=True, waves=4),
        }
        found |= {name: replace(two, fused=fused) for name, fused in one.items()}
    return found


def tuned_backward(problem: Problem) -> BackwardConfig:
    """The measured best of the candidates, else the untuned choice."""
    untuned = default_backward(problem)
    return tuning.configuration("attention", "backward", known(problem), backward_candidates(problem), untuned=untuned)
