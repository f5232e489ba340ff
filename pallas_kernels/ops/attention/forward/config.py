"""Configurations of the forward kernel: the choices, the default, and the candidates worth measuring."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

from pallas_kernels import tuning
from pallas_kernels.ops.attention.problem import LEAST_SIZE, Problem
from pallas_kernels.primitives.platform import target_device

ROWS = 64
"""Queries of a consumer warpgroup: the rows of a wgmma."""
STAGES = 2
"""Key tiles, and value tiles, in shared memory at once."""
_SHORT = 512
"""Up to so many keys, masked tiles are a large part, and their instructions count."""
_FEW_ROUNDS = 1.5
"""Blocks of 64 queries a multiprocessor up to which they were faster than blocks of 128, causal."""
_COST_OF_THREE = 0.87
"""Time per query row with three consumer warpgroups, relative to two: measured 0.86 to 0.97."""
_KEYS_OF_TURNS = 1024
"""Up to so many keys, all visible and in whole tiles, warpgroups take turns."""


@dataclass(frozen=True, kw_only=True)
class ForwardConfig:
    """How the forward kernel splits its work.

    warpgroups: consumers, each with 64 queries of one head; one more, the producer, loads operands.
    columns: keys of a tile.
    queries_in_registers: queries are loaded to registers once, and not read from shared memory for each key tile.
    ping_pong: consumers take turns in issuing products, so that one's softmax runs beside the others' products.
    is_persistent: one block a multiprocessor takes one query tile after the other, and loads the next one's operands
        meanwhile; else each query tile has a block.
    own_output: the output has its own shared memory, so that the next queries need not wait for it to be stored.
    output_parts: parts of the output's columns, stored one after the other through the same shared memory: large heads
        leave no room for all.
    short_masks: masks compare columns in the tile, which are constants, with bounds that are computed once a row, and
        at either end of a window only with that end's.
    memory_registers, compute_registers: of a thread of the producer and of a consumer.
    """

    warpgroups: int = 2
    columns: int = 128
    queries_in_registers: bool = False
    ping_pong: bool = True
    is_persistent: bool = True
    own_output: bool = False
    output_parts: int = 1
    short_masks: bool = False
    memory_registers: int = 40
    compute_registers: int = 232

    @property
    def rows(self) -> int:
        """Queries of a block."""
        return self.warpgroups * ROWS


def default_forward(problem: Problem) -> ForwardConfig:
    """The default configuration; TUNING.md has the measurements."""
    masking, size = problem.masking, problem.head_size
    cores = target_device().core_count
    blocks = problem.batch * problem.heads * -(-masking.queries // ROWS)
    config = _of_many_blocks(problem)
    if _further(problem) > (masking.left is not None):
        return config
    one = _of_one_warpgroup(config)
    if blocks <= cores:
        # Blocks of two warpgroups would leave half of the multiprocessors idle.
        return one
    is_short = min(masking.keys, masking.queries) <= _SHORT and masking.left is None
    if not (masking.is_causal and is_short):
        return config
    if size <= 128 and blocks <= _FEW_ROUNDS * cores:
        return replace(one, columns=64)
    return config


def _of_one_warpgroup(config: ForwardConfig) -> ForwardConfig:
    """The configuration with one consumer, which has more registers than each of two."""
    return replace(config, warpgroups=1, ping_pong=False, memory_registers=40, compute_registers=240)


def _of_three_warpgroups(config: ForwardConfig) -> ForwardConfig:
    """Returns the configuration with three consumer warpgroups, for heads of 64, which need few registers.

    With queries in registers it would spill 96 bytes (144 if no consumer skips tiles, see `Block.skips_tiles`).
    """
    registers = {"memory_registers": 32, "compute_registers": 160}
    return replace(config, warpgroups=3, queries_in_registers=False, short_masks=True, **registers)


def _has_rounds_of_three(problem: Problem) -> bool:
    """Whether three warpgroups a block are estimated to finish sooner than two, counting rounds of whole blocks."""

    def rows(warpgroups: int) -> int:
        blocks = problem.batch * problem.heads * -(-problem.masking.queries // (warpgroups * ROWS))
        return -(-blocks // target_device().core_count) * warpgroups

    return _COST_OF_THREE * rows(3) < rows(2)


def _of_many_blocks(problem: Problem) -> ForwardConfig:
    masking, size, further = problem.masking, problem.head_size, _further(problem)
    if size > 128:
        return _of_large_heads(problem)
    if further > 1:
        # Each feature holds registers beside a tile's scores.
        return ForwardConfig(columns=64, is_persistent=False)
    config = ForwardConfig(
        own_output=True,
        queries_in_registers=bool(problem.dropout_rate),
        short_masks=True,
    )
    if further:
        return config
    if not masking.has_band:
        if masking.keys <= 64:
            return replace(config, columns=64)
        if masking.keys % config.columns:
            return config
        if size == 64:
            return _of_three_warpgroups(config) if _has_rounds_of_three(problem) else config
        if problem.in_panels:
            return config  # queries in registers leave ptxas none for panels
        takes_turns = masking.keys <= _KEYS_OF_TURNS
        return replace(config, queries_in_registers=True, ping_pong=takes_turns)
    if masking.is_causal and size <= 96:
        is_short = size == 64 and masking.keys <= _SHORT
        if size == 64 and not is_short and _has_rounds_of_three(problem):
            return _of_three_warpgroups(config)
        # Two key tiles in panels of 32 columns leave ptxas no registers for turns.
        takes_turns = not (size == 96 and problem.in_panels and masking.keys <= 2 * config.columns)
        return replace(
            config, queries_in_registers=not is_short, short_masks=size > 64 or is_short, ping_pong=takes_turns
        )
    return config


def _of_large_heads(problem: Problem) -> ForwardConfig:
    masking = problem.masking
    config = ForwardConfig(columns=64, is_persistent=False)
    if _further(problem):
        return config
    config = replace(config, short_masks=True)
    if masking.has_band and problem.in_panels and masking.keys <= 2 * config.columns:
        # Masks and panels take too many registers in a loop over query tiles.
        return config
    if problem.head_size <= 192:
        return replace(config, is_persistent=True, own_output=True)
    registers = {"memory_registers": 24, "compute_registers": 240}
    takes_turns = masking.keys < _KEYS_OF_TURNS
    return replace(config, is_persistent=True, own_output=True, output_parts=2, ping_pong=takes_turns, **registers)


def _further(problem: Problem) -> int:
    """The number of features, beside a causal mask, that take registers."""
    masking = problem.masking
    things = (problem.dense, problem.softcap, problem.dropout_rate, masking.has_segments, masking.left is not None)
    return sum(map(bool, things))


def tuned_forward(problem: Problem) -> ForwardConfig:
    """The measured best of the candidates, else the default."""
    candidates, untuned = partial(forward_candidates, problem), default_forward(problem)
    return tuning.configuration("attention", "forward", known(problem), candidates, untuned=untuned)


def known(problem: Problem) -> tuning.Problem:
    """The tuned table's key of a problem. Lengths are exact, as a last tile that is not whole takes registers."""
    masking = problem.masking
    left, right = ("all" if side is None else side for side in (masking.left, masking.right))
    further = {
        "segments": masking.has_segments,
        str(problem.dense): problem.dense,
        "softcap": problem.softcap,
        "dropout": problem.dropout_rate,
    }
    return {
        "batch": tuning.near(problem.batch),
        "queries": masking.queries,
        "keys": masking.keys,
        "heads": problem.heads,
        "key_heads": problem.key_heads,
        "head_size": problem.head_size,
        "dtype": problem.dtype.name,
        "before": left,
        "after": right,
        "with": "+".join(name for name, is_there in further.items() if is_there) or "nothing",
    }


