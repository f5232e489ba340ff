"""Measures the GPU time of several candidates in one interleaved run.

CUPTI gives the kernel times, through the extension behind `jax.experimental.mosaic.gpu.profiler.measure`. It records
every kernel of the process, other frameworks' too. `measure` itself runs each call twice on the same buffers, so that
small calls would read from the L2 cache. Wall-clock times are taken as well, before CUPTI is in use: once it has been,
the host launches more slowly for the rest of the process.

Candidates take turns, so that clocks and temperature are the same for all of them. The order changes from round to
round, because at the power limit a call's speed depends on the one before it. Each call uses the next of several sets
of input buffers, so that it does not find inputs in the L2 cache that a real program would read from HBM. Compare only
candidates of one run.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import jax
import numpy as np
from jax._src.lib import mosaic_gpu as mosaic_gpu_lib

L2_CACHE_BYTES = 60 * 1024 * 1024
"""L2 cache of an H100 or H200; the data sheet says 50 MB."""

_WINDOW_SECONDS = 0.1
"""Length of the warm-up's windows."""
_STEADY = 0.02
"""Largest relative difference between two windows of a steady GPU."""


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Times of one call, in microseconds.

    `median_us`, `p20_us` and `p80_us` are the median and percentiles of a call's GPU time, the sum over its kernels.
    `wall_us` is the median host time of a call among several in flight, launches and idle gaps included. `kernels` has
    the kernel names in launch order. `samples` counts calls. If CUPTI mixes the kernels of several calls, each call
    counts with the mean of its turn. This happens with PyTorch, whose backward pass launches from another thread.
    """

    median_us: float
    p20_us: float
    p80_us: float
    wall_us: float
    kernels: tuple[str, ...]
    samples: int


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One program to time.

    kind: "default" is the call that names no implementation.
    call: the function; it may compile at its first call.
    inputs: sets of arguments, used in turns.
    wait: blocks until the call that returned this result has finished.
    costs: seconds and bytes of its compilation, by the fields of `results.Measured`.
    turn: stands for the `Turn` of a program that another process runs and times.
    """

    name: str
    kind: Literal["implementation", "default", "variant", "peer", "ceiling", "strategy"]
    call: Callable[..., Any]
    inputs: Sequence[tuple[Any, ...]]
    wait: Callable[[Any], Any] = jax.block_until_ready
    costs: Mapping[str, Any] = field(default_factory=dict)
    turn: Any = None


@dataclass(frozen=True, kw_only=True)
class TimingRun:
    """Results of one interleaved run. Each candidate is in `timings`, or in `failures` with its error.

    `is_steady` tells whether the warm-up ended because the times had settled.
    """

    timings: Mapping[str, Timing]
    failures: Mapping[str, str]
    warm_up_seconds: float
    is_steady: bool


