"""Captures that several tests look at, made once."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import pytest
from capture_programs import LAYER_ARGUMENTS, layer

from hlo_analysis.capture import Capture, capture


@pytest.fixture(scope="session")
def compiler() -> None:
    """Skips where XLA's CUDA compiler is not installed."""
    if importlib.util.find_spec("jax_cuda13_plugin") is None:
        pytest.skip("needs the CUDA plugin's compiler: pip install xlafuse[deviceless]")


@pytest.fixture(scope="session")
def gemm(compiler: None) -> Capture:
    """The layer, forward, for the H200 with the shipped recording."""
    return capture(layer, *LAYER_ARGUMENTS, label="a layer")


@pytest.fixture
def without_ptxas(compiler: None, tmp_path: Any) -> dict[str, str]:
    """Compiler options with which XLA takes a ptxas that gives its version and assembles nothing."""
    binary = tmp_path / "cuda" / "bin" / "ptxas"
    binary.parent.mkdir(parents=True)
    binary.write_text(
        "#!/bin/sh\n"
        'case "$*" in *--version*) echo "Cuda compilation tools, release 13.0, V13.0.88"; exit 0;; esac\n'
        'echo "ptxas fatal: out of order" >&2; exit 3\n'
    )
    binary.chmod(0o755)
    return {"xla_gpu_cuda_data_dir": str(tmp_path / "cuda")}


@pytest.fixture
def temporary_folders(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[str]]:
    """What captures have left in the folder for temporary files."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    return lambda: sorted(path.name for path in folder.iterdir())
