"""A row of the launch table: a kernel, what it reads and what it writes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

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

OccupancyLimiter = Literal["registers", "shared memory", "threads", "blocks"]

Phase = Literal["forward", "backward"]
"""Backward is everything whose op name holds JAX's `transpose(`; recomputation under it counts as backward."""


@dataclass(frozen=True, kw_only=True)
class Value:
    """A buffer that a launch reads or writes.

    `producer` is the index of the launch that wrote it, or None for an argument or constant of the program.
    """

    name: str
    shape: str
    bytes: int
    producer: int | None = None

    def __repr__(self) -> str:
        source = "" if self.producer is None else f" of #{self.producer}"
        return f"Value({self.name!r}{source}, {self.shape}, {self.bytes:,} bytes)"


@dataclass(frozen=True, kw_only=True)
class Launch:
    """One kernel (or copy, or library call) that the program launches: a row of the launch table."""

    index: int
    """Position in this analysis, in launch order, from 0."""
    thunk_id: int
    name: str
    """The HLO instruction."""
    kernel: str | None = None
    """The name under which a profile shows it, which equal fusions share. None where a library picks the kernel as it
    runs (cuBLAS, cuDNN, NCCL), for copies, and without a thunk list."""
    kind: LaunchKind
    computation: str
    """The HLO computation in whose order it runs: the entry, or the body of a loop or branch."""
    repeat: int = 1
    """How often one run of the program launches it: the product of the known trip counts of enclosing loops."""
    grid: tuple[int, int, int] | None = None
    block: tuple[int, int, int] | None = None
    shared_memory_bytes: int | None = None
    """Of a block, static and dynamic."""
    scope: str = ""
    """The model's named scopes, joined by '/', without jit(), jvp() and transpose(); '' where unknown."""
    phase: Phase = "forward"
    scopes: tuple[tuple[str, Phase], ...] = ()
    """Scope and phase of every instruction that it computes, its own among them."""
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
    host_bytes: int = 0
    """Counted: what it reads or writes in the host's memory (offloading), beside the bytes above."""
    link_bytes: int = 0
    """Counted: what a collective sends to other GPUs, of one GPU; it receives as much."""
    axes: tuple[tuple[str, int], ...] = ()
    """The mesh axes that a collective acts over, each with its number of GPUs; () where the HLO does not say."""
    exposed_us: float | None = None
    """Estimated: how long the program waits for a collective, and for those before it on the link, beyond the launches
    between its start and that wait; None for other launches. `estimated_us` is its whole time."""
    roofline_us: float = 0.0
    """Estimated: max(bytes / bandwidth, FLOPs / peak, link bytes / link rate) + launch overhead, for one launch, on the
    target."""
    limiter: Literal["memory", "compute", "link", "overhead"] = "memory"
    estimated_us: float = 0.0
    """Estimated: GPU time of one launch, by what kernels reach of the target's peaks. The gap to the next is not in it;
    see `Analysis.estimated_us`."""
    longest_us: float | None = None
    """Estimated: the same if the data is the worst, such as a scatter whose rows are all added into one. None where the
    data does not matter."""
    xla_estimate_us: float | None = None
    xla_estimate_model: str | None = None
    measured_us: float | None = None
    """Measured: the median GPU time of one launch, all kernels of a library call together. See `Analysis.measured`."""
    registers: int | None = None
    """Of a thread, as ptxas gives them."""
    spill_bytes: int | None = None
    """Bytes of registers that a thread stores to memory and loads again, for want of registers."""
    instructions: int | None = None
    """Of the kernel's PTX, each once: a thread executes as many where nothing loops."""
    occupancy: float | None = None
    """Counted: the share of a multiprocessor's warps that blocks of this kernel can fill, from 0 to 1."""
    occupancy_limiter: OccupancyLimiter | None = None
    """What keeps the occupancy below 1."""
    hlo: str = ""
    """The instruction's text, and its fused computation's."""
    ptx: int | None = None
    """Position of the kernel's source in `Analysis.ptx`; None for copies, library calls, and where it was not kept."""

    @property
    def producers(self) -> tuple[int, ...]:
        """Returns the launches that write its inputs, in the order of the inputs."""
        return tuple(dict.fromkeys(value.producer for value in self.inputs if value.producer is not None))

    @property
    def bytes_moved(self) -> int:
        """Returns the HBM traffic of one launch."""
        return self.bytes_read + self.bytes_written

    @property
    def run_us(self) -> float:
        """The time of all its launches in one run of the program: measured where known, else estimated."""
        return (self.estimated_us if self.measured_us is None else self.measured_us) * self.repeat

    @property
    def group(self) -> str:
        """The name under which views group it: its scope, else its source line, else ''."""
        return self.scope or self.source or ""

    def __repr__(self) -> str:
        where = self.group or "no scope"
        times = f", {self.repeat} times" if self.repeat > 1 else ""
        return (
            f"Launch(#{self.index} {self.name!r}, {self.kind}, {where}{times}: {self.bytes_read:,} bytes read, "
            f"{self.bytes_written:,} written, {self.flops:,} FLOPs, roofline {self.roofline_us:.1f} us)"
        )
