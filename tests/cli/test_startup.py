"""The command line as a process: how fast it starts, and what it never shows."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import version

import pytest


def _run(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return _python("-m", "xlafuse.cli", *words, **environment)


def _python(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if name != "JAX_PLATFORMS"}
    return subprocess.run(
        [sys.executable, *words],
        env=kept | environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def _seconds(*words: str) -> float:
    """Of processors' time, which depends little on what else runs."""
    before = os.times()
    result = _python(*words)
    after = os.times()
    assert result.returncode == 0
    return after.children_user + after.children_system - before.children_user - before.children_system


def test_help_is_quick_and_imports_nothing_heavy():
    script = "import sys, xlafuse.cli; print(sorted({'jax', 'flax', 'numpy', 'jinja2', 'igraph'} & set(sys.modules)))"
    assert _python("-c", script).stdout.strip() == "[]"
    assert "report" in _run("--help").stdout
    # Beside another program, since a crowded machine takes three times the processor's time for the same work.
    times = [(_seconds("-m", "xlafuse.cli", "--help"), _seconds("-c", "import asyncio")) for _ in range(3)]
    ours, asyncio = (min(column) for column in zip(*times, strict=True))
    assert ours < 12 * asyncio  # 0.3 s and 0.05 s of one core; jax would add 0.5 s


def test_one_operation_loads_neither_other_kernels_nor_test_cases():
    script = (
        "import sys; {}; print([name for name in sys.modules if name.startswith('pallas_kernels.ops.') and "
        "name.rpartition('.')[2] in ('mosaic_gpu', 'specs', 'reference')])"
    )
    assert _python("-c", script.format("import xlafuse.catalogue")).stdout.strip() == "[]"
    loaded = _python("-c", script.format("from pallas_kernels import embedding")).stdout
    assert "ops.embedding.reference" in loaded
    assert "specs" not in loaded
    assert "ops.attention" not in loaded


def test_version():
    assert _run("--version").stdout == f"xlafuse {version('xlafuse')}\n"


def test_the_lists_name_everything():
    from hlo_analysis.targets import target_names
    from pallas_kernels import REGISTRY
    from xlafuse.strategies import STRATEGIES

    targets, strategies, kernels = (_run(word, COLUMNS="160") for word in ("targets", "strategies", "kernels"))
    for name in target_names():
        assert f" {name} " in targets.stdout
    for name in STRATEGIES:
        assert f" {name} " in strategies.stdout
    for name in REGISTRY:
        assert f" {name} " in kernels.stdout
    assert (targets.stderr, strategies.stderr, kernels.stderr) == ("", "", "")


@pytest.mark.slow
def test_a_real_report_on_a_machine_without_a_gpu_shows_no_plugin_error(tmp_path):
    """With the CUDA plugin installed, no GPU and JAX_PLATFORMS not set: not a word of the plugin."""
    pytest.importorskip("jax_cuda13_plugin")
    words = ("--block", "tiny", "--shape", "1x128", "--strategies", "xla", "--try", "0")
    result = _run("report", *words, "-o", str(tmp_path / "out"))
    assert result.returncode == 0, result.stderr
    for word in ("Traceback", "cuda", "CUDA", "plugin", "Unable to"):
        assert word not in result.stderr
    assert "xla: done after" in result.stderr
    assert (tmp_path / "out/report.html").stat().st_size > 50_000


def test_importing_fuse_starts_no_device():
    """`jax.distributed.initialize` must come before any."""
    script = "import xlafuse.fusion.spellings; from jax._src import xla_bridge; print(list(xla_bridge._backends))"
    assert _python("-c", script).stdout.strip() == "[]"
