"""Clocks, power and temperature of a GPU while something runs on it, by nvidia-smi."""

from __future__ import annotations

import contextlib
import statistics
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

_QUERY = {
    "clocks.sm": "sm_clock_mhz",
    "clocks.mem": "memory_clock_mhz",
    "power.draw": "power_watts",
    "temperature.gpu": "temperature_celsius",
}
_PERIOD_MS = 200


@dataclass(frozen=True, kw_only=True)
class Spread:
    """Smallest, middle and largest of some samples."""

    least: float
    median: float
    most: float


@dataclass(frozen=True, kw_only=True)
class Activity:
    """What nvidia-smi said in a while: a spread for each quantity, none where it said nothing."""

    samples: int
    quantities: Mapping[str, Spread] = field(default_factory=dict)


class Sampler:
    """Collects nvidia-smi's samples; see `sampling`."""

    def __init__(self) -> None:
        self._samples: list[tuple[float, dict[str, float]]] = []

    def feed(self, line: str, now: float) -> None:
        """Takes a line of numbers that came at `now` (`time.monotonic`); others are passed over."""
        words = line.split(",")
        if len(words) != len(_QUERY):
            return
        values = {}
        for name, word in zip(_QUERY.values(), words, strict=True):
            with contextlib.suppress(ValueError):  # "[N/A]"
                values[name] = float(word)
        self._samples.append((now, values))

    def since(self, start: float) -> Activity:
        """What came after `start` (`time.monotonic`)."""
        samples = [values for now, values in list(self._samples) if now >= start]
        columns: Mapping[str, Sequence[float]] = {
            name: [values[name] for values in samples if name in values] for name in _QUERY.values()
        }
        return Activity(
            samples=len(samples),
            quantities={
                name: Spread(least=min(column), median=statistics.median(column), most=max(column))
                for name, column in columns.items()
                if column
            },
        )


@contextlib.contextmanager
def sampling(device_index: int = 0) -> Iterator[Sampler]:
    """Samples a GPU five times a second until the context ends; without nvidia-smi there are no samples."""
    sampler = Sampler()
    command = [
        "nvidia-smi",
        f"--query-gpu={','.join(_QUERY)}",
        "--format=csv,noheader,nounits",
        f"--id={device_index}",
        f"--loop-ms={_PERIOD_MS}",
    ]
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
    reader.start()
    try:
        yield sampler
    finally:
        process.terminate()
        reader.join(timeout=5)
        process.wait(timeout=5)
        if process.stdout is not None:
            process.stdout.close()
