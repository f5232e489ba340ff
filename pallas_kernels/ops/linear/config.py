"""Launch configurations of the linear layer's kernels: what is chosen untuned, and what is worth measuring."""

from __future__ import annotations

from dataclasses import replace

from pallas_kernels.primitives.gemm.choice import choose_config, fills
from pallas_kernels.primitives.gemm.config import GemmConfig

MOST_FEW_ROWS = 16
FEWEST_MANY_ROWS = 512
"""Between them nothing has been measured."""


def default_config(rows: int, outputs: int, features: int, *, keeps_product: bool = False) -> GemmConfig:
    """The untuned choice for a (rows, outputs) result with sums over so many features."""
    config = choose_config(rows, outputs, features)
    # One buffer for each of two results, so that four stages still fit.
    return replace(config, store_slots=1) if keeps_product else config


def is_preferred(rows: int, outputs: int, features: int, *, has_epilogue: bool) -> bool:
    """Whether this layer runs the kernel where the caller leaves the choice: where it was measured to be faster.

    has_epilogue: an activation or residual follows. On an H200, times as fast as XLA: with gelu 1.08 at 8192 rows and
    1.10 at 512, with a residual 1.02 and 1.03; a row or sixteen, 2048 or 4096 features 1.05 to 1.15. Plain products of
    many rows are even with XLA's (0.99 to 1.02), and left to it.
    """
    if rows <= MOST_FEW_ROWS:
        return outputs >= 4096 and 2048 <= features <= 4096
    return has_epilogue and rows >= FEWEST_MANY_ROWS and fills(rows, outputs)


def candidates(rows: int) -> dict[str, GemmConfig]:
    """The configurations worth measuring, by name."""
    if rows <= 64:
        return {
            f"{n} columns, {k} deep": GemmConfig(
                tile_m=64, tile_n=n, tile_k=k, warpgroups=1, stages=16, store_columns=min(n, 64)
            )
            for n, k in ((32, 64), (32, 128), (64, 64), (64, 128), (128, 64))
        }
    return {
        "128x256": GemmConfig(),
        "256x128": GemmConfig(tile_m=256, tile_n=128),
        "128x128": GemmConfig(tile_m=128, tile_n=128, stages=6),
        "128x256 cluster m": GemmConfig(cluster="m"),
        "128x256 cluster n": GemmConfig(cluster="n"),
    }
