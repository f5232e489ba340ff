"""The columns of the kernels' tiles for heads, and heads widened to them."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp

from pallas_kernels.ops.attention.problem import Problem

HEAD_SIZES = (64, 96, 128, 160, 192, 256)
"""Head sizes that kernels have tiles for. Heads of 112 are faster in tiles of 128 than of 112 (TUNING.md)."""
LEAST_SIZE = 32
"""Smaller heads take XLA: more than half of a padded tile would be zeros.

Heads of 40 in tiles of 64, 8x32x12x40 bf16: 2.6 µs forward (H200); XLA 13.0 (H100).
"""


TWO_SIZES = frozenset({(192, 128)})
"""Sizes of tiles of keys and of values that differ; other heads take the larger tiles for both."""


def tiles_of(size: int, value_size: int) -> tuple[int, int] | None:
    """The columns of the kernels' tiles for keys and for values; None if a head is too large."""
    own, other = (next((whole for whole in HEAD_SIZES if whole >= columns), None) for columns in (size, value_size))
    if own is None or other is None:
        return None
    largest = max(own, other)
    return (own, other) if (own, other) in TWO_SIZES else (largest, largest)


def widened(problem: Problem, *arrays: jax.Array) -> tuple[Problem, tuple[jax.Array, ...]]:
    """Widens heads to sizes that the kernels take; keeps the scale.

    TMA fills the further columns with zeros, and does not store them, if rows of arrays (batch, length, heads, head
    size) have a multiple of 16 bytes. Else the arrays are padded.

    Args:
        arrays: query, key, value, and further ones like value.
    """
    sizes = problem.head_size, problem.value_size
    taken, clips = tiles_of(*sizes), not any(size % 8 for size in sizes)
    assert taken is not None
    if taken == sizes:
        return problem, arrays
    problem = replace(problem, head_size=taken[0], value_size=taken[1], clips=clips)
    if clips:
        return problem, arrays
    extra = (taken[1 if i > 1 else 0] - array.shape[3] for i, array in enumerate(arrays))
    return problem, tuple(jnp.pad(a, ((0, 0), (0, 0), (0, 0), (0, e))) for a, e in zip(arrays, extra, strict=True))
