"""A corpus of compiled programs, made once a test session in a process of its own."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hlo_analysis import Analysis, Capture, analyze


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Capture]:
    """A Capture of each program of corpus.py, by name."""
    if importlib.util.find_spec("jax_plugins.xla_cuda13") is None:
        pytest.skip("needs the CUDA plugin's compiler: pip install xlafuse[deviceless]")
    folder = tmp_path_factory.mktemp("corpus")
    script = Path(__file__).parent / "corpus.py"
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "TF_CPP_MIN_LOG_LEVEL": "3"}
    command = [sys.executable, str(script), str(folder)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return {path.name: Capture.load(path) for path in sorted(folder.iterdir())}


@pytest.fixture(scope="session")
def analyses(corpus: dict[str, Capture]) -> dict[str, Analysis]:
    return {name: analyze(capture, label=name) for name, capture in corpus.items()}
