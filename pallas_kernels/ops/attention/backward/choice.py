"""Which form the backward pass takes: the untuned choice, what is worth measuring, and the measured best."""

from __future__ import annotations

from dataclasses import replace

from pallas_kernels import tuning
from pallas_kernels.ops.attention.backward.config import (
    BackwardConfig,
    FusedConfig,
    backward_config,
    features_of,
    padded_head,
)
from pallas_kernels.ops.attention.backward.fused.launch import COLUMNS, ROWS
from pallas_kernels.ops.attention.backward.parts import (
    divided,
    has_steps_for_one,
    parts_of_heads,
    shared_keys,
    spread_heads,
    tiles_in_turn,
)
from pallas_kernels.ops.attention.backward.short import short_lengths
from pallas_kernels.ops.attention.forward.config import known
from pallas_kernels.ops.attention.masking import Masking
from pallas_kernels.ops.attention.problem import Problem
from pallas_kernels.ops.attention.tiles.row_tiles import is_ragged
from pallas_kernels.primitives.platform import target_device

_LEAST, _MOST = 480, {64: 8192, 96: 16384, 128: 16384}
"""Lengths with which one kernel is taken, the longest one under a causal mask by head size: blocks wait for each other
there, the more the longer."""
_MANY_BLOCKS = {64: 512, 96: 256, 128: 256}
"""Blocks of one kernel with which it was faster from the least length on under a causal mask, by head size, where none
share a group."""
_LONG_ALONE = 1200
"""From which on it is with fewer."""
_LONG = 2048
"""From which on blocks of two kernels share a group's heads as those of one do."""
_PADDED = {True: 3072, False: 2048}
"""Causal or not: lengths from which on padding arrays takes less than products by panels of 32 columns."""


_UNSEEN_ROUNDS, _UNSEEN = 3, 4
"""Blocks of keys that nobody sees, for each multiprocessor, and times what is seen that keys must be, with which XLA
writes zeros sooner."""


def can_fuse(problem: Problem) -> bool:
    """Whether one kernel can make all gradients: its registers are full with a causal mask."""
    masking = problem.masking
    is_simple = masking.left is None and not masking.has_segments and problem.dense != "bias"
    return is_simple and padded_head(problem.head_size) in ROWS


def with_whole_tiles(problem: Problem) -> Problem:
    """The problem of one kernel with keys of zeros up to whole tiles, so that no tile is masked for their sake.

    Under a causal mask nobody sees them; else weights are bounded.
    """
    masking = problem.masking
    extra = -masking.keys % COLUMNS
    if not extra or not _sees_none_beyond(masking):
        return problem
    whole = replace(masking, keys=masking.keys + extra)
    return replace(problem, masking=whole, bounds_weights=masking.right is None)


