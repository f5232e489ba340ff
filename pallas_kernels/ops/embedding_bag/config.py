"""The rule by which a call takes the kernel or XLA.

Times are in µs on an H200, of 16-bit tables that stay in the L2 cache, by a script that is not kept.
"""

from __future__ import annotations

import math

LONG_BAG = 24
"""XLA slows down from this many rows a bag on: 8192 bags of 23 and 24 rows of 128 take 10.1 and 19.2, by the kernel
15.0 and 16.4."""
MIDDLE_BAGS = range(64, 1025)
"""The kernel wins, or loses by at most 0.2, at these numbers of bags: 256 of 10 rows of 512 take 1.6, by XLA 2.0."""
LONG_ROW = 512
"""With more bags, the kernel wins from this row length on: 6056 of 10 rows of 584 take 11.6, by XLA 11.8; but 25518 of
10 rows of 320 take 34.5 and 24.9."""


def is_preferred(bags: int, size: int, features: int, itemsize: int) -> bool:
    """Returns whether the kernel is likely faster than XLA. itemsize: bytes of a table element.

    A block of the kernel reads its bag's rows in turn, while XLA splits a long bag over blocks. So XLA wins where bags
    are few and long: 10 of 128 rows of 528 take 4.1, by the kernel 8.1 (`choice-again-h200.json`).
    """
    if bags in MIDDLE_BAGS:
        return True
    if size < LONG_BAG:
        return bags > max(MIDDLE_BAGS) and features >= LONG_ROW
    # Fitted to fewer than 64 bags; with more than 1024 XLA is far slower either way.
    ours = 1 + 0.02 * size * math.ceil(features / LONG_ROW)
    xla = 2 + (1.3e-6 if size >= 32 else 0.2e-6) * bags * size * features * itemsize
    return ours < xla
