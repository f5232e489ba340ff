"""GPU time of several candidates in one interleaved run.

Kernel times come from CUPTI, by the extension behind `jax.experimental.mosaic.gpu.profiler.measure`. `measure` itself
runs each call twice on the same buffers, which would time small calls out of the L2 cache. Wall-clock times sit beside.
Candidates take turns, so that clocks and temperature are the same for all of them, and each call gets the next of
several sets of input buffers, so that nothing is read from the L2 cache that a real program would read from memory.
A ratio is only worth quoting between candidates of one run.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax._src.lib import mosaic_gpu as mosaic_gpu_lib

L2_CACHE_BYTES = 60 * 1024 * 1024
"""Of an H100 or H200; 50 MB by the data sheet."""


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Times of one call, in microseconds.

    `kernel_*` sum the GPU time of all kernels of a call; `wall_us` is the median host time of a call among several in
    flight, launch and idle gaps included. `kernels` are the names in launch order; `samples` counts calls.
    """

    median_us: float
    p20_us: float
    p80_us: float
    wall_us: float
    kernels: tuple[str, ...]
    samples: int


def buffer_sets(call_bytes: int) -> int:
    """How many sets of buffers of `call_bytes` each must take turns for a call to miss the L2 cache."""
    return max(1, min(64, -(-2 * L2_CACHE_BYTES // max(1, call_bytes)) + 1))


def time_candidates(
    candidates: Mapping[str, Callable[..., Any]],
    inputs: Mapping[str, Sequence[tuple[Any, ...]]],
    *,
    rounds: int = 12,
    calls: int = 4,
    warm_up_seconds: float = 0.3,
) -> dict[str, Timing]:
    """Times jitted candidates against each other on the attached NVIDIA GPU.

    Args:
        candidates: functions by name; jitted here.
        inputs: for each candidate its sets of arguments, which take turns.
        rounds: how often the candidates take turns.
        calls: calls of a candidate a turn.
        warm_up_seconds: how long all of them run first, to compile and to bring the clocks up.

    Returns:
        A Timing each, of `rounds * calls` calls.

    Raises:
        RuntimeError: CUPTI saw no kernel of a candidate.
    """
    jitted = {name: jax.jit(function) for name, function in candidates.items()}
    turns = {name: _Rotation(inputs[name]) for name in jitted}
    for name, function in jitted.items():
        jax.block_until_ready(function(*turns[name].next()))
    deadline = time.perf_counter() + warm_up_seconds
    while time.perf_counter() < deadline:
        for name, function in jitted.items():
            jax.block_until_ready(function(*turns[name].next()))

    kernel_us: dict[str, list[float]] = {name: [] for name in jitted}
    wall_us: dict[str, list[float]] = {name: [] for name in jitted}
    kernels: dict[str, tuple[str, ...]] = {}
    for _ in range(rounds):
        for name, function in jitted.items():
            wall_us[name].append(_wall_us(function, turns[name], calls))
            records = _kernel_records(function, turns[name], calls)
            if not records or len(records) % calls:
                raise RuntimeError(
                    f"CUPTI saw {len(records)} kernels in {calls} calls of {name!r}; is another profiler on?"
                )
            each = len(records) // calls
            kernels[name] = tuple(kernel for kernel, _ in records[:each])
            kernel_us[name] += [1e3 * sum(ms for _, ms in records[i : i + each]) for i in range(0, len(records), each)]
    return {
        name: Timing(
            median_us=float(np.median(samples)),
            p20_us=float(np.percentile(samples, 20)),
            p80_us=float(np.percentile(samples, 80)),
            wall_us=float(np.median(wall_us[name])),
            kernels=kernels[name],
            samples=len(samples),
        )
        for name, samples in kernel_us.items()
    }


class _Rotation:
    """Sets of arguments, one after another for ever."""

    def __init__(self, sets: Sequence[tuple[Any, ...]]):
        self._sets = sets
        self._at = -1

    def next(self) -> tuple[Any, ...]:
        self._at = (self._at + 1) % len(self._sets)
        return self._sets[self._at]


def _wall_us(function: Callable[..., Any], rotation: _Rotation, calls: int) -> float:
    start = time.perf_counter()
    results = [function(*rotation.next()) for _ in range(calls)]
    jax.block_until_ready(results)
    return (time.perf_counter() - start) / calls * 1e6


def _kernel_records(function: Callable[..., Any], rotation: _Rotation, calls: int) -> list[tuple[str, float]]:
    """Name and milliseconds of each kernel of `calls` calls, in launch order."""
    extension = mosaic_gpu_lib._mosaic_gpu_ext  # pyright: ignore[reportPrivateImportUsage]
    extension._cupti_init()
    try:
        # A result is dropped before the next call, so that XLA can use its memory again.
        for _ in range(calls):
            jax.block_until_ready(function(*rotation.next()))
    finally:
        records = extension._cupti_get_timings(True)
    return list(records or ())
