from __future__ import annotations

import contextlib
import os
import random

import interpreter_accumulators
import interpreter_callbacks
import interpreter_gpu
import interpreter_overlaps
import interpreter_reductions
import interpreter_unions
import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import pytest
from interpreter import extend

from pallas_kernels.primitives import interpreter as primitives_interpreter

# The interpreter runs each warpgroup as a host callback that waits for others at barriers, and a callback's own arrays
# take a thread of XLA's pool too. The pool is as large as the machine has cores: on two, three warpgroups wait forever.
os.environ.setdefault("PJRT_NPROC", "16")

# CPU devices for shard_map and shardings. Too late once a backend is up; then the tests that need them are skipped.
with contextlib.suppress(RuntimeError):
    jax.config.update("jax_num_cpu_devices", 8)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Groups the registry's tests by operation, so that a worker reuses compiled references."""
    places = [i for i, item in enumerate(items) if item.path.name == "test_operations.py"]
    by_operation = sorted((items[i] for i in places), key=lambda item: item.callspec.params["op"].name)
    for place, item in zip(places, by_operation, strict=True):
        items[place] = item


@pytest.fixture
def seed() -> int:
    """Fresh for every test; every failure message prints it."""
    return random.SystemRandom().randrange(2**30)


@pytest.fixture
def interpreter(monkeypatch):
    """Runs Mosaic GPU kernels on the CPU, with what the modules interpreter*.py add, and fails the test on a data race
    in any of them."""
    extend(monkeypatch)
    interpreter_accumulators.extend(monkeypatch)
    interpreter_callbacks.extend(monkeypatch)
    interpreter_gpu.extend(monkeypatch)
    interpreter_overlaps.extend(monkeypatch)
    interpreter_reductions.extend(monkeypatch)
    interpreter_unions.extend(monkeypatch)
    monkeypatch.setattr(primitives_interpreter, "IS_COMPLETE", True)
    with plgpu.force_gpu_interpret_mode(interpreter_gpu.RACES):
        yield
    assert not interpreter_gpu.launches.with_races, "a data race; what raced is printed above"
