"""The benchmark without a GPU: what it computes, checks, prints and writes, with invented kernel times."""

from __future__ import annotations

import json

import jax
import pytest

from pallas_kernels import ArgSpec, ArraySpec, get_op, testing
from xlafuse.bench import kernels, timing
from xlafuse.bench.timing import buffer_sets, time_candidates

ROWS = ArraySpec(shape=(4, 256), dtype="bfloat16")
SPEC = ArgSpec(
    name="4x256", arguments={"x": ROWS, "scale": ArraySpec(shape=(256,), dtype="bfloat16", mean=1.0), "residual": ROWS}
)


@pytest.fixture
def invented_times(monkeypatch):
    """Every call is two kernels of 1 and 2 µs."""

    def records(function, rotation, calls):
        for _ in range(calls):
            jax.block_until_ready(function(*rotation.next()))
        return [("first", 1e-3), ("second", 2e-3)] * calls

    monkeypatch.setattr(timing, "_kernel_records", records)


def test_times_are_sums_over_the_kernels_of_a_call(invented_times):
    result = time_candidates(
        {"a": lambda x: x + 1}, {"a": [(jax.numpy.float32(i),) for i in range(3)]}, rounds=2, warm_up_seconds=0
    )
    assert result["a"].median_us == pytest.approx(3.0)
    assert result["a"].kernels == ("first", "second")
    assert result["a"].samples == 8


def test_no_kernel_is_an_error(monkeypatch):
    monkeypatch.setattr(timing, "_kernel_records", lambda *_: [])
    with pytest.raises(RuntimeError, match="CUPTI saw 0 kernels in 4 calls of 'a'"):
        time_candidates({"a": lambda x: x}, {"a": [(jax.numpy.ones(3),)]}, rounds=1, warm_up_seconds=0)


def test_small_calls_rotate_past_the_cache():
    assert buffer_sets(1 << 20) * (1 << 20) > 2 * timing.L2_CACHE_BYTES or buffer_sets(1 << 20) == 64
    assert buffer_sets(1 << 30) == 2


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("phase", kernels.PHASES)
def test_shape_is_checked_and_timed(invented_times, phase, monkeypatch):
    monkeypatch.setattr(kernels, "buffer_sets", lambda _: 1)
    rows, problems = kernels.bench_shape(get_op("rms_norm"), SPEC, phase, with_variants=False, rounds=1)
    assert problems == []
    assert [row.candidate for row in rows] == ["xla", "mosaic", "copy"]
    arrays = 4  # forward reads two and writes two, backward reads three and writes one
    assert {row.bytes for row in rows} == {arrays * 4 * 256 * 2}
    assert rows[0].gigabytes_per_second == pytest.approx(arrays * 2048 / 3e-6 / 1e9)
    assert "µs" in kernels.format_row(rows[0])


def test_a_wrong_variant_is_reported_and_not_timed(invented_times, monkeypatch):
    monkeypatch.setattr(kernels, "buffer_sets", lambda _: 1)
    op = get_op("rms_norm")
    monkeypatch.setattr(
        kernels,
        "_candidates",
        lambda *_, **__: {
            "xla": kernels._call(op, "forward", "xla"),
            "wrong": lambda arguments: tuple(2 * v for v in kernels._call(op, "forward", "xla")(arguments)),
        },
    )
    rows, problems = kernels.bench_shape(op, SPEC, "forward", with_variants=True, rounds=1)
    assert [row.candidate for row in rows] == ["xla", "copy"]
    assert problems[0].candidate == "wrong"
    assert "output 0 is off by" in problems[0].message


def test_backward_alone_is_the_gradient():
    op = get_op("rms_norm")
    case = testing.make_case(op, SPEC, 3)
    without = {k: v for k, v in case.arguments.items() if k != "residual"}
    dx, dscale = op.backward("xla", without, case.cotangents[:1])
    expected = testing.gradient(testing.Case(op=op, arguments=without, cotangents=case.cotangents[:1]), "xla")
    assert (dx == expected["gradient of x"]).all()
    assert (dscale == expected["gradient of scale"]).all()


def test_json_is_written_whole_or_not_at_all(tmp_path):
    path = tmp_path / "new" / "results.json"
    kernels.write_json(path, {"schema_version": 1})
    assert json.loads(path.read_text()) == {"schema_version": 1}
    with pytest.raises(TypeError):
        kernels.write_json(path, {"schema_version": object()})
    assert json.loads(path.read_text()) == {"schema_version": 1}
    assert [p.name for p in path.parent.iterdir()] == ["results.json"]
