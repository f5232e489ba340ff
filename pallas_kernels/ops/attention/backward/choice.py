"""Which form the backward pass takes: the default, the candidates for tuning, and the measured best."""

from __future__ import annotations

from dataclasses import replace

from pallas_kernels import tuning
from pallas_kernels.ops.attention.backward.config import (
    WARPGROUP_ROWS,
    BackwardConfig,
    FusedConfig,
    backward_config,
    features_of,
    one_warpgroup,
    padded_head,
)
from pallas_kernels.ops.attention.backward.fused.launch import COLUMNS, ROWS
from pallas_kernels.ops.attention.forward.config import known
from pallas_kernels.ops.attention.gqa_packing import can_pack, packed
from pallas_kernels.ops.attention.masking import Masking
from pallas_kernels.ops.attention.problem import Problem
from pallas_kernels.ops.attention.tiles.row_tiles import is_ragged
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


def tiles_in_turn(problem: Problem, config: BackwardConfig) -> BackwardConfig:
    """config, where blocks of dkey and dvalue take several tiles of keys each, if these are more than run at once and
    take few steps: as many as can be at no more rounds of tiles."""
    own = packed(problem) if config.packs else problem
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
    own = packed(problem) if config.packs else problem
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


_SHORT_FROM, _SHORT_TO = 8, 2048
"""Lengths with which more blocks are made of the same work."""
_UNEVEN_KEYS = 512
"""From so many keys on, blocks under a causal mask differ by more than a second round of them costs."""
_TWO_TILES = 256
"""With more keys, smaller blocks under a causal mask gain more than a second round of them costs."""
_SMALL_HEAD = 128
_ONE_STEP = 128
"""Keys with which a block of one warpgroup does not spill under a causal mask."""


def short_lengths(problem: Problem, config: BackwardConfig) -> BackwardConfig:
    """config, with more blocks where there are few, or with one tile for a group's queries where those are few."""
    if can_pack(problem):
        # A second warpgroup would have no queries.
        is_one = packed(problem).masking.queries <= WARPGROUP_ROWS
        return replace(config, queries=one_warpgroup(config.queries) if is_one else config.queries, packs=True)
    masking = problem.masking
    lengths = (masking.queries, masking.keys)
    is_small = problem.head_size <= _SMALL_HEAD
    if features_of(problem) or min(lengths) < _SHORT_FROM or max(lengths) > _SHORT_TO:
        return config
    if masking.left is not None:
        return _with_smaller_blocks(problem, config)
    if masking.right not in (None, 0):
        return config
    if max(lengths) == _SHORT_TO and not masking.is_causal:
        return config  # One kernel makes all gradients.
    keys, queries = config.keys, config.queries
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
    parts = parts_of_heads(problem, COLUMNS)
    has_many = min(lengths) >= _LONG_ALONE or blocks >= _MANY_BLOCKS[problem.head_size]
    is_best = has_steps_for_one(problem, parts) or (masking.is_causal and parts == 1 and has_many)
    is_short = masking.right is None or max(lengths) <= _MOST[problem.head_size]
    if is_best and is_short and min(lengths) >= _LEAST:
        return replace(config, fused=replace(_fused(problem), parts=parts), keys=replace(config.keys, parts=1, tiles=1))
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
    if is_plain and masking.left is None and max(lengths) >= _LONG and not config.packs:
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
    if two.packs:
        found["two kernels, not packed"] = replace(two, packs=False)
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
        if is_ragged(problem.masking):
            one["one kernel, arrays padded or not"] = replace(base, pads=not base.pads)
        whole = replace(two, packs=False, keys=replace(two.keys, parts=1, tiles=1))
        found |= {name: replace(whole, fused=fused) for name, fused in one.items()}
    return found


def tuned_backward(problem: Problem) -> BackwardConfig:
    """The measured best of the candidates, else the untuned choice."""
    candidates, untuned = backward_candidates(problem), default_backward(problem)
    return tuning.configuration("attention", "backward", known(problem), candidates, untuned=untuned)
