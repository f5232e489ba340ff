"""Launch configurations of the low-rank corrected linear layer: which one a call takes, and when it is preferred."""

from __future__ import annotations

from dataclasses import dataclass

from pallas_kernels.primitives.gemm.config import GemmConfig, ProductCost, choose_config

DEPTH = 64
"""If XLA computes x @ a, ranks are padded with zeros to a multiple of this, the depth of a step of the main loop."""
MOST_RANK_OF_ONE_LAUNCH = 64
"""The columns of the buffers through which x @ a is stored."""
_ONE_LAUNCH_ROWS = 512
"""With fewer rows nothing has been measured."""
_MANY_ROWS = 2048
_GRADIENT_GAIN_US = 2.5
"""How much less the backward pass takes than XLA's, which rounds more: 2.5 µs for 118 rows, 64 features and 7680
outputs, 2.7 for 64, 128 and 16320, 4.0 for 488, 128 and 960 (H200)."""


@dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """The configuration of a call.

    product: the configuration of x @ w; two warpgroups share the rows of a tile. Only the single launch supports tiles
        of several widths.
    is_one_launch: whether a few blocks of the launch compute x @ a for all; otherwise XLA computes it before.
    """

    product: GemmConfig
    is_one_launch: bool = False


def default_config(rows: int, outputs: int, rank: int) -> LoraConfig:
    """Returns the untuned configuration for a (rows, outputs) result."""
    is_one_launch = rank <= MOST_RANK_OF_ONE_LAUNCH and _ONE_LAUNCH_ROWS <= rows < _MANY_ROWS
    return LoraConfig(
        product=choose_config(rows, outputs, is_mixed=is_one_launch),
        is_one_launch=is_one_launch,
    )


def is_preferred(rows: int, outputs: int, features: int, rank: int, *, is_differentiated: bool = False) -> bool:
    """Whether the kernel is estimated to be faster than XLA, forward or where a gradient is taken.

    On an H200 8192 rows take 0.86 of XLA's time (4096 features and outputs, rank 16). 512 rows take 0.73 and 0.71 (4096
    and 14336 outputs), 9 and 33 µs less. 64 rows, 128 features and 16320 outputs take 10.5 µs, by XLA 13.9; 118 of 64
    and 7680 12.0 and 8.7; 488 of 128 and 960 9.6 and 8.6.
    """
    config = default_config(rows, outputs, rank)
    product = 2 * rows * outputs
    cost = ProductCost(
        rows=rows,
        outputs=outputs,
        features=features + -(-rank // DEPTH) * DEPTH,
        written_bytes=product,
        # One clears semaphores or computes x @ a, two pad the ranks.
        launches=2 if config.is_one_launch or rank % DEPTH == 0 else 4,
        # x @ a, its product with b, and a pass that adds two products.
        passes=3,
        pass_bytes=2 * rows * features + 4 * product,
    )
    ours, xla = cost.estimate(config.product)
    return ours < xla + _GRADIENT_GAIN_US * is_differentiated
