"""Estimates how long one launch takes, at the rates that kernels reach rather than the peaks, and what it needs.

The estimate is the longest of these times, plus the least time of a kernel:

- memory: HBM traffic at the share of the bandwidth that kernels reach, and no faster than the multiprocessors that have
  a block can read and write;
- instructions: those of the kernel's PTX. The warps of a multiprocessor issue them at most at one rate, and each warp
  at a rate of its own: a kernel whose registers leave room for few warps is slow, however few bytes it moves;
- blocks: the GPU starts them one after the other;
- vector: element-wise work and reductions, where the PTX is not known or loops;
- atomics: elements of 16 bits that a scatter adds, each by compare-and-swap, in different places: `longest` is the
  time if all are added into the same, and the estimate where the indices are one constant;
- compute: matrix products at the part of the peak that the power limit allows, at the share that products or attention
  kernels reach, and no faster than their blocks fill the multiprocessors (a last wave of few blocks leaves some idle);
- sectors: elements of 32 bits that a scatter adds, which the L2 cache does a sector at once; if all are added into the
  same place, a line of a warp's at once (`longest`);
- steps: a Triton product's waits for its loads (`pipeline.py`);
- convolutions: cuDNN's kernel for filters of one channel (depthwise), its padding of filters of a few, and tiles of
  fewer than 128 channels or too few of them;
- link: bytes that a collective sends to other GPUs, at the full rate of the links, which nobody has measured here;
- cache: strided reads, which take a sector of 32 bytes from the L2 cache for each element (`coalescing.py`).

A Triton product that loads its operands a few bytes at a time takes longer for its memory and compute, one of float32
operands that are not contiguous along the sum for its compute.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from hlo_analysis.costs.flops import Flops
from hlo_analysis.costs.pipeline import Steps, steps_us
from hlo_analysis.costs.roofline import bound
from hlo_analysis.costs.slow_work import AtomicUpdates, CacheUpdates
from hlo_analysis.records import Device, LaunchKind

_WARP = 32
_THREADS = 2048
"""Threads of a multiprocessor (compute capabilities 8.0, 9.0 and 10.0)."""
_MANY = 32
"""Steps of a loop after which its data counts as cached: known are 4, where it is not, and 128."""
_REQUESTS_PER_CLOCK = 0.95
"""Lines in one place in which the L2 cache adds in a clock: tests/programs/kmeans.py on an H200 adds 65536 numbers in
34 us, and 65536 rows of two lines in 75. That most fall into few of its 512 rows is assumed."""
_CHANNELS = 8
"""Channels that the matrix units take at once: cuDNN pads fewer, and computes a filter of one without them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What one launch does.

    kind: what made the launch. repeat: how often one run of the program runs it.
    bytes_moved: HBM traffic.
    flops: FLOPs of the launch.
    grid, block: blocks of the kernel and threads of a block; () where not known.
    instructions: those of the kernel's PTX, each once; None where not known.
    resident_warps: of all blocks that a multiprocessor has room for; None where not known.
    atomic_updates: what it adds by compare-and-swap. cache_updates: what the L2 cache adds.
    steps: how a Triton product walks along its sum; None for other launches.
    sums_columns: whether XLA's own kernel sums over columns.
    loads_slowly: whether it is a product whose threads load its operands a few bytes at a time.
    unaligned: whether it is a product that writes rows, or a library's that reads rows, at no multiple of 16 bytes.
    transposed: whether it is a product of float32 operands that the matrix units cannot read as they lie.
    filter_channels: input channels of a convolution's filters; 0 for other launches.
    filled: the share of a convolution's tiles that have something to compute.
    attention: whether it is a fused attention kernel.
    cache_bytes: bytes that strided reads take from the L2 cache, in whole sectors; 0 without such reads.
    link_bytes: bytes sent to other GPUs.
    """

    kind: LaunchKind
    repeat: int = 1
    bytes_moved: int = 0
    flops: Flops = field(default_factory=Flops)
    grid: tuple[int, ...] = ()
    block: tuple[int, ...] = ()
    instructions: int | None = None
    resident_warps: float | None = None
    atomic_updates: AtomicUpdates | None = None
    cache_updates: CacheUpdates = field(default_factory=CacheUpdates)
    steps: Steps | None = None
    sums_columns: bool = False
    loads_slowly: bool = False
    unaligned: bool = False
    transposed: bool = False
    filter_channels: int = 0
    filled: float = 1.0
    attention: bool = False
    cache_bytes: int = 0
    link_bytes: int = 0


def estimate(work: Work, device: Device) -> float:
    """Estimates the GPU time of one launch in µs."""
    reached = device.efficiency
    limit = bound(work.bytes_moved, Flops(vector=work.flops.vector), device, work.link_bytes)
    memory, vector = limit.memory_us / reached.memory, limit.compute_us / reached.vector
    matrix = bound(0, Flops(matrix=work.flops.matrix), device).compute_us
    matrix /= reached.power * (reached.attention if work.attention else reached.matrix) * _filled(work, device)
    if any(kind in ("c64", "c128") for kind, _ in work.flops.matrix):
        matrix /= reached.complex
    if work.transposed:
        matrix /= reached.transposed
    matrix /= reached.few_channels if 1 < work.filter_channels < _CHANNELS else work.filled
    if work.loads_slowly:
        memory, matrix = memory / reached.slow_loads, matrix / reached.slow_loads
    elif work.unaligned:
        memory /= reached.slow_loads
    waiting = steps_us(work.steps, math.prod(work.grid), device) if work.steps and work.grid else 0.0
    least = reached.repeated_us if work.repeat >= _MANY else reached.kernel_us
    return max(memory, vector, matrix, limit.link_us, waiting, _clocked_us(work, device)) + least


def needed_us(bytes_moved: int, flops: Flops, device: Device, *, attention: bool = False, link_bytes: int = 0) -> float:
    """Estimates the GPU time in µs of the best kernel that moves these bytes and computes this product.

    Element-wise work takes as long as it takes at the peak: a kernel can do it while it waits for memory. attention:
    whether it is a fused attention kernel. link_bytes: bytes sent to other GPUs.
    """
    reached, limit = device.efficiency, bound(bytes_moved, Flops(vector=flops.vector), device, link_bytes)
    matrix = bound(0, Flops(matrix=flops.matrix), device).compute_us
    matrix /= reached.power * (reached.attention if attention else reached.matrix)
    return max(limit.memory_us / reached.memory, matrix, limit.compute_us, limit.link_us) + reached.kernel_us


def longest(work: Work, device: Device) -> float | None:
    """Estimates the GPU time in µs of a scatter whose updates are all added into the same place, where data may say so.

    None for other launches, and for scatters that the program itself sends to one place: that is their estimate.
    """
    updates, clocks = work.atomic_updates, 0.0
    if updates is not None and not updates.places:
        clocks = _contended_clocks(updates, device)
    elif updates is None and device.efficiency.atomic_sectors_per_clock:
        clocks = work.cache_updates.requests / _REQUESTS_PER_CLOCK
    return max(estimate(work, device), clocks / device.clock_hz * 1e6) if clocks and device.clock_hz else None


def _contended_clocks(updates: AtomicUpdates, device: Device) -> float:
    """Returns the clocks of updates that are all added into one place.

    A thread compares and swaps again after each other thread that has come between, and all threads that run at once
    try the same.
    """
    rivals = min(updates.elements, device.core_count * _THREADS) / updates.width
    return updates.elements / updates.width * rivals * device.efficiency.contended_clocks


def _clocked_us(work: Work, device: Device) -> float:
    """Returns the longest of the times that follow from the clock of the multiprocessors."""
    reached, cores = device.efficiency, device.core_count
    blocks = math.prod(work.grid) if work.grid else 0
    busy, updates = min(blocks or cores, cores), work.atomic_updates
    amounts: list[tuple[float, float]] = [
        (work.cache_bytes, reached.cache_bytes_per_clock * cores),
        (updates.elements if updates else 0, reached.atomics_per_clock * cores),
        (work.cache_updates.sectors, reached.atomic_sectors_per_clock),
        (_contended_clocks(updates, device) if updates and updates.places == 1 else 0, 1.0),
        (work.flops.total if work.filter_channels == 1 else 0, reached.direct_flops_per_clock * cores),
        (work.bytes_moved, reached.bytes_per_clock * busy),
        (work.bytes_moved if work.sums_columns else 0, reached.column_bytes_per_clock * cores),
        (blocks, reached.blocks_per_clock),
    ]
    clocks = max((amount / rate for amount, rate in amounts if rate), default=0.0)
    us = clocks / device.clock_hz * 1e6 if device.clock_hz else 0.0
    if work.instructions and blocks and work.block and reached.issued_per_clock:
        warps = math.ceil(math.prod(work.block) / _WARP) * math.ceil(blocks / cores)
        resident = min(warps, work.resident_warps or math.inf)
        rate = min(reached.issued_per_clock, resident / reached.clocks_per_instruction)
        # A kernel's least time covers its first instructions.
        us = max(us, work.instructions * warps / rate / device.clock_hz * 1e6 - reached.kernel_us)
    return us


def _filled(work: Work, device: Device) -> float:
    """Returns the share of the multiprocessors that are busy, over all waves with one block on each."""
    blocks = math.prod(work.grid) if work.grid else 0
    if not blocks or not device.core_count:
        return 1.0
    return blocks / (device.core_count * math.ceil(blocks / device.core_count))
