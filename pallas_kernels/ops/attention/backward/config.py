"""Configurations of the backward pass: one kernel or two, tiles, stages, and parts, by their estimated time.

A time is counted in products of a warpgroup, 64 queries by 64 keys. The numbers were chosen by hand
to agree with the measurements in TUNING.md.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

from pallas_kernels import tuning
from pallas_kernels.ops.attention.cost import cheapest, launch_cost
from pallas_kernels.ops.attention.forward.config import known
from pallas_kernels.ops.attention.problem import Problem

WARPGROUP_ROWS = 64
"""Rows of an accumulator of one warpgroup."""
WARPGROUPS = 2
"""Consumer warpgroups of the kernel by keys."""
_ROWS_OF_ONE = {64: 128, 96: 64, 128: 64}
"""Queries of a step of one kernel, by head size: as many as there are registers for."""


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
    rows: int = 64
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


def is_plain(problem: Problem) -> bool:
    """Whether queries see all keys, or all up to their own place, and no feature takes registers."""
    masking = problem.masking
    return not problem.features and masking.left is None and masking.right in (None, 0)


def usual_two(problem: Problem) -> BackwardConfig:
    """Two kernels with as many keys and queries a block as there are registers for."""
    size, features = problem.head_size, problem.features
    if size <= 64:
        return BackwardConfig(keys=KeysConfig(stages=3, overlaps=is_plain(problem)), queries=QueriesConfig(slots=6))
    if size <= 128:
        queries = QueriesConfig(columns=64, slots=8, overlaps=True) if features else QueriesConfig()
        return BackwardConfig(keys=KeysConfig(shares_keys=features < 2), queries=queries)
    slots = 4 if size <= 192 else 3
    return BackwardConfig(keys=KeysConfig(shares_keys=False), queries=QueriesConfig(columns=64, slots=slots))


def two_kernels(problem: Problem) -> BackwardConfig:
    """The two kernels of least estimated time."""
    usual, masking = usual_two(problem), problem.masking
    queries = usual.queries
    if not is_plain(problem) or queries is None:
        return usual
    # One warpgroup a block where it has few steps; with more, a causal mask spills.
    if problem.head_size <= 128 and (masking.queries <= WARPGROUP_ROWS or masking.keys <= queries.columns):
        queries = cheapest(queries, [replace(queries, warpgroups=1)], partial(queries_cost, problem))
    keys = cheapest(usual.keys, _other_keys(problem, usual.keys), partial(keys_cost, problem))
    return BackwardConfig(keys=keys, queries=queries)


def _other_keys(problem: Problem, usual: KeysConfig) -> Iterator[KeysConfig]:
    """More blocks: parts of a group's heads, and blocks of 64 keys."""
    # Parts of dkey and dvalue lie in one array.
    for parts in range(1, problem.group + 1 if problem.value_size == problem.head_size else 2):
        if problem.group % parts == 0:
            yield replace(usual, parts=parts)
            if not usual.adds_dquery:
                yield replace(usual, parts=parts, shares_keys=False)


def can_be_one(problem: Problem) -> bool:
    """Whether one kernel serves: it has no registers for features, nor for a masked last key tile."""
    masking, columns = problem.masking, KeysConfig().columns
    is_whole = masking.keys % columns == 0 or masking.right is None or masking.queries <= masking.keys
    has_room = problem.head_size in _ROWS_OF_ONE and problem.value_size == problem.head_size
    return is_plain(problem) and is_whole and has_room


def one_kernel(problem: Problem, parts: int | None = None) -> BackwardConfig:
    """The one kernel of least estimated time, or that with so many parts.

    A step's product for dkey overlaps the next step where registers suffice: not with scores of 128 queries.
    """
    size = problem.head_size
    overlaps = size == 128 or (size == 64 and problem.masking.is_causal)
    keys = KeysConfig(adds_dquery=True, rows=_ROWS_OF_ONE[size], overlaps=overlaps, parts=parts or 1)
    if parts is None:
        keys = cheapest(keys, _other_keys(problem, keys), partial(keys_cost, problem))
    return BackwardConfig(keys=keys, queries=None)


