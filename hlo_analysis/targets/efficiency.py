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
    # LSTM's loops of 128 steps on an H100: median of 34 launches of less than 100 kB. Loops of 2 to 4 steps: as others.
    repeated_us=1.2,
    # Triton products of the fit whose blocks wait for their loads, `check_estimates.py --models --fit`.
    load_us=1.1,
    # Medians of public models on an H100, printed by `check_estimates.py --models --fit`:
    # 16 launches that warps fill, 2.0 to 4.3: gradients of softmax, random bits, one-hot products;
    issued_per_clock=3.2,
    # 10 launches with 8 warps a multiprocessor, 6.5 to 9.6: softmax and its gradients in tiles of 16384 elements;
    clocks_per_instruction=7.6,
    # 4 launches that only write zeros, 0.84 to 0.86;
    blocks_per_clock=0.85,
    # 15 launches of more than 1 MB in at most 33 blocks, 15 to 42: sums over columns.
    bytes_per_clock=37.0,
    # Launches of more than 12 us, 5 to 14, median 9.9: a thread loads the next row as it has added the last.
    column_bytes_per_clock=10.0,
    # One launch of the fit that transposes 2 GB element by element: 5.2 TB/s on 132 SMs at 1.98 GHz.
    cache_bytes_per_clock=20.0,
    # Gradients of embeddings on an H100: 8192 rows of 1024 bf16 into 30522 or 50257 rows, 79 and 81 us.
    atomics_per_clock=0.4,
    # Sums of float32 messages of graphs into nodes: 18 and 27 in an e3nn network, 20 in a GraphNetwork.
    atomic_sectors_per_clock=20.0,
    # 8192 rows of 1024 bf16 into one row on an H100: 93 and 108 ms; half of them into each of two rows: 38 ms.
    contended_clocks=85.0,
    # Gradients of logits over 50257 and 30522 words on an H100: 245, 303 and 329 of 742 TFLOP/s.
    slow_loads=0.45,
    # Gradients of float32 weights on an H100: 250 to 284 of 371 TFLOP/s.
    transposed=0.7,
    # S5's products of complex numbers by cuBLAS on an H100: 147 to 242 of 372 TFLOP/s.
    complex=0.52,
    # Of 744 TFLOP/s: ViT's patches 34 and ResNet's stem 34, its filters' gradient 53.
    few_channels=0.055,
    # Mamba 2's convolution of 3328 channels with four taps on an H100: 969 us for 0.22 GFLOP.
    direct_flops_per_clock=0.86,
    source="measured on an H200: launches of llama3-8b's block at 2x4096, forward and grad",
)
"""Used for every GPU until others are measured. `scripts/check_estimates.py` computes the medians again."""
