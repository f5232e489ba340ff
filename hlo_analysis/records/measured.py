"""Defines the measured times of one program on a GPU: in total, and for each launch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class LaunchTime:
    """The GPU time of one launch; if a loop runs it several times, of one of these runs."""

    launch: int
    """Index of the launch in the analysis that the profile was joined to."""
    name: str
    """The HLO instruction."""
    kernels: tuple[str, ...]
    """The kernels that the profile shows for it: one, or all that a library call ran."""
    median_us: float | None
    """None for consecutive library calls that the profile cannot tell apart; their time counts only in the total."""
    samples: int


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Measured times of one program on a GPU: medians over `calls` calls, or None if the source does not know."""

    device: str
    """The device's name in JAX: 'NVIDIA H200'."""
    source: str
    """How it was measured, in a few words."""
    created: str = ""
    """ISO 8601, UTC."""
    calls: int
    """Number of calls over which `kernel_us` and the launches' times are medians."""
    kernel_us: float | None
    """GPU time of all kernels of one call, of collectives what is beside no others; None if only a clock was read."""
    gap_us: float | None = None
    """Idle time of the GPU between the first and the last kernel of a call."""
    wall_us: float | None = None
    """Time per call with several calls in flight, without a profiler: the time that a user waits."""
    compile_seconds: float | None = None
    """XLA's compile time, including autotuning."""
    peak_bytes: int | None = None
    """The program's peak memory, including arguments."""
    launches: tuple[LaunchTime, ...] = ()
    environment: tuple[tuple[str, str], ...] = ()
    """Driver, clocks, power limit, versions."""
    differs: Literal["", "older program", "another GPU", "another version"] = ""
    """What was not measured as it was analysed; '' if this program was, on this GPU, as these versions compile it. With
    a difference only the totals stay, which are no times of this program."""
    notes: tuple[str, ...] = ()
    """Reasons to doubt the numbers, in sentences."""

    def __repr__(self) -> str:
        wall = "" if self.wall_us is None else f", wall clock {self.wall_us:.1f} us"
        kernels = "" if self.kernel_us is None else f", kernels {self.kernel_us:.1f} us"
        return (
            f"Measured(on {self.device} by {self.source}{kernels}{wall}, "
            f"{len(self.launches)} launches timed, {self.calls} calls)"
        )
