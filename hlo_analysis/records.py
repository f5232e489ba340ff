"""The records that an analysis is made of, and their JSON form.

Every view (terminal, HTML, JSON, notebook) is made from these records and from nothing else. They are frozen
dataclasses; `to_json` and `from_json` round-trip them, and `hlo_analysis.schema` keeps their JSON schema.

Three words are kept apart everywhere. *Counted* is read off the compiled program (launches, bytes, FLOPs).
*Estimated* comes from a model: our roofline (`roofline_us`) or XLA's own cost model (`xla_estimate_us`, `gain_us`).
*Measured* means that a GPU ran it (`measured_us`). Bytes are bytes, times are microseconds.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

SCHEMA_VERSION = 1

LaunchKind = Literal[
    "loop",
    "reduction",
    "transpose",
    "concatenate",
    "scatter",
    "sort",
    "triton",
    "triton_gemm",
    "cublas",
    "cublaslt",
    "cudnn",
    "mosaic",
    "jax_triton",
    "copy",
    "memset",
    "collective",
    "custom_call",
    "other",
]
"""What makes the launch: an XLA emitter (loop, reduction, ...), a code generator, a library, or a custom kernel."""

OPAQUE_KINDS: tuple[LaunchKind, ...] = ("mosaic", "jax_triton", "custom_call")
"""Kernels that show their operands and results alone."""

Phase = Literal["forward", "backward"]
"""Backward is everything whose op name holds JAX's `transpose(`; recomputation under it counts as backward."""

Verdict = Literal["fused", "rejected", "ineligible", "unrecorded"]
"""fused: one launch holds both ends. rejected: XLA's cost model said no. ineligible: a rule forbade it.
unrecorded: two launches, and no pass left a word about the edge."""

GemmChoice = Literal["attached", "replayed", "default", "none"]
"""Where matrix-product kernels came from: autotuned on a GPU, a recorded autotuning, XLA's default, or no choice."""


@dataclass(frozen=True, kw_only=True)
class Value:
    """A buffer that a launch reads or writes.

    `producer` is the index of the launch that wrote it, or None for an argument or constant of the program.
    """

    name: str
    shape: str
    bytes: int
    producer: int | None = None


@dataclass(frozen=True, kw_only=True)
class Launch:
    """One kernel (or copy, or library call) that the program launches: a row of the launch table."""

    index: int
    """Position in this analysis, in launch order, from 0."""
    thunk_id: int
    name: str
    """The HLO instruction."""
    kind: LaunchKind
    computation: str
    """The HLO computation in whose order it runs: the entry, or the body of a loop or branch."""
    repeat: int = 1
    """How often one run of the program launches it: the product of the known trip counts of enclosing loops."""
    grid: tuple[int, int, int] | None = None
    block: tuple[int, int, int] | None = None
    shared_memory_bytes: int | None = None
    scope: str = ""
    """The model's named scopes, joined by '/', without jit(), jvp() and transpose(); '' where unknown."""
    phase: Phase = "forward"
    source: str | None = None
    """'file.py:line' of the innermost user frame."""
    op_name: str = ""
    opcodes: tuple[tuple[str, int], ...] = ()
    """HLO opcodes inside, with counts, most frequent first; parameters, constants and bitcasts left out."""
    inputs: tuple[Value, ...] = ()
    outputs: tuple[Value, ...] = ()
    bytes_read: int = 0
    """Counted, for one launch: each input once, only the part that is read where slices make that knowable."""
    bytes_written: int = 0
    flops: int = 0
    unfused_bytes: int = 0
    """Counted: what the same instructions would read and write if each were a launch of its own."""
    roofline_us: float = 0.0
    """Estimated: max(bytes / bandwidth, FLOPs / peak) + launch overhead, for one launch, on the target."""
    limiter: Literal["memory", "compute", "overhead"] = "memory"
    xla_estimate_us: float | None = None
    xla_estimate_model: str | None = None
    measured_us: float | None = None
    registers: int | None = None
    spill_bytes: int | None = None
    hlo: str = ""
    """The instruction's text, and its fused computation's."""


@dataclass(frozen=True, kw_only=True)
class Decision:
    """One producer-consumer edge: fused or not, and the reason that the compiler recorded."""

    producer: str
    consumer: str
    """Names in the final module where both still exist, otherwise names at the time of the decision."""
    verdict: Verdict
    reason: str
    """The compiler's own words, or ours in brackets where it left none."""
    category: str
    """A short group, e.g. 'cost model: fusing is slower', 'library call', 'multiple consumers'."""
    pass_name: str
    gain_us: float | None = None
    """Estimated by XLA: time unfused less time fused, as the pass saw it at its last look; negative: it would lose."""
    producer_launch: int | None = None
    consumer_launch: int | None = None
    bytes: int = 0
    """Size of the value on the edge."""
    shape: str = ""
    scope: str = ""


@dataclass(frozen=True, kw_only=True)
class Intermediate:
    """A value that one launch writes to HBM for another to read."""

    name: str
    shape: str
    bytes: int
    producer: int
    consumers: tuple[int, ...]
    bytes_moved: int
    """Written once, read once per consumer (times `repeat`)."""


@dataclass(frozen=True, kw_only=True)
class MissedFusion:
    """An intermediate that need not reach HBM, ranked by what it costs."""

    rank: int
    value: str
    shape: str
    producer: int
    consumers: tuple[int, ...]
    bytes_at_stake: int
    time_at_stake_us: float
    """Estimated: how much less the launches on both ends would wait for memory (one that arithmetic bounds waits for
    none of it), and the launch overhead that would go."""
    share: float
    """Bytes at stake as a share of the traffic of the launches on both ends: the fusion test."""
    reason: str
    category: str
    remedy_kind: Literal["option", "rewrite", "kernel"]
    remedy: str
    scope: str = ""


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


@dataclass(frozen=True, kw_only=True)
class Numerics:
    """Largest error against a float64 reference, beside the baseline's in the same dtype, at a small size."""

    shape: str
    dtype: str
    error: float
    baseline_error: float
    passed: bool
    """error <= 2 * baseline_error + one ulp."""
    note: str = ""
    """What was run to find this out, in a sentence."""


@dataclass(frozen=True, kw_only=True)
class StrategyResult:
    """One strategy's analysis, or the error that kept it from one."""

    name: str
    description: str
    analysis: Analysis | None
    error: str | None = None
    numerics: Numerics | None = None
    measured_us: float | None = None


@dataclass(frozen=True, kw_only=True)
class ScopeCell:
    """What one strategy launches for one scope and phase."""

    strategy: str
    launches: tuple[int, ...]
    bytes: int
    roofline_us: float
    fused_into: tuple[int, ...] = ()
    """Launches counted under another scope that hold instructions of this one: their bytes are not in this cell."""


@dataclass(frozen=True, kw_only=True)
class ScopeRow:
    """One scope of the model across strategies."""

    scope: str
    phase: Phase
    cells: tuple[ScopeCell, ...]


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Strategies on one program, aligned by the model's named scopes."""

    schema_version: int = SCHEMA_VERSION
    title: str
    baseline: str
    strategies: tuple[StrategyResult, ...]
    rows: tuple[ScopeRow, ...] = field(default=())

    def __getitem__(self, name: str) -> StrategyResult:
        for strategy in self.strategies:
            if strategy.name == name:
                return strategy
        raise KeyError(f"no strategy {name!r} in this comparison; it has {[s.name for s in self.strategies]}")
