"""Attention: what the base over the registry cannot say. Masks and schedules are checked against all elements."""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from draws import normal

from pallas_kernels.ops.attention import reference
from pallas_kernels.ops.attention.api import attention
from pallas_kernels.ops.attention.arguments import Options
from pallas_kernels.ops.attention.forward.block import Block
from pallas_kernels.ops.attention.forward.config import ForwardConfig
from pallas_kernels.ops.attention.forward.kernel import attention_forward
from pallas_kernels.ops.attention.forward.schedule import Schedule
from pallas_kernels.ops.attention.masking import Masking, segment_tiles
from pallas_kernels.ops.attention.problem import masking_of, problem_of
from pallas_kernels.ops.attention.reference import attention_reference
from pallas_kernels.ops.attention.scores import bounded
from pallas_kernels.ops.attention.specs import ATTENTION
from pallas_kernels.specs import plain, seeds_of
from xlafuse.bench import attention_by_xla

BANDS = [(None, None), (None, 0), (40, 0), (7, 12), (0, 0), (None, 33), (50, None)]
LENGTHS = [(128, 128), (200, 136), (40, 300), (257, 64), (1, 8), (130, 129)]


def seen_by(masking: Masking, own: Any = None, other: Any = None) -> np.ndarray:
    """All elements, (queries, keys)."""
    row, column = np.arange(masking.queries)[:, None], np.arange(masking.keys)[None, :]
    segments = () if own is None else (own[:, None], other[None, :])
    return np.broadcast_to(np.asarray(masking.visible(row, column, *segments)), (masking.queries, masking.keys))


