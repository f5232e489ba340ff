"""The analysis of one program: its launches, the edges between them, and its sources."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from hlo_analysis.records.edges import Decision, Intermediate, MissedFusion
from hlo_analysis.records.launches import OPAQUE_KINDS, Launch
from hlo_analysis.records.measured import Measured

SCHEMA_VERSION = 2

GemmChoice = Literal["attached", "replayed", "default", "none"]
"""Where matrix-product kernels came from: autotuned on a GPU, a recorded autotuning, XLA's default, or no choice."""


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """Totals of the program, counted; loops count as often as they run."""

    bytes_read: int
    bytes_written: int
    flops: int
    unfused_bytes: int
    intermediate_bytes: int
    """Traffic of values that one launch hands another through HBM."""

    @property
    def bytes(self) -> int:
        """Bytes read and written."""
        return self.bytes_read + self.bytes_written

    @property
    def saved_bytes(self) -> int:
        """What fusion saved: the traffic with nothing fused, less today's."""
        return self.unfused_bytes - self.bytes

    @property
    def intensity(self) -> float:
        """FLOPs per byte of HBM traffic."""
        return self.flops / self.bytes if self.bytes else 0.0


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Counted from the buffer assignment."""

    argument_bytes: int = 0
    output_bytes: int = 0
    temp_bytes: int = 0
    peak_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class Device:
    """The peaks that the roofline uses, and where they come from."""

    name: str
    description: str
    memory_bandwidth: float
    """Bytes a second."""
    matrix_flops: tuple[tuple[str, float], ...]
    """Dense peak FLOP/s of the matrix units by element type, e.g. ('bf16', 989e12)."""
    vector_flops: float
    launch_overhead_us: float
    source: str


@dataclass(frozen=True, kw_only=True)
class Provenance:
    """How the capture was made: enough to make it again."""

    function: str
    mode: str
    arguments: tuple[str, ...]
    target: str
    gemm_choice: GemmChoice
    autotune_hits: int = 0
    autotune_lookups: int = 0
    compiler_options: tuple[tuple[str, str], ...] = ()
    versions: tuple[tuple[str, str], ...] = ()
    created: str = ""
    """ISO 8601, UTC."""
    compile_seconds: float = 0.0
    notes: tuple[str, ...] = ()
    """What this capture could not know, in sentences."""


@dataclass(frozen=True, kw_only=True)
class Analysis:
    """What the compiler did with one program, and why."""

    schema_version: int = SCHEMA_VERSION
    label: str
    provenance: Provenance
    device: Device
    launches: tuple[Launch, ...]
    decisions: tuple[Decision, ...]
    intermediates: tuple[Intermediate, ...]
    missed: tuple[MissedFusion, ...]
    traffic: Traffic
    memory: Memory
    silent: tuple[tuple[str, str], ...] = ()
    """Entry instructions that launch nothing, with the reason (parameter, constant, bitcast, tuple, ...)."""
    measured: Measured | None = None
    """What a GPU took to run it; None where none did."""

    def __repr__(self) -> str:
        return (
            f"Analysis({self.label!r} on {self.provenance.target}: {self.launch_count} launches, "
            f"{self.traffic.bytes:,} bytes of HBM traffic, roofline {self.roofline_us:.1f} us, "
            f"{len(self.decisions)} decisions, {len(self.missed)} missed fusions)"
        )

    @property
    def launch_count(self) -> int:
        """Launches of one run, loops counted as often as they run."""
        return sum(launch.repeat for launch in self.launches)

    @property
    def roofline_us(self) -> float:
        """Estimated time of one run: the launches' rooflines, one after another."""
        return sum(launch.roofline_us * launch.repeat for launch in self.launches)

    @property
    def has_opaque_kernels(self) -> bool:
        """Whether there are kernels that are not XLA's and of whose work nothing is known."""
        return any(launch.kind in OPAQUE_KINDS and not launch.flops for launch in self.launches)

    @property
    def launches_by_kind(self) -> dict[str, int]:
        """Launches of one run by kind, most frequent first."""
        counts: dict[str, int] = {}
        for launch in self.launches:
            counts[launch.kind] = counts.get(launch.kind, 0) + launch.repeat
        return dict(sorted(counts.items(), key=lambda item: (-item[1], item[0])))