_STEP, _HALF_STEP = 4.0, 3.0
"""Products of a warpgroup for 64 queries and 64 keys of its own, or shared with the other warpgroup."""
_STEP_OF_ONE = {64: 5.5, 96: 6.3, 128: 6.3}
"""The same in one kernel by head size: five products, and adding a share."""
_LEAST_OF_ONE = 480
"""The shortest length at which one kernel was measured."""
_CHAIN = 14.0
"""The time after which a block adds to a sum that its neighbour has added to, so long as all wait."""
_SUMS = {True: 12.0, False: 30.0}
"""Causal or not: the time of XLA's kernels around one kernel, which prepare rows, less what runs beside them."""
_PARTS, _PART_OF_A_KEY = 6.0, 3e-4
"""Of XLA's kernel that adds up parts: its launch, and a part of a key and its value."""


def keys_cost(problem: Problem, config: KeysConfig) -> float:
    """The estimated time of the kernel by keys."""
    masking, columns = problem.masking, config.columns
    step = _STEP if config.shares_keys else _HALF_STEP
    if config.adds_dquery:
        step = _STEP_OF_ONE[problem.head_size]
    step *= config.rows / 64 * problem.group / config.parts
    tiles = [masking.query_tiles(key, columns, config.rows) for key in range(0, masking.keys, columns)]
    costs = [step * (tile.last - tile.first) for tile in tiles]
    cost = launch_cost(costs, problem.batch * problem.key_heads * config.parts)
    if config.adds_dquery:
        chain = _CHAIN * sum(tile.last > tile.first for tile in tiles)
        cost = max(cost, chain if problem.deterministic else 0) + _SUMS[masking.is_causal]
    if config.parts > 1:
        cost += _PARTS + _PART_OF_A_KEY * problem.batch * problem.key_heads * masking.keys * (config.parts + 1)
    return cost


def queries_cost(problem: Problem, config: QueriesConfig) -> float:
    """The estimated time of the kernel of dquery."""
    masking = problem.masking
    step = 3 * config.columns / 64 * config.warpgroups / 2
    rows = range(0, masking.queries, config.rows)
    tiles = [masking.key_tiles(row, config.rows, config.columns) for row in rows]
    return launch_cost([step * max(1, tile.last - tile.first) for tile in tiles], problem.batch * problem.heads)


def backward_cost(problem: Problem, config: BackwardConfig) -> float:
    """The estimated time of the backward pass."""
    return keys_cost(problem, config.keys) + (queries_cost(problem, config.queries) if config.queries else 0.0)


def default_backward(problem: Problem) -> BackwardConfig:
    """The configuration of least estimated time; TUNING.md has the measurements."""
    forms = [two_kernels(problem)]
    if can_be_one(problem) and min(problem.masking.queries, problem.masking.keys) >= _LEAST_OF_ONE:
        forms.append(one_kernel(problem))
    return min(forms, key=partial(backward_cost, problem))


def backward_candidates(problem: Problem) -> dict[str, BackwardConfig]:
    """The configurations worth measuring, by name. Each gives the same bits in every run if the problem is
    deterministic."""
    found = {"two kernels": two_kernels(problem), "two kernels, the fewest blocks": usual_two(problem)}
    if can_be_one(problem):
        found |= {"one kernel": one_kernel(problem, 1), "one kernel, blocks share a group": one_kernel(problem)}
    return found


def tuned_backward(problem: Problem) -> BackwardConfig:
    """The measured best of the candidates, else the default."""
    candidates, untuned = partial(backward_candidates, problem), default_backward(problem)
    return tuning.configuration("attention", "backward", known(problem), candidates, untuned=untuned)
