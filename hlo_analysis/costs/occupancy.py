"""Occupancy: the share of a multiprocessor's warps that the blocks of one kernel can fill, and what limits it.

The rules and constants are those of NVIDIA's `cuda_occupancy.h` (CUDA 13.0) for compute capability 8.0 and later.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from hlo_analysis.records.launches import OccupancyLimiter
from hlo_analysis.targets.textproto import parse_textproto

_REGISTER_UNIT = 256
"""Registers are given to a warp in multiples of this (cudaOccRegAllocationGranularity)."""
_SHARED_UNIT = 128
"""Shared memory is given to a block in multiples of so many bytes (cudaOccSMemAllocationGranularity)."""
_RESERVED_SHARED = 1024
"""Bytes of shared memory that the driver keeps in each block (CUDA programming guide, compute capability 8.0 on)."""
_PARTITIONS = 4
"""Parts of a multiprocessor that have registers of their own (cudaOccSubPartitionsPerMultiprocessor)."""
_BLOCKS = {
    (8, 0): 32,
    (8, 6): 16,
    (8, 7): 16,
    (8, 9): 24,
    (9, 0): 32,
    (10, 0): 32,
    (10, 3): 32,
    (12, 0): 24,
    (12, 1): 24,
}
"""Most blocks of a multiprocessor, by compute capability (cudaOccMaxBlocksPerMultiprocessor)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MultiprocessorLimits:
    """What one multiprocessor has for its blocks."""

    registers: int
    shared_memory_bytes: int
    threads: int
    blocks: int
    warp_size: int = 32


def multiprocessor_limits(config_text: str | None) -> MultiprocessorLimits | None:
    """The limits of the GPU that a target config (GpuTargetConfigProto in text form) describes.

    Returns None where there is no config, for GPUs before Ampere, and for those that this table does not know.
    """
    info = parse_textproto(config_text or "").message("gpu_device_info")
    capability = info.message("cuda_compute_capability")
    blocks = _BLOCKS.get((int(capability.scalar("major", "0")), int(capability.scalar("minor", "0"))))
    registers, shared, threads, warp = (
        int(info.scalar(name, "0"))
        for name in ("registers_per_core_limit", "shared_memory_per_core", "threads_per_core_limit", "threads_per_warp")
    )
    if blocks is None or not (registers and shared and threads and warp):
        return None
    return MultiprocessorLimits(
        registers=registers, shared_memory_bytes=shared, threads=threads, blocks=blocks, warp_size=warp
    )


def occupancy(
    limits: MultiprocessorLimits, *, block: tuple[int, int, int], registers: int, shared_memory_bytes: int
) -> tuple[float, OccupancyLimiter | None]:
    """The share of a multiprocessor's warps that run at once, and what keeps it below 1 (None at 1).

    Where several limits are equal, that of threads or blocks is given: fewer registers would not help.

    Args:
        limits: of the GPU.
        block: threads of a block, in x, y, z.
        registers: of a thread.
        shared_memory_bytes: of a block, static and dynamic.
    """
    warps = -(-prod(block) // limits.warp_size)
    most = limits.threads // limits.warp_size
    warp_registers = _round_up(registers * limits.warp_size, _REGISTER_UNIT)
    shared = _round_up(shared_memory_bytes + _RESERVED_SHARED, _SHARED_UNIT)
    fitting: dict[OccupancyLimiter, int] = {
        "threads": most // warps,
        "blocks": limits.blocks,
        "registers": limits.registers // _PARTITIONS // max(warp_registers, 1) * _PARTITIONS // warps,
        "shared memory": limits.shared_memory_bytes // shared,
    }
    limiter = min(fitting, key=lambda name: fitting[name])
    share = fitting[limiter] * warps / most
    return share, limiter if share < 1 else None


def _round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit
