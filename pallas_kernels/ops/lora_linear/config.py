"""Launch configurations of the low-rank corrected linear layer: which one a call takes, and when it is preferred."""

from __future__ import annotations

from dataclasses import dataclass

from pallas_kernels.primitives.gemm.config import GemmConfig, choose_config

DEPTH = 64
"""If XLA computes x @ a, ranks are padded with zeros to a multiple of this, the depth of a step of the main loop."""
MOST_RANK_OF_ONE_LAUNCH = 64
"""The columns of the buffers through which x @ a is stored."""
_ONE_LAUNCH_ROWS = 512
"""With fewer rows nothing has been measured."""
_MANY_ROWS = 2048
_FEWEST_MEASURED = 4096
"""The fewest features and outputs that were measured with few rows."""


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


def is_preferred(rows: int, outputs: int, features: int, rank: int) -> bool:
    """Whether the kernel was measured to be faster than XLA, and so is preferred.

    On an H200 8192 rows take 0.86 of XLA's time (4096 features and outputs, rank 16). 512 rows take 0.73 and 0.71 (4096
    and 14336 outputs), 9 and 33 µs less. The backward pass loses some of that, since it computes x @ a again.
    """
    is_large = min(outputs, features) >= _FEWEST_MEASURED and rank <= MOST_RANK_OF_ONE_LAUNCH
    return rows >= _MANY_ROWS or (rows >= _ONE_LAUNCH_ROWS and is_large)
