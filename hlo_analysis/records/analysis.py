"""Defines the analysis of one program: its launches, the edges between them, and how it was made."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from hlo_analysis.records.edges import Decision, Intermediate, MissedFusion
from hlo_analysis.records.hotspots import Hotspot
from hlo_analysis.records.launches import OPAQUE_KINDS, Launch
from hlo_analysis.records.measured import Measured

SCHEMA_VERSION = 3

Table = Literal["launches", "decisions", "missed", "hotspots"]
"""The tables of an analysis that have a DataFrame."""

GemmChoice = Literal["attached", "replayed", "default", "none"]
"""How XLA chose matrix-product kernels: by autotuning on a GPU, from a recording of it, by default, or not at all."""


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """Counted totals of the program; launches in loops count once per iteration."""

    bytes_read: int
    bytes_written: int
    flops: int
    unfused_bytes: int
    intermediate_bytes: int
    """Traffic of the values that one launch writes to HBM and another reads, without the writes of results."""

    @property
    def bytes(self) -> int:
        """Returns the bytes read and written."""
        return self.bytes_read + self.bytes_written

    @property
    def saved_bytes(self) -> int:
        """Returns the bytes that fusion saved: the unfused traffic minus the actual traffic."""
        return self.unfused_bytes - self.bytes


@dataclass(frozen=True, kw_only=True)
class Memory:
    """The program's memory use, counted from the buffer assignment."""

    argument_bytes: int = 0
    output_bytes: int = 0
    temp_bytes: int = 0
    peak_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class Efficiency:
    """The shares of the peaks that kernels typically reach. The defaults are for a device without measurements."""

    memory: float = 1.0
    """Share of the memory bandwidth that kernels reach."""
    vector: float = 1.0
    """Share of the vector peak, of multiply-adds, that other operations reach, one FLOP each."""
    power: float = 1.0
    """Share of the matrix peak that the power limit allows for sustained work."""
    matrix: float = 1.0
    """Share of the power-limited peak that matrix products reach."""
    attention: float = 1.0
    """Share of the power-limited peak that attention kernels reach."""
    kernel_us: float = 0.0
    """GPU time of a kernel that does almost nothing."""
    repeated_us: float = 0.0
    """The same in a loop of many steps, whose data stays in the L2 cache."""
    load_us: float = 0.0
    """Time from a Triton product's load until its block can use it; 0 if not known."""
    issued_per_clock: float = 0.0
    """Instructions that the warps of a multiprocessor issue in a clock when there are many; 0 if not known."""
    clocks_per_instruction: float = 0.0
    """Clock cycles from one instruction of a warp to its next."""
    blocks_per_clock: float = 0.0
    """Blocks that the GPU starts in a clock; 0 if not known."""
    bytes_per_clock: float = 0.0
    """Bytes that a multiprocessor reads and writes in a clock; 0 if not known."""
    column_bytes_per_clock: float = 0.0
    """The same of all multiprocessors together in sums over columns; 0 if not known."""
    cache_bytes_per_clock: float = 0.0
    """L2 cache bandwidth of strided reads, in bytes per multiprocessor and clock; 0 if not known."""
    atomics_per_clock: float = 0.0
    """Elements of 16 bits that a multiprocessor adds to memory in a clock; 0 if not known."""
    atomic_sectors_per_clock: float = 0.0
    """Sectors of 32 bytes in which the L2 cache adds 32-bit elements in a clock; 0 if not known."""
    contended_clocks: float = 0.0
    """Clocks that each other thread costs an addition of 16 bits into the same place; 0 if not known."""
    slow_loads: float = 1.0
    """Share of their rate that Triton products reach whose rows start where no thread can load 16 bytes at once."""
    transposed: float = 1.0
    """Share of their rate that products of float32 reach whose operands are not contiguous along the sum."""
    complex: float = 1.0
    """Share of their rate that products of complex numbers reach."""
    few_channels: float = 1.0
    """Share of their rate that convolutions of 2 to 7 input channels reach."""
    direct_flops_per_clock: float = 0.0
    """FLOPs of a multiprocessor in a clock in convolutions whose filters sum over one channel; 0 if not known."""
    source: str = ""

    def __repr__(self) -> str:
        shares = f"memory {self.memory:.0%}, matrix products {self.power * self.matrix:.0%}"
        return f"Efficiency({shares}, {self.kernel_us:g} us a kernel; {self.source or 'not measured'})"


