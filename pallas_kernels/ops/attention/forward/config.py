"""Configurations of the forward kernel: the choices, the default, and the candidates worth measuring."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

from pallas_kernels import tuning
from pallas_kernels.ops.attention.cost import cheapest, launch_cost
from pallas_kernels.ops.attention.few_queries import decodes
from pallas_kernels.ops.attention.launch import MORE_FOR_PRODUCER, REGISTERS
from pallas_kernels.ops.attention.problem import Problem
from pallas_kernels.primitives.platform import target_device

ROWS = 64
"""Queries of a consumer warpgroup: the rows of a wgmma."""
STAGES = 2
"""Key tiles, and value tiles, in shared memory at once."""
_ROW_COST = {1: 1.5, 2: 1.0, 3: 0.82}
"""Time of a query row by the warpgroups of a block, relative to two. One's softmax runs beside no products (8.1 µs for
11.3 of two, with twice the rows, in one round). Three keep the tensor cores busier (launches take 0.86 to 0.97)."""
_LEAST_SIZE = 32
"""Smaller heads take XLA: more than half of a padded tile would be zeros.

Heads of 40 in tiles of 64, 8x32x12x40 bf16: 2.6 µs forward (H200); XLA 13.0 (H100).
"""
_LEAST_GROUPS = 32
"""With fewer key heads of all sequences, one query takes XLA, or the decoding kernel, which splits keys.

8 groups of 1024 and 8192 masked keys take 18 and 108 µs where XLA takes 10 and 21, 32 groups of 1024 and 4096 take 20
and 63 where XLA takes 25 and 72.
"""
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
    registers: of a thread of the producer and of a consumer.
    """

    warpgroups: int = 2
    columns: int = 128
    queries_in_registers: bool = False
    ping_pong: bool = True
    is_persistent: bool = True
    own_output: bool = True
    output_parts: int = 1
    registers: tuple[int, int] = MORE_FOR_PRODUCER

    @property
    def rows(self) -> int:
        """Queries of a block."""
        return self.warpgroups * ROWS