def forward_candidates(problem: Problem) -> dict[str, ForwardConfig]:
    """The configurations worth measuring, by name."""
    base = default_forward(problem)
    candidates = {
        "default": base,
        "no ping-pong": replace(base, ping_pong=False),
        "other grid": replace(base, is_persistent=not base.is_persistent),
        "other output": replace(base, own_output=not base.own_output, output_parts=1),
        "queries elsewhere": replace(base, queries_in_registers=not base.queries_in_registers),
    }
    if not _further(problem):
        candidates |= {
            "one warpgroup": _of_one_warpgroup(base),
            "two warpgroups": _of_many_blocks(problem),
            "fewer keys a tile": replace(base, columns=64),
        }
        if problem.head_size == 64:
            candidates["three warpgroups"] = _of_three_warpgroups(_of_many_blocks(problem))
    if problem.masking.has_band and not problem.masking.has_segments:
        candidates["other masks"] = replace(base, short_masks=not base.short_masks)
    return candidates


def preferred(problem: Problem) -> tuple[str, ...]:
    """The implementations to try, in this order, where the caller leaves the choice; "xla" if there are none.

    A single key has weights of one, for which XLA has two short kernels.
    """
    untuned = () if problem.masking.keys == 1 or problem.head_size < LEAST_SIZE else ("mosaic",)
    return tuple(tuning.implementations("attention", known(problem), untuned=untuned))
