"""Where the normalised linear layer takes its kernels; their configurations are those of `linear`, but for few rows."""

from __future__ import annotations

from pallas_kernels import tuning
from pallas_kernels.ops.linear.config import Config, tuned_config
from pallas_kernels.primitives.few_rows.choice import (
    ALONE,
    MOST_NORM_INSIDE,
    TOGETHER,
    choose_few_rows,
    with_norm_inside,
)
from pallas_kernels.primitives.gemm.choice import fills

FEWEST_ROWS = 512
"""Between few rows and these nothing has been measured with a norm."""


def is_preferred(rows: int, outputs: int, features: int) -> bool:
    """Whether this layer runs the kernels where the caller leaves the choice: where they were measured to be faster.

    On an H200, 4096 features: 1.15 times as fast as XLA at 512 rows with LayerNorm, bias, gelu and 16384 outputs, 1.01
    at 8192 rows with RMSNorm and 4096 outputs; 1.28 at 16 rows and 1.39 at 1, with RMSNorm in the launch.
    """
    if rows <= MOST_NORM_INSIDE:
        return choose_few_rows(rows, outputs, features) in (ALONE, TOGETHER)
    return rows >= FEWEST_ROWS and fills(rows, outputs)


def normed_config(known: tuning.Problem, rows: int) -> Config:
    """What `linear` has for a problem, with the norm in the launch where that was measured.

    On an H200, 4096 features and outputs: 9.9 µs at 1 row and 10.2 at 16, where a norm before takes 11.2 and 11.3.
    """
    config = tuned_config(known, rows)
    return with_norm_inside(config, rows) if config in (ALONE, TOGETHER) else config
