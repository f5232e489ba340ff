from __future__ import annotations

from functools import partial

import jax.experimental.pallas.mosaic_gpu as plgpu
import pytest
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks

from pallas_kernels import ArgSpec, ArraySpec
from xlafuse.bench import candidates, timing

ROWS = ArraySpec(shape=(4, 256), dtype="bfloat16")


@pytest.fixture
def spec() -> ArgSpec:
    """A small call of rms_norm."""
    scale = ArraySpec(shape=(256,), dtype="bfloat16", mean=1.0)
    return ArgSpec(
        name="4x256", arguments={"x": ROWS, "scale": scale, "residual": ROWS}, tags=frozenset({"bench", "test"})
    )


@pytest.fixture(autouse=True)
def _no_warm_up(monkeypatch):
    """Skips the warm-up before candidates take turns."""
    monkeypatch.setattr(candidates, "time_candidates", partial(timing.time_candidates, warm_up_seconds=(0.0, 0.0)))


@pytest.fixture
def invented_times(monkeypatch):
    """Every call is two kernels of 1 and 2 µs."""

    def records(run_once, calls):
        for _ in range(calls):
            run_once()
        return [("first", 1e-3), ("second", 2e-3)] * calls

    monkeypatch.setattr(timing, "_kernel_records", records)


@pytest.fixture
def interpreter():
    """Runs Mosaic GPU kernels on the CPU."""
    try:
        with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams()):
            yield
    finally:
        gpu_callbacks.reset_gpu_interpret_mode_state()
