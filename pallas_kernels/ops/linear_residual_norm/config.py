"""Whether a call prefers the kernel to XLA."""

from __future__ import annotations

from pallas_kernels.primitives.few_rows.config import MOST_ROWS
from pallas_kernels.primitives.gemm.config import estimated_us

FEWEST_ROWS = 512
"""Between `MOST_ROWS` and this many rows, the kernel has not been compared with XLA, but for 77 (23 and 13 µs)."""
MOST_FEW_ROWS, FEWEST_FEATURES, FEWEST_OUTPUTS = 16, 8192, 4096
"""The measured range of the product of few rows."""


def is_preferred(rows: int, outputs: int, features: int) -> bool:
    """Whether the kernel is faster than XLA, as measured or estimated.

    On an H200, 14336 features and 4096 outputs: 1.01 times as fast as XLA at 8192 rows, 1.02 at 512, 1.09 and 1.1 at 1
    and 16. 4096 features and outputs, by a script that is not kept: 0.93 times at 3 rows, 0.95 at 20, 1.09 at 41, 1.26
    at 61.
    """
    if rows <= MOST_FEW_ROWS:
        return outputs >= FEWEST_OUTPUTS and features >= FEWEST_FEATURES
    if rows <= MOST_ROWS:
        return outputs >= FEWEST_OUTPUTS and features >= FEWEST_FEATURES // 2 and rows > MOST_ROWS // 2
    ours, xla = estimated_us(rows, outputs, features, read_bytes=2)
    return rows >= FEWEST_ROWS and ours < xla