def forward_cost(problem: Problem, config: ForwardConfig) -> float:
    """The estimated time, in products of 64 queries by 64 keys: of the key tiles that each warpgroup's queries see."""
    masking = problem.masking
    rows = range(0, -(-masking.queries // config.rows) * config.rows, ROWS)
    tiles = [masking.key_tiles(row, ROWS, config.columns) for row in rows]
    costs = [_ROW_COST[config.warpgroups] * max(1, tile.last - tile.first) * config.columns / 64 for tile in tiles]
    blocks = [sum(costs[i : i + config.warpgroups]) for i in range(0, len(costs), config.warpgroups)]
    return launch_cost(blocks, problem.batch * problem.heads)


def default_forward(problem: Problem) -> ForwardConfig:
    """The configuration of least estimated time among those whose registers suffice; TUNING.md has the measurements."""
    usual = _of_two_warpgroups(problem)
    return cheapest(usual, _alternatives(problem, usual).values(), partial(forward_cost, problem))


def _alternatives(problem: Problem, usual: ForwardConfig) -> dict[str, ForwardConfig]:
    """Forms with other numbers of warpgroups, by name."""
    masking, size = problem.masking, problem.head_size
    if problem.features:
        return {}
    found = {}
    fills_one_round = problem.batch * problem.heads * -(-masking.queries // ROWS) <= target_device().core_count
    if fills_one_round or (masking.is_causal and size <= 128):
        # A consumer has more registers than each of two.
        one = replace(usual, warpgroups=1, ping_pong=False, registers=(40, 240))
        found["one warpgroup"] = one if fills_one_round else replace(one, columns=64)
    is_whole = masking.keys % usual.columns == 0 if masking.right is None else masking.is_causal
    if size == 64 and usual.columns == 128 and masking.left is None and is_whole:
        # Queries in registers would spill 96 bytes (144 if no consumer skips tiles, see `Block.skips_tiles`).
        found["three warpgroups"] = replace(usual, warpgroups=3, queries_in_registers=False, registers=(32, 160))
    return found


def _of_two_warpgroups(problem: Problem) -> ForwardConfig:
    """The form of two warpgroups that has registers for the problem's features; each holds some beside the scores."""
    masking, size, features = problem.masking, problem.head_size, problem.features + (problem.masking.left is not None)
    is_large, narrows = size > 128, problem.value_size < size
    # Masks and panels take too many registers in a loop over query tiles.
    is_tight = is_large and not narrows and masking.has_band and problem.in_panels and masking.keys <= 128
    if is_tight or features > (not is_large):
        return ForwardConfig(columns=64, is_persistent=False, own_output=narrows)  # in the layout of values, not keys
    if narrows:
        return ForwardConfig(output_parts=2)
    if is_large and size <= 192:
        return ForwardConfig(columns=64)
    if is_large:
        takes_turns = masking.keys < _KEYS_OF_TURNS
        return ForwardConfig(columns=64, output_parts=2, ping_pong=takes_turns, registers=REGISTERS)
    if features or (masking.has_band and not masking.is_causal):
        return ForwardConfig(queries_in_registers=bool(problem.dropout_rate))
    if masking.keys <= 64:
        return ForwardConfig(columns=64)
    if masking.is_causal:
        # Two key tiles in panels of 32 columns leave ptxas no registers for turns.
        takes_turns = not (size == 96 and problem.in_panels and masking.keys <= 256)
        return ForwardConfig(queries_in_registers=size <= 96, ping_pong=takes_turns)
    # With queries in registers, ptxas has none for a last tile that is not whole, or for panels.
    holds_queries = size > 64 and masking.keys % 128 == 0 and not problem.in_panels
    takes_turns = not holds_queries or masking.keys <= _KEYS_OF_TURNS
    return ForwardConfig(queries_in_registers=holds_queries, ping_pong=takes_turns)


def tuned_forward(problem: Problem) -> ForwardConfig:
    """The measured best of the candidates, else the default."""
    candidates, untuned = partial(forward_candidates, problem), default_forward(problem)
    return tuning.configuration("attention", "forward", known(problem), candidates, untuned=untuned)


def known(problem: Problem) -> tuning.Key:
    """The tuned table's key of a problem. Lengths are exact, as a last tile that is not whole takes registers."""
    masking = problem.masking
    left, right = ("all" if side is None else side for side in (masking.left, masking.right))
    further = {
        "segments": masking.has_segments,
        "bias": problem.has_bias,
        "mask": problem.has_mask,
        "mask_value": problem.mask_value,
        "softcap": problem.softcap,
        "dropout": problem.dropout_rate,
        "narrower heads": problem.clips,
    }
    return {
        "batch": tuning.near(problem.batch),
        "queries": masking.queries,
        "keys": masking.keys,
        "heads": problem.heads,
        "key_heads": problem.key_heads,
        "head_size": problem.head_size,
        **({} if problem.value_size == problem.head_size else {"value_size": problem.value_size}),
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
    usual = _of_two_warpgroups(problem)
    candidates |= {"two warpgroups": usual, **_alternatives(problem, usual)}
    if not problem.features:
        candidates["fewer keys a tile"] = replace(base, columns=64)
    return candidates


def preferred(problem: Problem, head_size: int) -> tuple[str, ...]:
    """The implementations to try, in this order, where the caller leaves the choice; "xla" if there are none.

    A single key has weights of one, for which XLA has two short kernels. head_size: of the arrays.
    """
    is_idle = problem.masking.queries == 1 and problem.batch * problem.key_heads < _LEAST_GROUPS
    is_left = problem.masking.keys == 1 or head_size < _LEAST_SIZE or (is_idle and not decodes(problem))
    untuned = () if is_left else ("mosaic",)
    return tuple(tuning.implementations("attention", known(problem), untuned=untuned))
