"""Every kernel of the registry, compiled to H200 machine code with no GPU: nothing spills, lanes agree on sums."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pallas_kernels import REGISTRY

ROOT = Path(__file__).resolve().parents[2]

BACKWARD_BY_XLA = ("lora_linear", "quantized_linear")
"""Operations whose gradients have no kernel of ours by default."""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("jax_plugins.xla_cuda13") is None, reason="needs the extra 'deviceless'"
    ),
]


@pytest.mark.parametrize("op", REGISTRY)
def test_kernels_compile_without_spills(op, tmp_path):
    # A process of its own: Mosaic GPU reads from the environment whether to print what ptxas says.
    dumps = {"MOSAIC_GPU_DUMP_PTX": "1", "MOSAIC_GPU_DUMP_PTXAS": "1"}
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", **dumps}
    done = subprocess.run(
        [sys.executable, str(Path(__file__).parent / "compile_deviceless.py"), op, str(tmp_path)],
        cwd=ROOT,
        env={**environment, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=550,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    kernels = json.loads(done.stdout.splitlines()[-1])
    has_backward = REGISTRY[op].differentiable and op not in BACKWARD_BY_XLA
    phases = {"forward", "backward"} if has_backward else {"forward"}
    assert {kernel["phase"] for kernel in kernels} == phases
    assert all(kernel["registers"] > 0 for kernel in kernels)
    spilled = [k for k in kernels if k["spill_stores"] or k["spill_loads"]]
    assert not spilled
    # What all lanes should know alike they store to one word: sanitizers call it a race, and no order decides it.
    assert not [k for k in kernels if k["fused_sums"]]
