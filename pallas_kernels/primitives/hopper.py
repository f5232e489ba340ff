"""Sizes of a Hopper GPU that decide how kernels cut their work."""

from __future__ import annotations

SHARED_BYTES = 227 * 1024
"""The most shared memory of a block."""
TMA_ROWS = 8
"""TMA loads groups of eight rows: an array has fewer rows, or whole groups."""