def check_tiles(seen: np.ndarray, ranges, rows: int, columns: int) -> None:
    """The ranges hold every tile with something seen, and in the full ones nothing is hidden.

    Rows beyond the last are no matter; columns beyond the last are hidden.
    """
    tiles = -(-seen.shape[1] // columns)
    for i, (first, full_first, full_last, last) in enumerate(ranges):
        part = seen[i * rows : (i + 1) * rows]
        assert 0 <= first <= full_first <= full_last <= last
        assert last <= tiles or first == last
        for j in range(tiles):
            tile = part[:, j * columns : (j + 1) * columns]
            if tile.any():
                assert first <= j < last
            if full_first <= j < full_last:
                assert tile.all()
                assert tile.shape[1] == columns
            elif first <= j < last and j * columns + columns <= seen.shape[1]:
                is_needless = tile.all() and full_first < full_last
                assert not is_needless, "a full tile beside the full range"


@pytest.mark.parametrize(("left", "right"), BANDS)
@pytest.mark.parametrize(("queries", "keys"), LENGTHS)
def test_tile_ranges_hold_what_is_seen(queries, keys, left, right):
    masking = Masking(queries=queries, keys=keys, left=left, right=right)
    seen = seen_by(masking)
    for rows, columns in ((64, 64), (128, 64), (64, 128)):
        count = -(-queries // rows)
        ranges = [masking.key_tiles(i * rows, rows, columns) for i in range(count)]
        check_tiles(seen, ranges, rows, columns)
        traced = jax.vmap(lambda row, m=masking, r=rows, c=columns: jnp.stack(jnp.asarray(m.key_tiles(row, r, c))))
        np.testing.assert_array_equal(traced(jnp.arange(count) * rows), np.asarray(ranges))


@pytest.mark.parametrize(("left", "right"), BANDS)
@pytest.mark.parametrize(("queries", "keys"), LENGTHS)
def test_query_tiles_are_the_same_question_turned_round(queries, keys, left, right):
    masking = Masking(queries=queries, keys=keys, left=left, right=right)
    seen = seen_by(masking)
    rows = columns = 64
    for j in range(-(-keys // columns)):
        first, full_first, full_last, last = masking.query_tiles(j * columns, columns, rows)
        for i in range(-(-queries // rows)):
            tile = seen[i * rows : (i + 1) * rows, j * columns : (j + 1) * columns]
            assert not tile.any() or first <= i < last
            if full_first <= i < full_last:
                assert tile.all()
                assert tile.shape[1] == columns


@pytest.mark.parametrize("is_sorted", [True, False])
def test_segment_tiles_hold_what_is_seen(is_sorted, seed):
    random = np.random.default_rng(seed)
    for left, right in ((None, None), (None, 0), (90, 20)):
        own, other = random.integers(0, 5, (2, 200)), random.integers(0, 5, (2, 330))
        own, other = (np.sort(own), np.sort(other)) if is_sorted else (own, other)
        masking = Masking(queries=200, keys=330, left=left, right=right, has_segments=True)
        by_rows = np.asarray(segment_tiles(masking.key_tiles, jnp.asarray(own), jnp.asarray(other), 32, 16))
        by_columns = np.asarray(segment_tiles(masking.query_tiles, jnp.asarray(other), jnp.asarray(own), 16, 32))
        for batch in range(2):
            seen = seen_by(masking, own[batch], other[batch])
            for i, j in itertools.product(range(7), range(21)):
                tile = seen[i * 32 : (i + 1) * 32, j * 16 : (j + 1) * 16]
                for place, (first, full_first, full_last, last) in ((j, by_rows[batch, i]), (i, by_columns[batch, j])):
                    assert 0 <= first <= full_first <= full_last <= last, f"seed={seed}"
                    assert not tile.any() or first <= place < last, f"seed={seed}"
                    assert tile.all() or not full_first <= place < full_last, f"seed={seed}"


def test_segments_of_packed_documents_leave_out_other_documents_tiles():
    segments = jnp.repeat(jnp.arange(8), 128)[None]
    masking = Masking(queries=1024, keys=1024, right=0, has_segments=True)
    tiles = np.asarray(segment_tiles(masking.key_tiles, segments, segments, 128, 64))
    assert (tiles[0, :, 3] - tiles[0, :, 0] == 2).all()


@pytest.mark.parametrize("blocks", [None, 3, 7, 132])
@pytest.mark.parametrize("is_causal", [False, True])
def test_schedule_takes_every_tile_once(blocks, is_causal):
    query = jax.ShapeDtypeStruct((2, 700, 6, 64), jnp.bfloat16)
    key = jax.ShapeDtypeStruct((2, 700, 2, 64), jnp.bfloat16)
    problem, _ = problem_of(query, key, is_causal=is_causal, **NOTHING)  # pyright: ignore[reportArgumentType]
    schedule = Schedule.of(problem, 128, 128, blocks)
    table = schedule.table

    def places(block):
        taken = []
        total = schedule.tiles * schedule.heads
        if schedule.blocks == total:
            return [schedule.place(jnp.int32(block))]
        listed = None if table is None else table[block, 1 : 1 + table[block, 0]]
        indices = range(block, total, schedule.blocks) if listed is None else listed
        for index in indices:
            taken.append(schedule.place(jnp.int32(index)))
        return taken

    taken = [tuple(map(int, place)) for block in range(schedule.blocks) for place in places(block)]
    assert sorted(taken) == sorted(itertools.product(range(12), range(6)))
    if is_causal and table is not None:
        work = [sum(int(place[1]) + 2 for place in places(block)) for block in range(schedule.blocks)]
        assert max(work) - min(work) <= 8


@pytest.mark.parametrize(
    ("queries", "keys", "left", "right"), [(150, 150, 32, 0), (90, 117, 33, 3), (64, 200, 40, 90), (130, 130, 47, 0)]
)
def test_tiles_at_one_end_of_a_window_are_cut_by_that_end_alone(queries, keys, left, right):
    masking = Masking(queries=queries, keys=keys, left=left, right=right)
    assert masking.has_sides(16, 16)
    assert not masking.has_sides(16, 64)
    column = np.arange(16)[None]
    for i in range(-(-queries // 16)):
        rows = np.arange(i * 16, min(queries, i * 16 + 16))[:, None]
        first, full_first, full_last, last = masking.key_tiles(i * 16, 16, 16)
        ends = {
            replace(masking, right=None, keys=keys + 1000): range(first, full_first),
            replace(masking, left=None): {*range(full_last, last), last - 1},
        }
        for end, tiles in ends.items():
            for j in tiles:
                want = masking.visible(rows, column + 16 * j)
                np.testing.assert_array_equal(end.visible(rows, column + 16 * j), want)


@pytest.mark.parametrize("heads", [1, 3])
def test_windows_are_dealt_out_as_evenly_as_tiles_go(heads):
    query, key, _ = operands(0, queries=2048, keys=2048, heads=heads)
    problem, _ = problem_of(query, key, is_causal=True, **{**NOTHING, "window": (511, 0)})
    schedule = Schedule.of(problem, 128, 128, 5)
    table, costs = schedule.table, schedule.costs
    assert table is not None
    assert costs is not None
    taken = [[schedule.place(jnp.int32(i)) for i in row[1 : 1 + row[0]]] for row in table]
    assert sorted(tuple(map(int, p)) for t in taken for p in t) == sorted(itertools.product(range(heads), range(16)))
    work = [sum(costs[int(tile)] for _, tile in places) for places in taken]
    assert max(work) <= sum(work) / 5 + min(costs) + 1


NOTHING: dict[str, Any] = {
    "bias": None,
    "mask": None,
    "scale": None,
    "window": None,
    "segment_ids": None,
    "softcap": None,
    "dropout_rate": 0.0,
    "dropout_key": None,
}


def operands(seed, batch=1, queries=16, keys=16, heads=2, key_heads=1, size=64, dtype=jnp.bfloat16):
    shape = (batch, keys, key_heads, size)
    shapes = ((batch, queries, heads, size), shape, shape)
    return tuple(normal(own, shape, dtype) for own, shape in zip(seeds_of(seed, 3), shapes, strict=True))


@pytest.mark.drawn(1 / 3)
@pytest.mark.parametrize(
    ("queries", "keys", "is_causal"), [(200, 128, False), (384, 256, False), (500, 500, True), (420, 200, True)]
)
def test_three_consumers(interpreter, queries, keys, is_causal, seed):
    """With a causal mask, a consumer skips the block's key tiles that its own queries do not see."""
    query, key, value = operands(seed, queries=queries, keys=keys)
    problem, extras = problem_of(query, key, is_causal=is_causal, **NOTHING)
    config = ForwardConfig(warpgroups=3, own_output=True, registers=(32, 160))
    out, lse = attention_forward(query, key, value, extras, problem=problem, config=config)
    want, want_lse = attention_reference(query, key, value, is_causal=is_causal, return_residuals=True)
    np.testing.assert_allclose(np.float32(out), np.float32(want), atol=0.02, err_msg=f"seed={seed}")
    np.testing.assert_allclose(lse, want_lse, atol=1e-4, err_msg=f"seed={seed}")


@pytest.mark.drawn(1 / 3)
@pytest.mark.parametrize(
    ("length", "is_causal", "size"), [(136, True, 256), (66, True, 256), (131, False, 256), (72, True, 200)]
)
def test_outputs_that_leave_in_parts_while_the_next_queries_come(interpreter, length, is_causal, size, seed):
    query, key, value = operands(seed, queries=length, keys=length, heads=3, key_heads=3, size=size)
    problem, extras = problem_of(query, key, is_causal=is_causal, **NOTHING)
    config = ForwardConfig(columns=64, own_output=True, output_parts=2)
    out, lse = attention_forward(query, key, value, extras, problem=problem, config=config)
    want, want_lse = attention_reference(query, key, value, is_causal=is_causal, return_residuals=True)
    np.testing.assert_allclose(np.float32(out), np.float32(want), atol=0.02, err_msg=f"seed={seed}")
    np.testing.assert_allclose(lse, want_lse, atol=1e-4, err_msg=f"seed={seed}")


@pytest.mark.drawn(1 / 3)
@pytest.mark.parametrize(
    ("length", "window", "segments", "columns"),
    [(400, (260, 0), None, 128), (264, (100, 20), None, 128), (400, (260, 0), [318], 64)],
)
def test_windows_dealt_out(interpreter, length, window, segments, columns, seed):
    """Segments may leave no full tile between those that a window's ends cut; the right end cuts two short ones."""
    query, key, value = operands(seed, queries=length, keys=length, heads=1)
    if segments is not None:
        segments = jnp.searchsorted(jnp.asarray(segments), jnp.arange(length), side="right")[None]
    given = {"window": window, "segment_ids": segments}
    problem, extras = problem_of(query, key, is_causal=False, **{**NOTHING, **given})
    config = ForwardConfig(own_output=True, columns=columns)
    assert problem.masking.has_sides(config.rows, config.columns) == (window[0] == 260 and segments is None)
    out, lse = attention_forward(query, key, value, extras, problem=problem, config=config)
    want, want_lse = attention_reference(query, key, value, return_residuals=True, **given)
    np.testing.assert_allclose(np.float32(out), np.float32(want), atol=0.02, err_msg=f"seed={seed}")
    np.testing.assert_allclose(lse, want_lse, atol=1e-4, err_msg=f"seed={seed}")


def test_windows_behind_the_last_key_visit_one_masked_tile(interpreter, seed):
    query, key, value = operands(seed, queries=520, keys=128, heads=1)
    window = (70, 0)
    problem, extras = problem_of(query, key, is_causal=False, **{**NOTHING, "window": window})
    config = ForwardConfig()
    schedule = Schedule.of(problem, config.rows, config.columns, None)
    places = {"index": jnp.int32(0), "extras": {}, "buffers": {}, "barriers": {}}
    block = Block(problem=problem, config=config, schedule=schedule, **places)
    for tile in range(schedule.tiles):
        first, _, _, last = block.key_tiles(jnp.int32(0), jnp.int32(tile))
        assert (first, last) == (0, 1)
    out, lse = attention_forward(query, key, value, extras, problem=problem, config=config)
    want, want_lse = attention_reference(query, key, value, window=window, return_residuals=True)
    assert not np.asarray(out[:, 198:], np.float32).any(), f"seed={seed}"
    assert (np.asarray(lse[..., 198:]) == -np.inf).all(), f"seed={seed}"
    np.testing.assert_allclose(np.float32(out), np.float32(want), atol=0.02, err_msg=f"seed={seed}")
    np.testing.assert_allclose(lse, want_lse, atol=1e-4, err_msg=f"seed={seed}")


def test_queries_that_see_nothing_give_zeros_and_no_gradient(interpreter, seed):
    query, key, value = operands(seed, queries=8, keys=8, heads=1)
    mask = (jnp.arange(8) % 2 == 0)[:, None] & jnp.ones((8, 8), bool)

    def call(query, key, value, implementation):
        return attention(query, key, value, mask=mask, return_residuals=True, implementation=implementation)

    (out, lse), pullback = jax.vjp(lambda q, k, v: call(q, k, v, "mosaic"), query, key, value)
    assert not np.asarray(out[:, 1::2], np.float32).any(), f"seed={seed}"
    assert (np.asarray(lse[..., 1::2]) == -np.inf).all(), f"seed={seed}"
    expected, pullback_of_xla = jax.vjp(lambda q, k, v: call(q, k, v, "xla"), query, key, value)
    np.testing.assert_allclose(lse, expected[1], atol=1e-4, err_msg=f"seed={seed}")
    cotangents = (jnp.ones_like(out), jnp.where(jnp.isfinite(lse), 0.5, 0.0))
    for got, want in zip(pullback(cotangents), pullback_of_xla(cotangents), strict=True):
        got, want = np.asarray(got, np.float32), np.asarray(want, np.float32)
        assert np.isfinite(got).all(), f"seed={seed}"
        np.testing.assert_allclose(got, want, atol=0.06, rtol=0.03, err_msg=f"seed={seed}")


def test_reference_is_jax_attention(seed):
    query, key, value = operands(seed, batch=2, queries=40, keys=50, heads=4, key_heads=2, dtype=jnp.float32)
    bias = normal(seed + 1, (2, 1, 40, 50))
    mask = jax.random.bernoulli(jax.random.key(seed + 2), 0.7, (1, 4, 40, 50)).at[..., 0].set(True)
    given: dict[str, Any] = {"bias": bias, "mask": mask, "is_causal": True, "scale": 0.3}
    want = jax.nn.dot_product_attention(query, key, value, **given, implementation="xla")
    np.testing.assert_allclose(attention(query, key, value, **given), want, atol=2e-5, err_msg=f"seed={seed}")
    want = jax.nn.dot_product_attention(query, key, value, local_window_size=(5, 3), implementation="xla")
    got = attention(query, key, value, window=(5, 3))
    np.testing.assert_allclose(got, want, atol=2e-5, err_msg=f"seed={seed}")


@pytest.mark.parametrize("softcap", [1e-3, 50.0, 1000.0, 3000.0, 1e6, 1e30])
def test_scores_are_capped_as_exactly_as_others_are_computed(softcap, seed):
    products = np.random.default_rng(seed).normal(scale=300.0, size=2000).astype(np.float32)
    exact = softcap * np.tanh(0.25 * products.astype(np.float64) / softcap)
    shares = bounded(jnp.asarray(products), 0.25, softcap)
    tolerance = 1e-6 * min(softcap, 1000)
    np.testing.assert_allclose(softcap * shares, exact, rtol=5e-5, atol=tolerance, err_msg=f"seed={seed}")
    np.testing.assert_allclose(shares, exact / softcap, atol=1e-6, err_msg=f"seed={seed}")


def test_a_window_that_bounds_nothing_is_no_window():
    assert masking_of(100, 100, Options(is_causal=True, window=99)) == masking_of(100, 100, Options(is_causal=True))
    assert masking_of(100, 100, Options(window=99)) == masking_of(100, 100, Options())
    assert masking_of(100, 100, Options(window=(98, None))).left == 98


KEY, ALL, NAN, INF = jax.random.key(0), jnp.ones((16, 16), bool), float("nan"), float("inf")


@pytest.mark.parametrize(
    ("changed", "error", "words"),
    [
        ({"softcap": 0.0}, ValueError, "positive"),
        ({"softcap": float("nan")}, ValueError, "finite"),
        ({"softcap": float("inf")}, ValueError, "finite"),
        ({"window": (-1, 0)}, ValueError, "window"),
        ({"window": 1.5}, ValueError, "window"),
        ({"mask": jnp.ones((16, 16))}, TypeError, "boolean"),
        ({"deterministic": "no"}, TypeError, "deterministic must be True or False"),
        ({"mask": jnp.ones((3, 16), bool)}, ValueError, "broadcast"),
        ({"bias": jnp.ones((16, 16), jnp.int32)}, TypeError, "floating"),
        ({"segment_ids": jnp.zeros((1, 9), jnp.int32)}, ValueError, "segment_ids"),
        ({"segment_ids": jnp.zeros((1, 16))}, TypeError, "integers"),
        ({"dropout_rate": 0.1}, ValueError, "dropout_mask or dropout_key"),
        ({"dropout_rate": 0.1, "dropout_mask": ALL, "dropout_key": KEY}, ValueError, "both given"),
        ({"dropout_mask": ALL}, ValueError, "dropout_rate"),
        ({"dropout_rate": 1.5, "dropout_mask": ALL}, ValueError, "dropout_rate is 1.5"),
        ({"dropout_rate": 0.1, "dropout_mask": ALL.astype(int)}, TypeError, "dropout_mask must be boolean"),
        ({"dropout_rate": 0.1, "dropout_mask": ALL[:8]}, ValueError, "dropout_mask must broadcast"),
        *(
            ({"mask_value": value}, ValueError, "mask_value must be below 0")
            for value in (0, 1e9, NAN, INF, -INF, -1e39)
        ),
        ({"mask_value": "lowest"}, TypeError, "mask_value must be a number"),
        ({"mask_value": jnp.zeros(2)}, TypeError, "mask_value must be a number"),
        ({"implementation": "cudnn", "mask_value": -1e9}, NotImplementedError, "mask_value"),
        ({"dropout_rate": 1.0}, ValueError, "dropout"),
        ({"scale": jnp.float32(2)}, TypeError, "Python number"),
        ({"implementation": "cudnn", "softcap": 2.0}, NotImplementedError, "softcap"),
        ({"implementation": "cudnn"}, NotImplementedError, "NVIDIA"),
        ({"implementation": "mosaic"}, NotImplementedError, "Hopper"),
        ({"implementation": "mosaic_gpu"}, ValueError, "mosaic"),
    ],
)
def test_errors_say_what_is_wrong(changed, error, words):
    query, key, value = operands(0)
    with pytest.raises(error, match=words):
        attention(query, key, value, **changed)


def test_cudnn_is_not_asked_for_queries_that_see_no_key():
    query, key, value = (jnp.ones((1, length, 2, 64), jnp.bfloat16) for length in (20, 8, 8))
    windowed = partial(attention, query, key, value, is_causal=True, implementation="cudnn")
    with pytest.raises(NotImplementedError, match="see no key"):
        windowed(window=(11, 0))
    with pytest.raises(NotImplementedError, match="NVIDIA"):
        windowed(window=(12, 0))


def test_shapes_that_do_not_belong_together():
    query, key, value = operands(0)
    with pytest.raises(ValueError, match="multiple"):
        attention(query[:, :, :1].repeat(3, 2), key.repeat(2, 2), value.repeat(2, 2))
    with pytest.raises(ValueError, match="head size of query"):
        attention(query[..., :32], key, value)
    with pytest.raises(TypeError, match="dtype"):
        attention(query, key.astype(jnp.float32), value)


@pytest.mark.parametrize("given", [{"mask": True}, {"bias": True, "is_causal": True}])
def test_scores_of_one_head_at_a_time_are_those_of_all(monkeypatch, given: dict[str, Any], seed):
    query, key, value = operands(seed, batch=2, queries=20, keys=30, heads=6, key_heads=3, dtype=jnp.float32)
    arrays = {
        "mask": jax.random.bernoulli(jax.random.key(seed), 0.5, (1, 6, 20, 30)),
        "bias": normal(seed, (2, 6, 20, 30)),
    }
    given = {name: arrays.get(name, value) for name, value in given.items()}
    want = attention_reference(query, key, value, **given, return_residuals=True)
    monkeypatch.setattr(reference, "SCORES_BYTES", 0)
    got = attention_reference(query, key, value, **given, return_residuals=True)
    for one, other in zip(got, want, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5, err_msg=f"seed={seed}")


def test_backward_from_a_log_sum_exp_is_the_benchmarks_by_xla(interpreter, seed):
    arguments = plain(ATTENTION.tagged("test")[0].make(seed))
    dout = normal(seed, arguments["query"].shape, jnp.bfloat16)
    want = attention_by_xla.backward(arguments, dout)
    for one, other in zip(ATTENTION.backward("mosaic", arguments, (dout,)), want, strict=True):
        np.testing.assert_allclose(np.float32(one), np.float32(other), atol=0.1, rtol=0.03, err_msg=f"seed={seed}")


@pytest.mark.parametrize("given", [{}, {"is_causal": True}, {"window": (5, 3)}, {"is_causal": True, "window": (9, 0)}])
def test_operations_are_counted_of_what_is_seen(given, seed):
    query, key, value = operands(seed, batch=2, queries=40, keys=24)
    seen = seen_by(masking_of(40, 24, Options(**given)))
    arguments = {"query": query, "key": key, "value": value[..., :48], **given}
    assert ATTENTION.flops(arguments, "forward") == 2 * 2 * 2 * (64 + 48) * seen.sum()
    numbers = (jnp.arange(40) // 10)[None].repeat(2, 0), (jnp.arange(24) // 6)[None].repeat(2, 0)
    seen = seen & (np.asarray(numbers[0])[0][:, None] == np.asarray(numbers[1])[0])
    assert (
        ATTENTION.flops({**arguments, "segment_ids": numbers}, "backward") == 2 * 2 * 2 * (3 * 64 + 2 * 48) * seen.sum()
    )
