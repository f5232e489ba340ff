"""Launch configurations of the gated linear layer's kernels: what is chosen untuned, and what is worth measuring."""

from __future__ import annotations

from dataclasses import replace

from pallas_kernels.primitives.gemm.choice import choose_config, fills
from pallas_kernels.primitives.gemm.config import GemmConfig

FEWEST_ROWS = 512
"""Below, nothing has been measured."""


def default_forward(rows: int, outputs: int, features: int, *, keeps_products: bool = False) -> GemmConfig:
    """The untuned choice of the forward kernel, which has two accumulators."""
    config = choose_config(rows, outputs, features, accumulators=2)
    # One buffer for each of three results, so that three stages still fit.
    return replace(config, store_slots=1) if keeps_products else config


def is_preferred(rows: int, outputs: int) -> bool:
    """Whether this layer runs the kernel where the caller leaves the choice: where it was measured to be faster.

    On an H200, 4096 features and 14336 outputs: 1.05 times as fast as XLA at 8192 rows, 1.10 at 512.
    """
    return rows >= FEWEST_ROWS and fills(rows, outputs, accumulators=2)


def candidates(rows: int) -> dict[str, GemmConfig]:
    """The configurations of the forward kernel worth measuring, by name."""
    if rows <= 64:
        return {
            f"2 x {n} columns, {k} deep": GemmConfig(
                tile_m=64, tile_n=2 * n, tile_k=k, warpgroups=1, stages=16, store_columns=min(n, 64)
            )
            for n, k in ((32, 64), (32, 128), (64, 64), (64, 128))
        }
    return {
        "128x256": GemmConfig(),
        "256x128": GemmConfig(tile_m=256, tile_n=128),
        "128x256 cluster m": GemmConfig(cluster="m"),
        "128x256 cluster n": GemmConfig(cluster="n"),
    }
