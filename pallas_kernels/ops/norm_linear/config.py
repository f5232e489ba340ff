"""When the normalised linear layer prefers its kernels, which have `linear`'s configurations except for few rows."""

from __future__ import annotations

from pallas_kernels import tuning
from pallas_kernels.ops.linear.config import Config, estimate, tuned_config
from pallas_kernels.ops.linear.config import is_preferred as is_linear_preferred
from pallas_kernels.primitives.few_rows.config import MOST_FUSED_NORM_ROWS, MOST_ROWS, choose_few_rows, choose_normed

FEWEST_ROWS = 512
"""The fewest rows for which the norm's backward kernel was measured to outweigh a slower product. With gradients, 640
rows of 896 features and outputs take 29.9 µs, by XLA 34.2; 4096 of 1280 and 1152 107.7 and 143.1 (H200)."""


def is_preferred(rows: int, outputs: int, features: int, *, has_activation: bool) -> bool:
    """Whether the kernels are faster than XLA, as measured or estimated.

    On an H200, 4096 features: 1.15 times as fast as XLA at 512 rows with LayerNorm, bias, gelu and 16384 outputs, 1.01
    at 8192 rows with RMSNorm and 4096 outputs. With RMSNorm in the launch, at 16 rows and at 1: 1.22 and 1.33 for 4096
    outputs, 1.28 and 1.26 for 6144, 1.19 and 1.23 for 8192, 1.12 and 1.06 for 14336. At 64 rows of 6656 features and
    outputs, with given mean squares, 1.28.
    """
    if rows <= MOST_FUSED_NORM_ROWS:
        return choose_normed(rows, outputs, features) is not None
    if rows <= MOST_ROWS:
        return is_linear_preferred(rows, outputs, features, has_activation=has_activation)
    ours, xla = estimate(rows, outputs, features, has_activation=has_activation)
    return ours < xla


def normed_config(known: tuning.Problem, rows: int) -> Config:
    """Returns the configuration of `linear` for a problem, with the norm in its launch where that was measured.

    On an H200, 4096 features and outputs: 10.1 µs at 1 row and 10.9 at 16, where a norm before takes 11.2 and 11.3; of
    14336 outputs 29.4 and 29.8, where one before takes 31.3 and 32.1.
    """
    config, sizes = tuned_config(known, rows), (rows, int(known["outputs"]), int(known["features"]))
    is_untuned = rows <= MOST_FUSED_NORM_ROWS and config == choose_few_rows(*sizes)
    return (choose_normed(*sizes) if is_untuned else None) or config
