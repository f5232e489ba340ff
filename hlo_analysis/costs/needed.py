"""Estimates what a launch needs: its HBM traffic and its matrix products, at the rates that the best kernels reach."""

from __future__ import annotations

from hlo_analysis.costs.flops import Flops
from hlo_analysis.costs.roofline import bound
from hlo_analysis.records import Device


def needed_us(bytes_moved: int, flops: Flops, device: Device, *, attention: bool = False, link_bytes: int = 0) -> float:
    """Estimates the GPU time in µs of the best kernel that moves these bytes and computes this product.

    Element-wise work takes as long as it takes at the peak: a kernel can do it while it waits for memory. attention:
    whether it is a fused attention kernel. link_bytes: bytes sent to other GPUs.
    """
    reached = device.efficiency
    memory = bound(bytes_moved, Flops(), device).memory_us / reached.memory
    matrix = bound(0, Flops(matrix=flops.matrix), device).compute_us
    matrix /= reached.power * (reached.attention if attention else reached.matrix)
    vector = bound(0, Flops(vector=flops.vector), device).compute_us
    return max(memory, matrix, vector, bound(0, Flops(), device, link_bytes).link_us) + reached.kernel_us
