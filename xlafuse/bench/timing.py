"""GPU time of several candidates in one interleaved run.

Kernel times come from CUPTI, by the extension of `jax.experimental.mosaic.gpu.profiler.measure`. It records every
kernel of the process, those of other frameworks too. `measure` itself runs each call twice on the same buffers, which
would time small calls out of the L2 cache. Wall-clock times sit beside.

Candidates take turns, so that clocks and temperature are the same for all of them. Each round has an order of its own:
at the power limit a call pays for the one before it. Each call gets the next of several sets of input buffers, so that
nothing is read from the L2 cache that a real program would read from memory. A ratio is only worth quoting between
candidates of one run.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jax
import numpy as np
from jax._src.lib import mosaic_gpu as mosaic_gpu_lib

L2_CACHE_BYTES = 60 * 1024 * 1024
"""Of an H100 or H200; 50 MB by the data sheet."""

_WINDOW_SECONDS = 0.1
"""Over which the warm-up averages."""
_STEADY = 0.02
"""How far two windows of a steady GPU are apart."""
_TRIAL_ROUNDS = 3
_FAR_BEHIND = 1.1


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Times of one call, in microseconds.

    `median_us`, `p20_us` and `p80_us` are of the GPU time of a call: by CUPTI the sum over its kernels, by CUDA events
    what lies between two events around the call, gaps included. `wall_us` is the median host time of a call among
    several in flight, launches and idle gaps included. `kernels` are the names in launch order, none where CUPTI saw
    none; `samples` counts calls. Where CUPTI mixes kernels of several calls (PyTorch launches a backward pass from
    another thread, whose kernels are reported later), the time of a call is the mean over a turn.
    """

    median_us: float
    p20_us: float
    p80_us: float
    wall_us: float
    kernels: tuple[str, ...]
    samples: int
    timer: Literal["cupti", "cuda_events"] = "cupti"


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """Something to time.

    kind: "default" is the call that names no implementation.
    call: compiled already, or compiled at its first call.
    inputs: sets of arguments, which take turns.
    wait: returns once the call that gave this result has finished.
    event_us: where CUPTI sees no kernel: runs a thunk and returns the microseconds between events around it.
    """

    name: str
    kind: Literal["implementation", "default", "variant", "peer", "ceiling", "strategy"]
    call: Callable[..., Any]
    inputs: Sequence[tuple[Any, ...]]
    wait: Callable[[Any], Any] = jax.block_until_ready
    event_us: Callable[[Callable[[], Any]], float] | None = None


@dataclass(frozen=True, kw_only=True)
class TimingRun:
    """What one interleaved run gave. A candidate is in `timings` or, with what went wrong, in `failures`.

    `is_steady` tells whether the warm-up ended because times had settled.
    """

    timings: Mapping[str, Timing]
    failures: Mapping[str, str]
    warm_up_seconds: float
    is_steady: bool


