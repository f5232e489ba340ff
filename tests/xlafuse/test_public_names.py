"""`dir()` of the public packages holds what is public, and `xlafuse.kernels` has the operations."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

from pallas_kernels import REGISTRY

PUBLIC = ["xlafuse", *(f"xlafuse.{each}" for each in ("attention", "kernels", "losses", "nnx", "testing"))]


@pytest.mark.parametrize("name", [*PUBLIC, "hlo_analysis", "pallas_kernels"])
def test_dir_is_what_is_public(name):
    package = importlib.import_module(name)
    assert dir(package) == sorted(package.__all__)
    assert all(getattr(package, each) is not None for each in package.__all__)


def test_kernels_are_the_operations():
    import pallas_kernels
    import xlafuse

    assert set(REGISTRY) <= set(xlafuse.kernels.__all__) <= set(pallas_kernels.__all__)
    assert all(getattr(xlafuse.kernels, name) is getattr(pallas_kernels, name) for name in xlafuse.kernels.__all__)


def test_importing_xlafuse_imports_no_jax():
    script = "import sys, xlafuse; dir(xlafuse); print('jax' in sys.modules, 'pallas_kernels' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]