@dataclass(frozen=True, kw_only=True)
class Device:
    """The peaks that the roofline uses, the shares of them that kernels reach, and the source of both."""

    name: str
    description: str
    memory_bandwidth: float
    """Bytes per second."""
    matrix_flops: tuple[tuple[str, float], ...]
    """Dense peak FLOP/s of the matrix units by element type, e.g. ('bf16', 989e12)."""
    vector_flops: float
    launch_overhead_us: float
    """Time that one more kernel costs in a row of kernels: its own least time and the gap to the next."""
    core_count: int = 0
    """Multiprocessors, which XLA calls cores; 0 if not known."""
    link_bandwidth: float = 0.0
    """Bytes per second that one GPU can send to the others of its host while it receives as many; 0 if not known."""
    clock_hz: float = 0.0
    """The highest clock of the multiprocessors; 0 if not known."""
    efficiency: Efficiency = Efficiency()
    source: str

    def __repr__(self) -> str:
        peaks = ", ".join(self.matrix_peaks[:3]) or "no matrix units"
        return f"Device({self.name!r}, {self.memory_bandwidth / 1e12:.2f} TB/s, {peaks})"

    @property
    def is_cpu(self) -> bool:
        """Whether XLA:CPU made the program: its peaks are round figures, and no remedy for GPUs applies to it."""
        return self.name == "cpu"

    @property
    def memory_name(self) -> str:
        """Returns what a report calls the memory that launches read and write."""
        return "memory" if self.is_cpu or "RTX" in self.description else "HBM"

    @property
    def matrix_peaks(self) -> tuple[str, ...]:
        """Returns the peaks as text; that of float32 is the rate of TF32, to which matrix units round its operands."""
        names = {"f32": "f32 as TF32"}
        return tuple(f"{names.get(name, name)} {peak / 1e12:.0f} TFLOP/s" for name, peak in self.matrix_flops)

    @property
    def gap_us(self) -> float:
        """Returns the estimated idle time between one kernel and the next."""
        return max(0.0, self.launch_overhead_us - self.efficiency.kernel_us)


@dataclass(frozen=True, kw_only=True)
class Provenance:
    """How the capture was made, in enough detail to make it again."""

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
    lower_seconds: float = 0.0
    """Time to trace the program and lower it to StableHLO."""
    compile_seconds: float = 0.0
    """Time of XLA's compilation, including writing all its dumps."""
    notes: tuple[str, ...] = ()
    """Limits of this capture, in sentences."""

    def __repr__(self) -> str:
        versions = dict(self.versions)
        jax = f", jax {versions['jax']}" if "jax" in versions else ""
        options = f", {len(self.compiler_options)} options" if self.compiler_options else ""
        return f"Provenance({self.function!r}, {self.mode}, {self.target}, GEMM {self.gemm_choice}{jax}{options})"


@dataclass(frozen=True, kw_only=True)
class Analysis:
    """An explanation of what the compiler did with one program."""

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
    """Times of the program on a GPU; None if it did not run."""
    hotspots: tuple[Hotspot, ...] = ()
    """Where the time goes: every launch and missed fusion by cause, those furthest above their need first."""
    ptx: tuple[str, ...] = ()
    """PTX of the kernels, each once though many launches run it."""
    source_lines: tuple[tuple[str, str], ...] = ()
    """'file.py:line' of launches with the line's text, where the file was at hand."""

    def __repr__(self) -> str:
        return (
            f"Analysis({self.label!r} on {self.provenance.target}: {self.launch_count} launches, "
            f"{self.traffic.bytes:,} bytes of {self.device.memory_name} traffic, roofline {self.roofline_us:.1f} us, "
            f"{len(self.decisions)} decisions, {len(self.missed)} missed fusions)"
        )

    def with_notes(self, *notes: str) -> Analysis:
        """Returns the analysis with more notes on its limits."""
        made = self.provenance
        return replace(self, provenance=replace(made, notes=(*made.notes, *notes)))

    def _repr_html_(self) -> str:
        """Returns the verdict and a table of one row, which a notebook shows for an Analysis."""
        from hlo_analysis.report.notebook import render_notebook

        return render_notebook(self)

    def to_html(self) -> str:
        """Returns the page of this program alone, one file that needs no network."""
        from hlo_analysis.report.notebook import as_comparison

        return as_comparison(self).to_html()

    def to_markdown(self) -> str:
        """Returns what to do and where the time goes as Markdown, for an issue."""
        from hlo_analysis.report.notebook import as_comparison

        return as_comparison(self).to_markdown()

    @property
    def launch_count(self) -> int:
        """Returns the launches of one run; those in loops count once per iteration."""
        return sum(launch.repeat for launch in self.launches)

    @property
    def roofline_us(self) -> float:
        """Returns the roofline time of one run: the sum over its launches."""
        return sum(launch.roofline_us * launch.repeat for launch in self.launches)

    @property
    def estimated_us(self) -> float:
        """Returns the estimated time of one run: all launches in sequence, and the gaps between those outside loops.

        Of a collective that other launches run beside it counts what they do not hide. Loops run in command buffers,
        where launches that do not wait for each other overlap.
        """
        busy = sum(
            (launch.estimated_us if launch.exposed_us is None else launch.exposed_us) * launch.repeat
            for launch in self.launches
        )
        once = sum(launch.repeat == 1 for launch in self.launches)
        return busy + max(0, once - 1) * self.device.gap_us

    @property
    def exposed_us(self) -> float | None:
        """Returns the estimated time of collectives that no other launch hides; None without collectives."""
        found = [each.exposed_us * each.repeat for each in self.launches if each.exposed_us is not None]
        return sum(found) if found else None

    @property
    def has_opaque_kernels(self) -> bool:
        """Whether any kernel is not XLA's and states no FLOPs."""
        return any(launch.kind in OPAQUE_KINDS and not launch.flops for launch in self.launches)

    @property
    def launches_by_kind(self) -> dict[str, int]:
        """Returns the launches of one run by kind, most frequent first."""
        counts: dict[str, int] = {}
        for launch in self.launches:
            counts[launch.kind] = counts.get(launch.kind, 0) + launch.repeat
        return dict(sorted(counts.items(), key=lambda item: (-item[1], item[0])))
