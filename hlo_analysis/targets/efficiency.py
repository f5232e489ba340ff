"""The shares of a GPU's peaks that kernels reach: the constants of the estimate, each with its fit."""

from __future__ import annotations

from hlo_analysis.records import Efficiency

EFFICIENCY = Efficiency(
    # Median of the memory-bound launches of the fit, without those whose accesses are strided.
    memory=0.83,
    # Threefry on an H100: 28 to 37 of 67 T operations/s.
    vector=0.5,
    # A bf16 product of 8192³ for seconds: 790 of 989 TFLOP/s, because 700 W lower the clock.
    power=0.80,
    # Medians of the products and of the attention kernels of the fit, of what the power limit leaves.
    matrix=0.94,
    attention=0.63,
    # Median of the launches of the fit that move less than 1 MB.
    kernel_us=1.5,
    # One launch of the fit that transposes 2 GB element by element: 5.2 TB/s on 132 SMs at 1.98 GHz.
    cache_bytes_per_clock=20.0,
    # Gradients of embeddings on an H100: 8192 rows of 1024 bf16 into 30522 or 50257 rows, 79 and 81 us.
    atomics_per_clock=0.4,
    # Products with a vocabulary of 50257 (2.2 and 2.9 times as long) and of 30522 (1.0 and 2.4) on an H100.
    unaligned=(0.4, 0.6),
    source="measured on an H200: launches of llama3-8b's block at 2x4096, forward and grad",
)
"""Used for every GPU until others are measured. `scripts/check_estimates.py` computes the medians again."""
