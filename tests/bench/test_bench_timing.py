"""Turns, timers and the copy ceiling, with invented kernel times."""

from __future__ import annotations

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import Traffic
from xlafuse.bench import timing
from xlafuse.bench.ceiling import array_counts, ceiling_candidates, elementwise
from xlafuse.bench.environment import Sampler, commit, gpu_state, sampling
from xlafuse.bench.timing import Candidate, time_candidates

NO_WARM_UP = {"warm_up_seconds": (0.0, 0.0)}


def candidate(name="a", call=lambda x: x + 1, inputs=None, **more) -> Candidate:
    inputs = inputs or [(jnp.float32(i),) for i in range(3)]
    return Candidate(name=name, kind="implementation", call=call, inputs=inputs, **more)


@pytest.mark.usefixtures("invented_times")
def test_times_are_sums_over_the_kernels_of_a_call():
    run = time_candidates([candidate()], rounds=2, calls=4, **NO_WARM_UP)
    result = run.timings["a"]
    assert result.median_us == pytest.approx(3.0)
    assert result.kernels == ("first", "second")
    assert result.samples == 8
    assert result.wall_us > 0


def test_wall_clock_is_taken_before_cupti_is_in_use(monkeypatch):
    happened = []
    monkeypatch.setattr(timing, "_kernel_records", lambda _, calls: happened.append("cupti") or [("k", 1e-3)] * calls)
    monkeypatch.setattr(
        timing.Turn, "measure_wall", lambda turn, *_: happened.append("wall") or turn._wall_us.append(1)
    )
    time_candidates([candidate("a"), candidate("b")], rounds=2, **NO_WARM_UP)
    assert happened == ["wall"] * 4 + ["cupti"] * 4


@pytest.mark.usefixtures("invented_times")
def test_a_turn_for_wall_clock_lasts_as_long_as_asked(monkeypatch):
    clock, called = [0.0], []
    monkeypatch.setattr(timing.time, "perf_counter", lambda: clock[0])

    def call(x):
        clock[0] += 0.01
        called.append(x)

    run = time_candidates([candidate(call=call)], rounds=1, calls=2, wall_seconds=0.095, **NO_WARM_UP)
    assert len(called) == 1 + 10 + 2  # compiles, wall clock, kernels
    assert run.timings["a"].wall_us == pytest.approx(1e4)


@pytest.mark.usefixtures("invented_times")
def test_sets_of_buffers_take_turns():
    seen = []
    time_candidates([candidate(call=lambda x: seen.append(float(x)))], rounds=2, calls=3, **NO_WARM_UP)
    assert seen == [float(i % 3) for i in range(len(seen))]
    assert len(seen) > 12


def test_no_kernel_is_a_failure_of_that_candidate_alone(monkeypatch):
    def records(run_once, calls):
        return [] if run_once.__self__.candidate.name == "a" else [("k", 1e-3)] * calls

    monkeypatch.setattr(timing, "_kernel_records", records)
    run = time_candidates([candidate("a"), candidate("b")], rounds=1, **NO_WARM_UP)
    assert list(run.timings) == ["b"]
    assert "CUPTI saw 0 kernels in 4 calls of 'a'" in run.failures["a"]


def test_a_failing_candidate_is_dropped_and_named(invented_times):
    calls = []

    def fail_later(x):
        calls.append(x)
        if len(calls) > 5:
            raise RuntimeError("illegal address")

    run = time_candidates([candidate("bad", fail_later), candidate("good")], rounds=2, **NO_WARM_UP)
    assert list(run.timings) == ["good"]
    assert run.failures == {"bad": "RuntimeError: illegal address"}


def test_calls_whose_kernels_are_mixed_take_the_mean_of_their_turn(monkeypatch):
    """As PyTorch's are, whose backward kernels CUPTI tells of after the forward ones of all calls."""
    forward, backward = [("f", 1e-3)], [("b", 2e-3), ("c", 4e-3)]
    monkeypatch.setattr(timing, "_kernel_records", lambda _, calls: forward * calls + backward * calls)
    result = time_candidates([candidate()], rounds=2, calls=3, **NO_WARM_UP).timings["a"]
    assert result.kernels == ("f", "b", "c")
    assert result.median_us == result.p20_us == result.p80_us == pytest.approx(7.0)
    assert result.samples == 6


def test_each_round_has_an_order_of_its_own(monkeypatch):
    """So that none follows the same one each time."""
    seen: list[str] = []

    def records(run_once, calls):
        seen.append(run_once.__self__.candidate.name)
        return [("k", 1e-3)] * calls

    monkeypatch.setattr(timing, "_kernel_records", records)
    time_candidates([candidate(name) for name in "abcdef"], rounds=4, calls=1, **NO_WARM_UP)
    orders = ["".join(seen[i : i + 6]) for i in range(0, 24, 6)]
    assert {"".join(sorted(order)) for order in orders} == {"abcdef"}
    assert len(set(orders)) == 4


def test_uneven_kernel_counts_are_a_failure(monkeypatch):
    monkeypatch.setattr(timing, "_kernel_records", lambda *_: [("k", 1e-3)] * 5)
    run = time_candidates([candidate()], rounds=1, calls=4, **NO_WARM_UP)
    assert "5 kernels in 4 calls" in run.failures["a"]


