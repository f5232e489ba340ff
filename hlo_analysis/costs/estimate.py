"""Estimates how long one launch takes, at the rates that kernels reach rather than the peaks.

The estimate is the longest of these times, plus the least time of a kernel:

- memory: HBM traffic at the share of the bandwidth that kernels reach;
- vector: element-wise work and reductions, at the share of the peak that operations other than multiply-add reach, with
  the index arithmetic of each element that a reduction reads;
- atomics: elements of 16 bits that a scatter adds, each by compare-and-swap;
- compute: matrix products at the part of the peak that the power limit allows, at the share that products or attention
  kernels reach, less in a Triton product whose rows start where no thread can load 16 bytes at once, and no faster than
  their blocks fill the multiprocessors (a last wave of few blocks leaves some idle);
- link: bytes that a collective sends to other GPUs, at the full rate of the links, which nobody has measured here;
- cache: strided reads, which take a sector of 32 bytes from the L2 cache for each element (`coalescing.py`);
- for Triton fusions other than products, XLA's own estimate, which knows their tiles.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from hlo_analysis.costs.coalescing import SECTOR_BYTES
from hlo_analysis.costs.flops import Flops
from hlo_analysis.costs.roofline import bound
from hlo_analysis.costs.slow_work import ALIGNED_BYTES
from hlo_analysis.records import Device, LaunchKind

INDEX_OPERATIONS = 8
"""For each element that a reduction reads. One-hot products that XLA reduces element by element take 7 to 14: gemma's
row of 262144 619 us, bert's of 30522 126 us (launches of public models on an H100)."""


def estimate(
    bytes_moved: int,
    flops: Flops,
    device: Device,
    *,
    kind: LaunchKind,
    reduced: int = 0,
    atomic_updates: int = 0,
    row_alignment: int = ALIGNED_BYTES,
    attention: bool = False,
    grid: Sequence[int] | None = None,
    cache_bytes: int = 0,
    link_bytes: int = 0,
    xla_us: float | None = None,
) -> float:
    """Estimates the GPU time of one launch in µs.

    Args:
      bytes_moved: HBM traffic.
      flops: FLOPs of the launch.
      device: peaks, and the shares of them that kernels reach.
      kind: what made the launch.
      reduced: elements that its reductions read.
      atomic_updates: elements that it adds by compare-and-swap, in different places: where many are added into the
        same place, the time depends on the data, and is longer.
      row_alignment: bytes that the starts of rows of a product's operands are multiples of.
      attention: whether the launch is a fused attention kernel.
      grid: the kernel's blocks, where known.
      cache_bytes: bytes that strided reads take from the L2 cache, in whole sectors; 0 without such reads.
      link_bytes: bytes sent to other GPUs.
      xla_us: XLA's own estimate.
    """
    reached = device.efficiency
    memory = bound(bytes_moved, Flops(), device).memory_us / reached.memory
    vector = bound(0, Flops(vector=flops.vector + INDEX_OPERATIONS * reduced), device).compute_us / reached.vector
    matrix = bound(0, Flops(matrix=flops.matrix), device).compute_us
    matrix /= reached.power * (reached.attention if attention else reached.matrix) * _filled(grid, device)
    if kind == "triton_gemm" and row_alignment < ALIGNED_BYTES:
        matrix /= reached.unaligned[0] if row_alignment < 4 else reached.unaligned[1]
    times = [memory, vector, matrix, bound(0, Flops(), device, link_bytes).link_us]
    clocks = device.core_count * device.clock_hz / 1e6
    for work, rate in ((cache_bytes, reached.cache_bytes_per_clock), (atomic_updates, reached.atomics_per_clock)):
        if rate * clocks:
            times.append(work / (rate * clocks))
    own = max(times) + reached.kernel_us
    if kind == "triton" and xla_us is not None:
        # Wherever its tiles lie, a byte costs one sector at most.
        return max(own, min(xla_us, memory * SECTOR_BYTES))
    return own


def _filled(grid: Sequence[int] | None, device: Device) -> float:
    """Returns the share of the multiprocessors that are busy, over all waves with one block on each."""
    blocks = math.prod(grid) if grid else 0
    if not blocks or not device.core_count:
        return 1.0
    return blocks / (device.core_count * math.ceil(blocks / device.core_count))
