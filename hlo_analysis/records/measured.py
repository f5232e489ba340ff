"""What a GPU took to run one program: the whole, and launch by launch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class LaunchTime:
    """The GPU time of one launch of the launch table; of one of its runs where a loop runs it several times."""

    launch: int
    """Its index in the analysis that the profile was joined to."""
    name: str
    """The HLO instruction."""
    kernels: tuple[str, ...]
    """What the profile shows for it: one kernel, and for a call of a library all that it ran."""
    median_us: float | None
    """None for library calls in a row that the profile cannot tell apart: their time is in the total alone."""
    samples: int


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One program's times on a GPU. Medians over `calls` calls; None where the source does not know."""

    device: str
    """As JAX names it: 'NVIDIA H200'."""
    source: str
    """What measured it, in a few words."""
    created: str = ""
    """ISO 8601, UTC."""
    calls: int
    """Of which `kernel_us` and the launches' times are medians."""
    kernel_us: float | None
    """GPU time of all kernels of one call; None where a clock was looked at, and no profile."""
    gap_us: float | None = None
    """GPU idle between the first kernel of a call and its last."""
    wall_us: float | None = None
    """Time between calls of which several are in flight, without a profiler: what a user waits for."""
    compile_seconds: float | None = None
    """XLA's, autotuning included."""
    peak_bytes: int | None = None
    """The most memory the program had, arguments included."""
    launches: tuple[LaunchTime, ...] = ()
    environment: tuple[tuple[str, str], ...] = ()
    """Driver, clocks, power limit, versions."""
    notes: tuple[str, ...] = ()
    """What makes the numbers doubtful, in sentences."""

    def __repr__(self) -> str:
        wall = "" if self.wall_us is None else f", wall clock {self.wall_us:.1f} us"
        kernels = "" if self.kernel_us is None else f", kernels {self.kernel_us:.1f} us"
        return (
            f"Measured(on {self.device} by {self.source}{kernels}{wall}, "
            f"{len(self.launches)} launches timed, {self.calls} calls)"
        )
