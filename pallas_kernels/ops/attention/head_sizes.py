"""Heads of sizes between those that the kernels take: zeros behind their features, which add nothing to any score."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp

from pallas_kernels.ops.attention.problem import Problem

HEAD_SIZES = (64, 96, 128, 192, 256)
"""What kernels have tiles for."""
LEAST_SIZE = 32
"""Below, more than half of a tile would be zeros."""
LEAST_SCORES = 2**16
"""Of a head. With fewer, XLA takes as long to add the zeros as to keep scores in memory: estimated, not measured."""


def size_taken(size: int) -> int | None:
    """The size of a kernel's heads that has room for `size` features, None where there is none."""
    return next((whole for whole in HEAD_SIZES if whole >= size), None)


def pays(problem: Problem) -> bool:
    """Whether a kernel is worth its zeros."""
    scores = problem.masking.queries * problem.masking.keys
    return problem.head_size in HEAD_SIZES or (problem.head_size >= LEAST_SIZE and scores >= LEAST_SCORES)


def widened(problem: Problem, *arrays: jax.Array) -> tuple[Problem, tuple[jax.Array, ...]]:
    """The problem and its arrays, (batch, length, heads, head size), with heads of a size that the kernels take.

    The scale stays that of the heads as they were.
    """
    size = size_taken(problem.head_size)
    assert size is not None
    if size == problem.head_size:
        return problem, arrays
    pads = ((0, 0), (0, 0), (0, 0), (0, size - problem.head_size))
    return replace(problem, head_size=size), tuple(jnp.pad(array, pads) for array in arrays)
