"""Records what a measurement ran on: GPU, driver and versions, and the clocks, power and temperature during it."""

from __future__ import annotations

import contextlib
import os
import platform
import statistics
import subprocess
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

import jax

_QUERY = {
    "name": "gpu",
    "driver_version": "driver",
    "clocks.sm": "sm_clock_mhz",
    "clocks.mem": "memory_clock_mhz",
    "clocks.max.sm": "max_sm_clock_mhz",
    "power.draw": "power_watts",
    "power.limit": "power_limit_watts",
    "temperature.gpu": "temperature_celsius",
}
_PACKAGES = (
    "jax",
    "jaxlib",
    "jax-cuda13-plugin",
    "jax-cuda12-plugin",
    "jax-triton",
    "triton",
    "torch",
    "liger-kernel",
    "flash-attn3-jax",
    "flash-attn-4",
    "quack-kernels",
    "nvidia-cutlass-dsl",
    "numpy",
)


@dataclass(frozen=True, kw_only=True)
class Environment:
    """Hardware and software of a measurement.

    gpu: nvidia-smi's report before the run.
    commit: commit of this package; "" if neither git nor XLAFUSE_COMMIT tells.
    """

    device_kind: str
    platform_version: str
    python: str
    packages: Mapping[str, str] = field(default_factory=dict)
    gpu: Mapping[str, str] = field(default_factory=dict)
    commit: str = ""


def environment() -> Environment:
    """Returns the environment of this process."""
    device = jax.devices()[0]
    return Environment(
        device_kind=device.device_kind,
        platform_version=device.client.platform_version,
        python=platform.python_version(),
        packages={name: version for name in _PACKAGES if (version := _version(name))},
        gpu=gpu_state(),
        commit=commit(),
    )


def commit() -> str:
    """Returns XLAFUSE_COMMIT from the environment, which serves copies without git history, or else git's HEAD."""
    if named := os.environ.get("XLAFUSE_COMMIT"):
        return named
    git = ["git", "-C", str(Path(__file__).resolve().parent)]
    is_tracked = _words_of([*git, "ls-files", "--", Path(__file__).name])  # untracked: the history is another project's
    return _words_of([*git, "describe", "--always", "--dirty", "--abbrev=7", "--exclude=*"]) if is_tracked else ""


def gpu_state() -> dict[str, str]:
    """Returns the driver, clocks, power and temperature of this process's first GPU, from nvidia-smi, or nothing."""
    words = _words_of(_nvidia_smi(_QUERY))
    values = [word.strip() for word in words.split(",")] if words else []
    if len(values) != len(_QUERY):
        return {}
    return dict(zip(_QUERY.values(), values, strict=True))


def _nvidia_smi(quantities: Iterable[str]) -> list[str]:
    """Returns the command that prints quantities of this process's first GPU in a line."""
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0] or "0"
    return ["nvidia-smi", f"--query-gpu={','.join(quantities)}", "--format=csv,noheader,nounits", f"--id={first}"]


def _words_of(command: Sequence[str]) -> str:
    """Returns what a command prints, or "" if it is missing or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


_SAMPLED = {name: _QUERY[name] for name in ("clocks.sm", "clocks.mem", "power.draw", "temperature.gpu")}
_PERIOD_MS = 200


@dataclass(frozen=True, kw_only=True)
class Spread:
    """Smallest, median and largest of some samples."""

    least: float
    median: float
    most: float


@dataclass(frozen=True, kw_only=True)
class Activity:
    """nvidia-smi's samples over a period: a spread for each quantity; empty if there were none."""

    samples: int
    quantities: Mapping[str, Spread] = field(default_factory=dict)


class Sampler:
    """Collects nvidia-smi's samples; `sampling` feeds it."""

    def __init__(self) -> None:
        self._samples: list[tuple[float, list[str]]] = []

    def feed(self, line: str, now: float) -> None:
        """Stores a line that arrived at `now` (`time.monotonic`)."""
        self._samples.append((now, line.split(",")))

    def since(self, start: float) -> Activity:
        """Summarizes the samples that arrived after `start` (`time.monotonic`)."""
        rows = [words for now, words in list(self._samples) if now >= start and len(words) == len(_SAMPLED)]
        quantities = {}
        for name, column in zip(_SAMPLED.values(), zip(*rows, strict=True), strict=False):
            if known := [float(word) for word in column if not word.strip().startswith("[")]:  # "[N/A]"
                quantities[name] = Spread(least=min(known), median=statistics.median(known), most=max(known))
        return Activity(samples=len(rows), quantities=quantities)


@contextlib.contextmanager
def sampling() -> Iterator[Sampler]:
    """Samples the first GPU five times a second until the context ends; without nvidia-smi there are no samples."""
    sampler = Sampler()
    command = [*_nvidia_smi(_SAMPLED), f"--loop-ms={_PERIOD_MS}"]
    try:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    except OSError:
        yield sampler
        return

    def read() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            sampler.feed(line, time.monotonic())

    reader = threading.Thread(target=read, daemon=True)
    with process:
        reader.start()
        try:
            yield sampler
        finally:
            process.terminate()
            reader.join(timeout=5)