def of_seen_keys(problem: Problem) -> Problem:
    """The problem without the keys behind the last one that a mask lets any query see, if they are very many.

    Each tile of them would be a block that stores zeros.
    """
    masking = problem.masking
    if masking.right is None or masking.has_segments or features_of(problem):
        return problem
    seen = -(-max(1, masking.queries + masking.right) // COLUMNS) * COLUMNS
    unseen = problem.batch * problem.key_heads * (masking.keys - seen) // COLUMNS
    if unseen < _UNSEEN_ROUNDS * target_device().core_count or masking.keys < _UNSEEN * seen:
        return problem
    return replace(problem, masking=replace(masking, keys=seen))


def _sees_none_beyond(masking: Masking) -> bool:
    return masking.right is None or (masking.right == 0 and masking.queries <= masking.keys)


def _fused(problem: Problem) -> FusedConfig:
    """Of one kernel, the fastest form by head size and mask."""
    size = padded_head(problem.head_size)
    is_small = size == 64
    lengths = (problem.masking.queries, problem.masking.keys)
    pads = size == 96 and is_ragged(problem.masking) and min(lengths) >= _PADDED[problem.masking.is_causal]
    if not problem.masking.is_causal:
        one = FusedConfig(waves=0, finishers=True, warps_apart=True, pads=pads)
        # With a head size of 64, scores of all of a step's queries leave no registers for a product that is unfinished.
        return one if is_small else replace(one, overlaps=size == 128, automatic_barriers=False)
    one = FusedConfig(heads_inside=True, overlaps=size != 96, automatic_barriers=False, pads=pads)
    if size < 128 and (is_ragged(problem.masking) or size != problem.head_size):
        # What brings panels has no registers else.
        one = replace(one, memory_registers=40, compute_registers=232)
    return replace(one, halves=True) if is_small else replace(one, warps_apart=True)


def default_backward(problem: Problem) -> BackwardConfig:
    """The untuned choice: one kernel where it was the faster form, see TUNING.md."""
    config, masking = two_kernels(problem), problem.masking
    # With a last tile of keys that is masked ptxas spills.
    is_whole = (masking.keys % COLUMNS == 0 or _sees_none_beyond(masking)) and problem.head_size in ROWS
    is_plain = not features_of(problem) and masking.right in (None, 0)
    if not (can_fuse(problem) and is_plain and is_whole):
        return config
    lengths = (masking.queries, masking.keys)
    blocks = problem.batch * problem.key_heads * -(-masking.keys // COLUMNS)
    rows = ROWS[problem.head_size]
    parts, splits = divided(problem, COLUMNS, rows)
    has_many = min(lengths) >= _LONG_ALONE or blocks >= _MANY_BLOCKS[problem.head_size]
    is_best = has_steps_for_one(problem, parts) or (masking.is_causal and parts == 1 and has_many)
    is_short = masking.right is None or max(lengths) <= _MOST[problem.head_size]
    if is_best and is_short and min(lengths) >= _LEAST:
        spread = spread_heads(problem, rows, parts, splits)
        one = replace(_fused(problem), parts=parts, splits=splits, spread=spread)
        return replace(config, fused=one, keys=replace(config.keys, parts=1, tiles=1))
    return config


def two_kernels(problem: Problem) -> BackwardConfig:
    """The untuned choice of two kernels."""
    config = short_lengths(problem, backward_config(problem.head_size, features=features_of(problem)))
    masking = problem.masking
    config = shared_keys(problem, config)
    if problem.head_size <= 64 and not features_of(problem) and masking.left is None and masking.right in (None, 0):
        config = replace(config, keys=replace(config.keys, overlaps=True))
    if is_ragged(masking) and problem.head_size > max(ROWS):
        # Products by panels leave ptxas no registers for Pallas's barriers.
        config = replace(config, queries=replace(config.queries, automatic_barriers=False))
    if is_ragged(masking) and problem.head_size == 96 and config.queries.warpgroups == 2:
        config = replace(config, queries=replace(config.queries, memory_registers=40, compute_registers=232))
    is_plain = not features_of(problem) and masking.right in (None, 0)
    lengths = (masking.queries, masking.keys)
    if is_plain and masking.left is None and max(lengths) >= _LONG and not config.folds:
        keys = replace(config.keys, parts=max(config.keys.parts, parts_of_heads(problem, config.keys.columns)))
        config = replace(config, keys=keys)
    return tiles_in_turn(problem, config)


def backward_candidates(problem: Problem) -> dict[str, BackwardConfig]:
    """The configurations worth measuring, by name. All of them give the same bits each time."""
    two = two_kernels(problem)
    found = {
        "two kernels": two,
        "two kernels, sections for the cache": replace(two, keys=replace(two.keys, waves=0)),
    }
    if two.keys.parts > 1:
        found["two kernels, blocks with all heads of a group"] = replace(two, keys=replace(two.keys, parts=1))
    if two.queries.parts > 1:
        found["two kernels, blocks with all keys"] = replace(two, queries=replace(two.queries, parts=1))
    if two.folds:
        found["two kernels, not folded"] = replace(two, folds=False)
    if two.keys.tiles > 1:
        found["two kernels, blocks with one tile of keys"] = replace(two, keys=replace(two.keys, tiles=1))
    if can_fuse(problem) and not features_of(problem):
        base = _fused(problem)
        shared = replace(base, parts=parts_of_heads(problem, COLUMNS))
        one = {
            "one kernel": base,
            "one kernel, blocks share a group": shared,
            "one kernel, sections for the cache": replace(base, waves=0),
            "one kernel, 2 waves": replace(base, waves=2),
            "one kernel, 4 waves": replace(base, waves=4),
            "one kernel, other order of heads": replace(base, heads_inside=not base.heads_inside),
            "one kernel, products overlap or not": replace(base, overlaps=not base.overlaps),
            "one kernel, other barriers": replace(base, automatic_barriers=not base.automatic_barriers),
            "one kernel, others finish": replace(base, finishers=not base.finishers),
            "one kernel, warps apart or not": replace(base, warps_apart=not base.warps_apart),
        }
        if not problem.masking.has_band:
            one["one kernel, blocks begin apart"] = replace(base, spread=1)
            one["one kernel, blocks share a group and begin apart"] = replace(shared, spread=1)
            parts, splits = divided(problem, COLUMNS, ROWS[padded_head(problem.head_size)])
            if splits > 1:
                split = replace(base, parts=parts, splits=splits, spread=1)
                one["one kernel, queries split, blocks begin apart"] = split
        if is_ragged(problem.masking):
            one["one kernel, arrays padded or not"] = replace(base, pads=not base.pads)
        whole = replace(two, folds=False, keys=replace(two.keys, parts=1, tiles=1))
        found |= {name: replace(whole, fused=fused) for name, fused in one.items()}
    return found


def tuned_backward(problem: Problem) -> BackwardConfig:
    """The measured best of the candidates, else the untuned choice: of the keys that are seen."""
    seen = of_seen_keys(problem)
    candidates, untuned = backward_candidates(seen), default_backward(seen)
    return tuning.configuration("attention", "backward", known(problem), candidates, untuned=untuned)
