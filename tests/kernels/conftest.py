from __future__ import annotations

import contextlib
import os
import random

import interpreter_accumulators
import interpreter_reductions
import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import pytest
from interpreter import extend
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks, shared_memory

# The interpreter runs each warpgroup as a host callback that waits for others at barriers, and a callback's own arrays
# take a thread of XLA's pool too. The pool is as large as the machine has cores: on two, three warpgroups wait forever.
os.environ.setdefault("PJRT_NPROC", "16")

# Two CPU devices for shard_map. Too late once a backend is up; then the tests that need two are skipped.
with contextlib.suppress(RuntimeError):
    jax.config.update("jax_num_cpu_devices", 2)


@pytest.fixture
def seed() -> int:
    """Fresh for every test; every failure message prints it."""
    return random.SystemRandom().randrange(2**30)


@pytest.fixture
def interpreter(request, monkeypatch):
    """Runs Mosaic GPU kernels on the CPU, with what the modules interpreter*.py add, and fails the
    test on a data race.

    Parametrized with "two devices" it does without two checks of the interpreter of jax 0.11.2, which only hold for one
    device: it loses the order between a TMA copy and the wait for it, and so reports races of a warpgroup with itself;
    and the device that ends first complains of barriers that the other still uses.
    """
    extend(monkeypatch)
    interpreter_accumulators.extend(monkeypatch)
    interpreter_reductions.extend(monkeypatch)
    two_devices = getattr(request, "param", None) == "two devices"
    if two_devices:
        monkeypatch.setattr(shared_memory.GPUSharedMemory, "assert_no_barriers_allocated", lambda _: None)
    try:
        with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=not two_devices)):
            yield
        races = gpu_callbacks._races  # None when the test interpreted no kernel
        assert races is None or not races.races_found
    finally:
        gpu_callbacks.reset_gpu_interpret_mode_state()


@pytest.fixture
def extended_interpreter(interpreter):
    """Another name of `interpreter`."""
    return interpreter
