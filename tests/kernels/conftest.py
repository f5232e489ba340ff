from __future__ import annotations

import contextlib
import random

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import pytest
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks

# Two CPU devices for shard_map. Too late once a backend is up; then the tests that need two are skipped.
with contextlib.suppress(RuntimeError):
    jax.config.update("jax_num_cpu_devices", 2)


@pytest.fixture
def seed() -> int:
    """Fresh for every test; every failure message prints it."""
    return random.SystemRandom().randrange(2**30)


@pytest.fixture
def interpreter(request):
    """Runs Mosaic GPU kernels on the CPU and fails the test on a data race (unless parametrized with False)."""
    params = plgpu.InterpretGPUParams(detect_races=getattr(request, "param", True))
    try:
        with plgpu.force_gpu_interpret_mode(params):
            yield
        races = gpu_callbacks._races  # None when the test interpreted no kernel
        assert races is None or not races.races_found
    finally:
        gpu_callbacks.reset_gpu_interpret_mode_state()
