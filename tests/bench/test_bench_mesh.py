"""The mesh benchmark on devices of the CPU: each kind of parallel runs and agrees with the first strategy."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import pytest

from xlafuse.bench import mesh
from xlafuse.bench.mesh import bench_mesh
from xlafuse.bench.results import ShapeResult
from xlafuse.bench.settings import MeshSettings
from xlafuse.models.decoder import get_decoder
from xlafuse.models.shardings import ShardingError

with contextlib.suppress(RuntimeError):  # JAX has begun: tests that need several devices are skipped
    jax.config.update("jax_num_cpu_devices", 4)

SETTINGS = MeshSettings(model="tiny", strategies=("xla", "best"), layers=1, rounds=2, calls=1)


@pytest.fixture
def devices(monkeypatch) -> int:
    """Few devices of the CPU in place of GPUs."""
    few = jax.devices("cpu")[:4]
    if len(few) < 4:
        pytest.skip("needs four simulated CPU devices")
    monkeypatch.setattr(jax, "devices", lambda *_: few)
    return len(few)


def measured(item: str, **changes: Any) -> ShapeResult:
    (result,) = bench_mesh(item, MeshSettings(**{**vars(SETTINGS), **changes}))
    assert isinstance(result, ShapeResult)
    return result


@pytest.mark.slow
@pytest.mark.drawn(1 / 5)
@pytest.mark.parametrize("item", ["gradient dp", "gradient fsdp", "gradient tp", "gradient sp", "train fsdp"])
def test_each_kind_of_parallel_is_measured(item, devices):
    result = measured(f"{item} 4x128", peers=("shard_map",))
    phase, parallel = item.split()
    assert result.problems == ()
    by_hand = ["shard_map"] * (phase == "gradient")
    assert [each.name for each in result.candidates] == ["xla", "best", *by_hand]
    assert result.op.startswith(f"tiny, 1 layers, {parallel}, ")
    first = result.candidates[0]
    assert first.tokens_per_second == pytest.approx(4 * 128 / devices / first.timing.wall_us * 1e6)
    assert first.timing.samples == SETTINGS.rounds


def test_a_mesh_of_another_size_is_refused():
    with pytest.raises(ShardingError, match="is of 64 devices"):
        measured("gradient dp 4x128", mesh="data=64")


def test_flops_of_a_step_have_those_of_the_head():
    config = get_decoder("llama3-8b")
    layers = mesh._flops(config, (2, 64), "gradient")
    assert mesh._flops(config, (2, 64), "train") - layers == 6 * 2 * 64 * 4096 * 128256


def test_pytorchs_processes_get_the_models_sizes(monkeypatch):
    asked: list[Any] = []

    def run(command, **_):
        request, result = map(Path, command[-2:])
        asked.append((command, json.loads(request.read_text())))
        found = {"microseconds": [1.0, 3.0, 2.0], "loss": 1.0, "seconds": 4.0, "peak_bytes": 5}
        result.write_text(json.dumps(found))
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(subprocess, "run", run)
    found = mesh._torch(get_decoder("llama3-8b"), "8x4096", 4, SETTINGS, tokens_a_gpu=8 * 1024)
    (command, request), *_ = asked
    assert command[:3] == [sys.executable, "-m", "torch.distributed.run"]
    assert "--nproc-per-node=4" in command
    assert (request["batch"], request["tokens"], request["model"]["num_hidden_layers"]) == (8, 4096, 32)
    assert (found.timing.median_us, found.compile_seconds, found.peak_bytes) == (2.0, 4.0, 5)