def test_warm_up_ends_when_times_settle(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(timing.time, "perf_counter", lambda: clock[0])

    def steady():
        clock[0] += 0.01

    spent, is_steady = timing._warm_up(steady, 0.3, 2.0)
    assert is_steady
    assert 0.3 <= spent < 0.5

    step = [0.1]

    def slowing():
        step[0] *= 1.1
        clock[0] += step[0]

    spent, is_steady = timing._warm_up(slowing, 0.3, 2.0)
    assert not is_steady
    assert spent >= 2.0


@pytest.mark.parametrize(
    ("read", "written", "counts"),
    [((8, 8), (8, 8), (2, 2)), ((8, 8, 8), (8,), (3, 1)), ((8,), (8,), (1, 1)), ((8, 8, 8), (8, 8), (3, 2)),
     ((64, 16), (64, 16), (2, 2)), ((8192,), (1,), (8, 1)), ((16,), (8,), (2, 1)), ((8,) * 9, (8,) * 9, (1, 1))],
)  # fmt: skip
def test_shares_of_reads_and_writes(read, written, counts):
    traffic = Traffic(read=read, written=written)
    assert array_counts(traffic) == counts


def test_ceilings_move_the_bytes_of_the_operation():
    traffic = Traffic(read=(1 << 20,) * 3, written=(1 << 20,))
    copy, mixed = ceiling_candidates(traffic, sets=2)
    assert (copy.name, mixed.name) == ("copy", "elementwise, 3 read 1 written")
    for each in (copy, mixed):
        assert len(each.inputs) == 2
        moved = sum(a.nbytes for a in each.inputs[0]) + sum(a.nbytes for a in each.call(*each.inputs[0]))
        assert moved == traffic.bytes
    everything = [np.asarray(a) for each in (copy, mixed) for arrays in each.inputs for a in arrays]
    assert len({a.tobytes() for a in everything}) == len(everything)  # none is a copy of another


COMPILE = """
import jax, jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding
from hlo_analysis.targets import load_target
from xlafuse.bench.ceiling import elementwise
h200 = topologies.get_topology_desc(
    platform="cuda", topology="1x1x1", target_config=load_target("h200").config_text
).devices[0]
sharding = SingleDeviceSharding(h200)
for reads, writes in ((1, 1), (2, 2), (3, 2), (8, 1)):
    structs = [jax.ShapeDtypeStruct((1 << 20,), jnp.uint32, sharding=sharding)] * reads
    jitted = jax.jit(elementwise(writes), in_shardings=sharding, out_shardings=sharding)
    text = jitted.trace(*structs).lower(lowering_platforms=("cuda",)).compile().as_text()
    print(text[text.index("ENTRY"):].count(" fusion("))
"""


def test_elementwise_is_one_kernel_on_an_h200():
    pytest.importorskip("jax_plugins.xla_cuda13")
    # In a process of its own: JAX finds the plugin only before its first use.
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, "-c", COMPILE], env=environment, capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["1"] * 4, done.stderr[-2000:]


def test_reading_alone_has_a_ceiling_that_only_reads():
    candidates = ceiling_candidates(Traffic(read=(1 << 20,), written=()), sets=1)
    assert [c.name for c in candidates] == ["copy", "elementwise, 8 read 1 written", "read"]
    (words,) = candidates[-1].inputs[0]
    assert words.nbytes == 1 << 20
    (sums,) = candidates[-1].call(words)
    assert (np.asarray(sums) == np.asarray(words).sum(axis=1, dtype=np.uint32)).all()


def test_no_output_of_elementwise_is_another():
    arrays = [jax.random.bits(jax.random.key(i), (4096,), jnp.uint32) for i in range(3)]
    first, second = elementwise(2)(*arrays)
    assert (first != second).all()
    assert (first == arrays[0] ^ arrays[1] ^ arrays[2] ^ jnp.uint32(0x9E3779B9)).all()


def test_samples_of_clocks_and_power():
    sampler = Sampler()
    for now, line in enumerate(("1980, 3201, 400.5, 40", "1700, 3201, 700.0, 50", "garbage", "[N/A], 3201, 500, 45")):
        sampler.feed(line, float(now))
    everything, late = sampler.since(0.0), sampler.since(1.0)
    assert everything.samples == 3
    assert everything.quantities["power_watts"].median == 500
    assert late.quantities["sm_clock_mhz"].most == 1700
    assert sampler.since(9.0).quantities == {}


def test_without_nvidia_smi_there_are_no_samples(monkeypatch):
    monkeypatch.setenv("PATH", "")
    with sampling() as sampler:
        assert sampler.since(0.0).samples == 0


@pytest.mark.parametrize(("visible", "asked"), [("3,1", "3"), ("GPU-4f", "GPU-4f"), ("", "0")])
def test_the_state_is_that_of_the_first_gpu_of_the_process(visible, asked, monkeypatch, tmp_path):
    tool = tmp_path / "nvidia-smi"  # answers each quantity asked for by its last argument
    tool.write_text('#!/bin/sh\nfor last; do :; done\necho "$1" | sed "s/[^,][^,]*/${last#--id=}/g"\n')
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert set(gpu_state().values()) == {asked}


def test_commit_is_what_the_environment_says_else_gits(monkeypatch, tmp_path):
    monkeypatch.setenv("XLAFUSE_COMMIT", "named")
    assert commit() == "named"
    monkeypatch.delenv("XLAFUSE_COMMIT")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert commit() == ""