def buffer_sets(call_bytes: int) -> int:
    """How many sets of buffers of `call_bytes` each must take turns for a call to miss the L2 cache.

    At most 64: what a tiny call reads is in the L2 cache in a real program, too.
    """
    return max(1, min(64, -(-2 * L2_CACHE_BYTES // max(1, call_bytes)) + 1))


def time_candidates(
    candidates: Sequence[Candidate],
    *,
    rounds: int = 10,
    calls: int = 4,
    warm_up_seconds: tuple[float, float] = (0.3, 1.0),
) -> TimingRun:
    """Times candidates against each other on the attached NVIDIA GPU.

    Args:
        candidates: with names of their own.
        rounds: how often the candidates take turns.
        calls: calls of a candidate a turn.
        warm_up_seconds: how long all of them take turns first, until times settle: at least, and at most.

    Returns:
        Timings of `rounds * calls` calls each; of fewer for a variant that is far behind after three rounds, whose time
        nobody needs exactly. A candidate that fails on the way is dropped and named in `failures`.
    """
    turns = {candidate.name: _Turn(candidate) for candidate in candidates}
    failures: dict[str, str] = {}

    def attempt(turn: _Turn, step: Callable[[_Turn], None]) -> None:
        name = turn.candidate.name
        if name in failures:
            return
        try:
            step(turn)
        except Exception as error:  # one candidate must not end the run of the others
            failures[name] = f"{type(error).__name__}: {error}"

    for turn in turns.values():  # compiles what is not compiled
        attempt(turn, _Turn.run_once)
        attempt(turn, _Turn.choose_timer)
    spent, is_steady = _warm_up(lambda: [attempt(turn, _Turn.run_once) for turn in turns.values()], *warm_up_seconds)
    orders = np.random.default_rng(seed=0)
    for i in range(rounds):
        running = list((turns if i < _TRIAL_ROUNDS else _without_slow_variants(turns)).values())
        for place in orders.permutation(len(running)):
            attempt(running[place], lambda turn: turn.measure(calls))
    return TimingRun(
        timings={name: turn.timing() for name, turn in turns.items() if name not in failures},
        failures=failures,
        warm_up_seconds=spent,
        is_steady=is_steady,
    )


def _without_slow_variants(turns: Mapping[str, _Turn]) -> dict[str, _Turn]:
    ours = [turn.median_us for turn in turns.values() if turn.candidate.kind in ("implementation", "variant")]
    limit = _FAR_BEHIND * min(ours, default=0.0)
    return {n: turn for n, turn in turns.items() if turn.candidate.kind != "variant" or turn.median_us <= limit}


def _warm_up(run_all: Callable[[], Any], at_least: float, at_most: float) -> tuple[float, bool]:
    """Runs until two windows in a row take the same time a pass; returns the seconds spent and whether they did."""
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


class _Turn:
    """A candidate with its samples so far and the next set of its inputs."""

    def __init__(self, candidate: Candidate):
        self.candidate = candidate
        self._at = -1
        self._timer: Literal["cupti", "cuda_events"] = "cupti"
        self._gpu_us: list[float] = []
        self._wall_us: list[float] = []
        self._kernels: tuple[str, ...] = ()

    def call(self) -> Any:
        self._at = (self._at + 1) % len(self.candidate.inputs)
        return self.candidate.call(*self.candidate.inputs[self._at])

    def run_once(self) -> None:
        self.candidate.wait(self.call())

    def choose_timer(self) -> None:
        if not _kernel_records(self.run_once, 2):
            if self.candidate.event_us is None:
                raise RuntimeError(f"CUPTI saw no kernel of {self.candidate.name!r}; is another profiler on?")
            self._timer = "cuda_events"

    def measure(self, calls: int) -> None:
        start = time.perf_counter()
        result = None
        for _ in range(calls):
            result = self.call()  # the last one is dropped, so that its memory can be used again
        self.candidate.wait(result)
        self._wall_us.append((time.perf_counter() - start) / calls * 1e6)
        if self._timer == "cuda_events":
            assert self.candidate.event_us is not None
            self._gpu_us += [self.candidate.event_us(self.call) for _ in range(calls)]
            return
        records = _kernel_records(self.run_once, calls)
        if not records or len(records) % calls:
            raise RuntimeError(
                f"CUPTI saw {len(records)} kernels in {calls} calls of {self.candidate.name!r}, expected as many in "
                "each; is another profiler on?"
            )
        self._kernels, times = _by_calls(records, calls)
        self._gpu_us += times

    @property
    def median_us(self) -> float:
        """So far; infinite before the first sample."""
        return float(np.median(self._gpu_us)) if self._gpu_us else float("inf")

    def timing(self) -> Timing:
        p20, median, p80 = np.percentile(self._gpu_us, (20, 50, 80))
        return Timing(
            median_us=float(median),
            p20_us=float(p20),
            p80_us=float(p80),
            wall_us=float(np.median(self._wall_us)),
            kernels=self._kernels,
            samples=len(self._gpu_us),
            timer=self._timer,
        )


def _by_calls(records: Sequence[tuple[str, float]], calls: int) -> tuple[tuple[str, ...], list[float]]:
    """A call's kernels and each call's microseconds, from the records of so many calls of as many kernels."""
    each = len(records) // calls
    names = [name for name, _ in records]
    times = [1e3 * sum(ms for _, ms in records[i : i + each]) for i in range(0, len(records), each)]
    if names == names[:each] * calls:
        return tuple(names[:each]), times
    # One call's kernels are not beside each other: only the sum of all calls is certain.
    kernels = [name for name, count in Counter(names).items() for _ in range(-(-count // calls))]
    return tuple(kernels[:each]), [sum(times) / calls] * calls


def _kernel_records(run_once: Callable[[], Any], calls: int) -> list[tuple[str, float]]:
    """Name and milliseconds of each kernel of `calls` calls, in launch order."""
    extension = mosaic_gpu_lib._mosaic_gpu_ext  # pyright: ignore[reportPrivateImportUsage]
    extension._cupti_init()
    try:
        # Each ends before the next begins, so that XLA can use its memory again.
        for _ in range(calls):
            run_once()
    finally:
        records = extension._cupti_get_timings(True)
    return list(records or ())