def buffer_sets(call_bytes: int) -> int:
    """Returns how many sets of buffers of `call_bytes` each must take turns for a call to miss the L2 cache.

    At most 64: a tiny call finds its inputs in the L2 cache in a real program, too.
    """
    return max(1, min(64, -(-2 * L2_CACHE_BYTES // max(1, call_bytes)) + 1))


def time_candidates(
    candidates: Sequence[Candidate],
    *,
    rounds: int = 10,
    calls: int = 4,
    wall_seconds: float = 0.0,
    by_gpu: bool = True,
    warm_up_seconds: tuple[float, float] = (0.3, 1.0),
) -> TimingRun:
    """Times candidates against each other on the attached NVIDIA GPU.

    Args:
        candidates: what to time; names must differ.
        rounds: how often the candidates take turns, for wall clock and again for GPU time.
        calls: calls of a candidate in each turn.
        wall_seconds: for so long each turn for wall clock keeps calling, as the GPU is idle while the host prepares
            the first call.
        by_gpu: whether GPU times are taken. On several GPUs they are not a call's time: the wall clock stands for them.
        warm_up_seconds: least and longest time for which all candidates first take turns until times settle.

    Returns:
        Timings over at least `rounds * calls` calls each. A candidate that raises is dropped and recorded in
        `failures`.
    """
    turns = {candidate.name: candidate.turn or Turn(candidate) for candidate in candidates}
    failures: dict[str, str] = {}

    def attempt(name: str, step: Callable[[Turn], None]) -> None:
        if name in failures:
            return
        try:
            step(turns[name])
        except Exception as error:  # a failing candidate must not end the run of the others
            failures[name] = f"{type(error).__name__}: {error}"

    orders = np.random.default_rng(seed=0)

    def take_turns(measure: Callable[[Turn], None]) -> None:
        for _ in range(rounds):
            for place in orders.permutation(len(turns)):
                attempt(list(turns)[place], measure)

    def run_all() -> None:
        for name in turns:
            attempt(name, lambda turn: turn.run_once())

    run_all()  # compiles, if not done yet
    spent, is_steady = _warm_up(run_all, *warm_up_seconds)
    take_turns(lambda turn: turn.measure_wall(calls, wall_seconds))
    if by_gpu:
        take_turns(lambda turn: turn.measure_gpu(calls))
    return TimingRun(
        timings={name: turn.timing() for name, turn in turns.items() if name not in failures},
        failures=failures,
        warm_up_seconds=spent,
        is_steady=is_steady,
    )


def _warm_up(run_all: Callable[[], Any], at_least: float, at_most: float) -> tuple[float, bool]:
    """Runs until two windows in a row take the same time for a pass; returns the seconds spent and whether they did."""
    start = time.perf_counter()
    last = float("inf")
    is_steady = False
    while (now := time.perf_counter()) - start < at_most:
        if is_steady and now - start >= at_least:
            break
        passes = 0
        while time.perf_counter() - now < min(_WINDOW_SECONDS, at_most):
            run_all()
            passes += 1
        each = (time.perf_counter() - now) / max(1, passes)
        is_steady = abs(each - last) <= _STEADY * each
        last = each
    return time.perf_counter() - start, is_steady


class Turn:
    """A candidate's samples so far and the position in its inputs."""

    def __init__(self, candidate: Candidate):
        self.candidate = candidate
        self._at = -1
        self._gpu_us: list[float] = []
        self._wall_us: list[float] = []
        self._kernels: tuple[str, ...] = ()

    def call(self) -> Any:
        """Calls the candidate with its next inputs."""
        self._at = (self._at + 1) % len(self.candidate.inputs)
        return self.candidate.call(*self.candidate.inputs[self._at])

    def run_once(self) -> None:
        """Calls the candidate and waits for the result."""
        self.candidate.wait(self.call())

    def measure_wall(self, calls: int, seconds: float) -> None:
        """Adds the wall clock of a call among several in flight."""
        start = time.perf_counter()
        result, made = None, 0
        while made < calls or time.perf_counter() - start < seconds:
            result = self.call()  # the last result is dropped, so that its memory can be used again
            made += 1
        self.candidate.wait(result)
        self._wall_us.append((time.perf_counter() - start) / made * 1e6)

    def records(self, calls: int) -> list[tuple[str, float]]:
        """Returns name and milliseconds of each kernel of so many calls."""
        return _kernel_records(self.run_once, calls)

    def measure_gpu(self, calls: int) -> None:
        """Adds the sum of the kernel times of each call."""
        records = self.records(calls)
        if not records or len(records) % calls:
            raise RuntimeError(
                f"CUPTI saw {len(records)} kernels in {calls} calls of {self.candidate.name!r}, expected as many in "
                "each; is another profiler on?"
            )
        self._kernels, times = _by_calls(records, calls)
        self._gpu_us += times

    def timing(self) -> Timing:
        """Returns the times of a call; see `timing_of`."""
        return timing_of(self._wall_us, self._gpu_us, self._kernels)


def timing_of(wall_us: Sequence[float], gpu_us: Sequence[float] = (), kernels: tuple[str, ...] = ()) -> Timing:
    """Summarizes samples of GPU times, or of the wall clock where there are none."""
    taken = gpu_us or wall_us
    p20, median, p80 = map(float, np.percentile(taken, (20, 50, 80)))
    wall = float(np.median(wall_us))
    return Timing(median_us=median, p20_us=p20, p80_us=p80, wall_us=wall, kernels=kernels, samples=len(taken))


def _by_calls(records: Sequence[tuple[str, float]], calls: int) -> tuple[tuple[str, ...], list[float]]:
    """Returns the kernels of a call and the microseconds of each call, from the records of `calls` equal calls."""
    each = len(records) // calls
    names = [name for name, _ in records]
    times = [1e3 * sum(ms for _, ms in records[i : i + each]) for i in range(0, len(records), each)]
    if names == names[:each] * calls:
        return tuple(names[:each]), times
    # The kernels of one call are not adjacent, so that only the sum over all calls is certain.
    kernels = [name for name, count in Counter(names).items() for _ in range(-(-count // calls))]
    return tuple(kernels[:each]), [sum(times) / calls] * calls


def _kernel_records(run_once: Callable[[], Any], calls: int) -> list[tuple[str, float]]:
    """Returns name and milliseconds of each kernel of `calls` calls, in launch order."""
    extension = mosaic_gpu_lib._mosaic_gpu_ext  # pyright: ignore[reportPrivateImportUsage]
    extension._cupti_init()
    try:
        # Each call ends before the next begins, so that XLA can use its memory again.
        for _ in range(calls):
            run_once()
    finally:
        records = extension._cupti_get_timings(True)
    return list(records or ())
