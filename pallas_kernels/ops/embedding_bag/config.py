"""Decides whether a call prefers the kernel to XLA, by measurements on an H200."""

from __future__ import annotations

import math

LONG_BAG = 24
"""The fewest rows of a bag whose sum XLA does not unroll: 8192 bags from 1000 × 128, 16 bits, of 23 rows take 10.1 µs,
of 24 19.2; by the kernel 15.0 and 16.4."""
SOME_BAGS = range(64, 1025)
"""Numbers of bags for which the kernel is at most 0.2 µs slower, and up to twice as fast: 256 of 10 from 512 columns
take 1.6 µs, and by XLA 2.0."""
LONG_ROW = 512
"""The fewest columns of more bags: 6056 of 10 from 584 take 11.6 µs, and by XLA 11.8; but 25518 of 10 from 320 34.5 and
24.9, and 8192 of 20 from 128 13.1 and 8.8."""


def is_preferred(bags: int, size: int, features: int, itemsize: int) -> bool:
    """Whether the kernel is measured or estimated to be faster than XLA; itemsize: bytes of a value of the table.

    Each block of the kernel reads the rows of its bag in turn. XLA shares the rows of a few long bags among blocks, and
    its time grows with the bytes: 10 bags of 128 from 528 columns, 16 bits, take 3.6 µs, and by the kernel 4.5.
    """
    if bags in SOME_BAGS:
        return True
    if size < LONG_BAG:
        return bags > max(SOME_BAGS) and features >= LONG_ROW
    # In µs, for fewer than 64 bags; for more than 1024 XLA's time is far greater.
    ours = 1 + 0.02 * size * math.ceil(features / LONG_ROW)
    xla = 2 + (1.3e-6 if size >= 32 else 0.2e-6) * bags * size * features * itemsize
    return ours < xla
