"""Captures that also run their program."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from profiles import RUN, as_run

from hlo_analysis import Capture, CaptureError, analyze, capture


@jax.jit
def sums(x, numbers):
    return jnp.cumsum(jnp.sin(x) @ x, 0) + numbers


@pytest.fixture(scope="module")
def shapes():
    return jax.ShapeDtypeStruct((256, 256), jnp.bfloat16), jax.ShapeDtypeStruct((256,), jnp.int32)


def test_the_cpu_has_a_wall_clock(shapes):
    step = jax.jit(lambda x, numbers, state: (sums(x, numbers), state + 1), donate_argnums=2)
    measured = analyze(
        capture(step, *shapes, jax.ShapeDtypeStruct((8,), jnp.float32), target="cpu", measure=True)
    ).measured
    assert measured is not None
    assert (measured.device, measured.kernel_us, measured.launches) == ("cpu", None, ())
    assert measured.wall_us is not None
    assert 1 < measured.wall_us < 1e6
    assert measured.compile_seconds is not None
    assert "the profile shows no kernel of a GPU" in measured.notes[-1]


def test_integers_that_are_given_are_those_of_the_run():
    def steps(unused, x, count):
        return jax.lax.fori_loop(0, count, lambda _, x: x * 0.5 + 1.0, x)

    x, unused = jax.ShapeDtypeStruct((8,), jnp.float32), np.zeros(3, np.int32)
    few, many = (analyze(capture(steps, unused, x, np.int32(n), target="cpu", measure=True)) for n in (1, 1_000_000))
    assert many.measured.wall_us > 20 * few.measured.wall_us


def test_a_gpu_that_is_only_described_runs_nothing(shapes):
    with pytest.raises(CaptureError, match="h200 is described, not attached"):
        capture(sums, *shapes, measure=True)


@pytest.fixture(scope="module")
def compiled(shapes, tmp_path_factory: pytest.TempPathFactory) -> Capture:
    pytest.importorskip("jax_plugins.xla_cuda13")
    return capture(sums, *shapes, keep=tmp_path_factory.mktemp("measured") / "capture")


SLOW = {"sm_clock_mhz": "1200", "max_sm_clock_mhz": "1980", "power_watts": "300", "power_limit_watts": "700"}


def test_the_profile_of_a_run_is_joined(compiled: Capture):
    kernels = [launch.kernel or "nvjet" for launch in analyze(compiled).launches]
    analysis = analyze(as_run(compiled, RUN | {"gpu": SLOW, "walls_us": [30.0, 33.0, 50.0]}, kernels * 10))
    assert analysis.measured is not None
    assert (analysis.measured.calls, analysis.measured.kernel_us) == (10, pytest.approx(5 * len(kernels), abs=0.1))
    assert [launch.measured_us for launch in analysis.launches] == pytest.approx([5.0] * len(kernels), abs=0.1)
    assert analysis.measured.wall_us == 33.0
    assert "lowered to 1200 of 1980 MHz (300 of 700 W)" in analysis.measured.notes[0]
    assert "does another use the GPU?" in analysis.measured.notes[1]


def test_a_run_that_failed_leaves_the_analysis(compiled: Capture):
    analysis = analyze(as_run(compiled, {"error": "XlaRuntimeError: RESOURCE_EXHAUSTED"}))
    assert analysis.measured is None
    assert "failed as it ran: XlaRuntimeError: RESOURCE_EXHAUSTED" in analysis.provenance.notes[-1]
    other = analyze(as_run(compiled, RUN, ["something_else"] * 5)).measured
    assert other is not None
    assert "the profile is of another program" in other.notes[0]
