"""On a machine without a GPU, the CUDA plugin that is there to compile must not complain that it cannot run."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hlo_analysis.capture import plugin_log

NO_GPU = not any(Path(device).exists() for device in ("/dev/nvidia0", "/dev/nvidiactl", "/dev/dxg"))
MESSAGE = "Jax plugin configuration error: Exception when calling %s.initialize()"

LIBRARY = """
import hlo_analysis
import jax, jax.numpy as jnp
x = jnp.ones((64, 64), jnp.bfloat16)  # JAX looks for devices here, before any capture
made = hlo_analysis.capture(lambda x: jnp.tanh(x @ x), x)
print(jax.default_backend(), jax.config.jax_platforms, made.manifest.complete)
"""


def run(program: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name not in ("JAX_PLATFORMS", "XLA_FLAGS")}
    return subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False)


@pytest.mark.skipif(not NO_GPU, reason="has a GPU")
def test_library_user_sees_nothing(compiler: None) -> None:
    done = run(LIBRARY)
    assert done.stderr == ""
    # JAX chose the CPU by itself: nothing of its configuration was changed.
    assert done.stdout == "cpu None True\n"


@pytest.mark.skipif(not NO_GPU, reason="has a GPU")
def test_without_this_package_the_plugin_does_complain(compiler: None) -> None:
    # Otherwise the test above shows nothing.
    assert "Jax plugin configuration error" in run("import jax; jax.devices()").stderr


def record(message: str, *arguments: object) -> logging.LogRecord:
    return logging.LogRecord("jax._src.xla_bridge", logging.ERROR, __file__, 1, message, arguments, None)


def test_only_that_message_is_dropped_and_only_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    (installed,) = [entry for entry in logging.getLogger("jax._src.xla_bridge").filters if "MissingGpu" in repr(entry)]
    assert isinstance(installed, logging.Filter)
    monkeypatch.setattr(plugin_log, "has_nvidia_gpu", lambda: False)
    assert not installed.filter(record(MESSAGE, "jax_plugins.xla_cuda13"))
    assert installed.filter(record(MESSAGE, "jax_plugins.some_tpu"))
    assert installed.filter(record("Unable to initialize backend %s", "cuda"))
    monkeypatch.setattr(plugin_log, "has_nvidia_gpu", lambda: True)
    assert installed.filter(record(MESSAGE, "jax_plugins.xla_cuda13"))


def test_installed_once() -> None:
    before = list(logging.getLogger("jax._src.xla_bridge").filters)
    plugin_log.silence_missing_gpu()
    assert logging.getLogger("jax._src.xla_bridge").filters == before
