"""Blocks of one kernel that begin at tiles of queries of their own: who adds when, and that none waits for ever."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.ops.attention.backward.config import FusedConfig
from pallas_kernels.ops.attention.backward.fused.launch import Launch
from pallas_kernels.ops.attention.backward.fused.spread import SUMS, Spread
from pallas_kernels.ops.attention.masking import Masking
from pallas_kernels.ops.attention.problem import Problem

SIZES = [(1, 1), (1, 5), (5, 1), (2, 2), (3, 7), (7, 3), (8, 16), (10, 64), (24, 2), (32, 64), (29, 31)]
"""Blocks that share queries, and tiles of a span."""
SPANS = 2


@functools.cache
def visits(spread: Spread) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(tile, sum that is added to, blocks that add before), each (block, step)."""
    blocks, steps = jnp.arange(spread.blocks, dtype=jnp.int32), jnp.arange(SPANS * spread.span, dtype=jnp.int32)

    def visit(block, step):
        tile, has_turned = spread.at(block, step)
        return tile, has_turned, spread.turn(block, tile, has_turned)

    tile, has_turned, before = jax.vmap(lambda b: jax.vmap(lambda n: visit(b, n))(steps))(blocks)
    return np.asarray(tile), np.asarray(has_turned, np.int32), np.asarray(before)


@pytest.mark.parametrize(("blocks", "span"), SIZES)
def test_every_block_comes_to_every_tile_once_and_all_to_one_span_before_the_next(blocks, span):
    tile, _, _ = visits(Spread(blocks=blocks, span=span))
    for own in tile.reshape(blocks, SPANS, span):
        np.testing.assert_array_equal(np.sort(own), np.arange(SPANS * span).reshape(SPANS, span))


@pytest.mark.parametrize(("blocks", "span"), SIZES)
def test_turns_are_counted_from_zero_in_the_order_of_launches(blocks, span):
    spread = Spread(blocks=blocks, span=span)
    tile, sums, before = visits(spread)
    later = spread.later(jnp.arange(span, dtype=jnp.int32))
    for each in range(SPANS * span):
        adders = [np.argwhere((tile == each) & (sums == i)) for i in range(SUMS)]
        for i, own in enumerate(adders):
            # argwhere goes by block: whoever adds before was launched before.
            assert [int(before[block, step]) for block, step in own] == list(range(len(own))), (each, i)
        assert [len(own) for own in adders] == [blocks - later[each % span], later[each % span]]
        assert len(adders[0]) > 0, "the first sum has none that stores"


def test_blocks_begin_evenly_apart_and_the_last_one_with_the_first_tile():
    spread = Spread(blocks=32, span=64)
    assert [int(spread.begins(jnp.int32(block))) for block in range(32)] == list(range(62, -1, -2))


def steps_until_all_end(spread: Spread, at_once: int) -> int:
    """With so many blocks at once, launched in the order of their numbers; a step takes 1 once its turn has come."""
    tile, sums, before = visits(spread)
    added = np.zeros((SPANS * spread.span, SUMS), int)
    step = np.zeros(spread.blocks, int)
    waiting = list(range(spread.blocks))
    running, time = [], 0
    while running or waiting:
        while waiting and len(running) < at_once:
            running.append(waiting.pop(0))
        at = {block: (block, step[block]) for block in running}
        ready = [block for block in running if added[tile[at[block]], sums[at[block]]] == before[at[block]]]
        assert ready, f"{running} wait for each other, or for blocks that do not run, in step {time}"
        for block in ready:
            added[tile[at[block]], sums[at[block]]] += 1
            step[block] += 1
        running = [block for block in running if step[block] < SPANS * spread.span]
        time += 1
    return time


@pytest.mark.parametrize("at_once", [1, 2, 5, 132])
@pytest.mark.parametrize(("blocks", "span"), SIZES)
def test_none_waits_for_ever_however_few_run_at_once_and_none_at_all_where_all_do(blocks, span, at_once):
    steps = steps_until_all_end(Spread(blocks=blocks, span=span), at_once)
    if blocks <= min(at_once, span):
        assert steps == SPANS * span


def launched(right: int | None = None, **given) -> Launch:
    """Of three tiles of queries, whose four heads share two tiles of keys."""
    masking = Masking(queries=192, keys=256, left=None, right=right)
    problem = Problem(
        batch=1, heads=4, key_heads=1, head_size=128, dtype=jnp.dtype(jnp.bfloat16), masking=masking, scale=1.0
    )
    config = FusedConfig(**{"finishers": True, **given})
    return Launch(problem=problem, config=config, batch=1, heads=4, size=128, in_panels=False)


@pytest.mark.parametrize(
    ("given", "right"),
    [({"spread": 3}, None), ({"finishers": False}, None), ({"heads_inside": True}, None), ({"parts": 4}, None),
     ({}, 0)],
)  # fmt: skip
def test_a_launch_that_cannot_be_spread_is_refused(given, right):
    with pytest.raises(ValueError, match="multiple of spread"):
        _ = launched(right, **{"spread": 2, **given}).spread


@pytest.mark.parametrize(("splits", "right"), [(2, None), (3, 0)])
def test_queries_that_cannot_be_split_are_refused(splits, right):
    with pytest.raises(ValueError, match="whole tiles"):
        _ = launched(right, splits=splits).lane_tiles


def test_lanes_of_split_queries_have_spans_of_their_own():
    launch = launched(parts=2, splits=3, spread=2)
    assert (launch.lanes, launch.lane_tiles, launch.spread) == (6, 1, Spread(blocks=2, span=2))
