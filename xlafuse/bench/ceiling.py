"""Copy ceiling: times the fastest elementwise work that moves the same number of bytes as an operation.

The ceiling's candidates run beside the operation. One is a plain copy, which reads half of the bytes and writes the
other half. Another reads and writes as many arrays as the operation does, since memory reads faster than it writes. For
an operation that writes almost nothing, a third candidate sums rows. Each is a single launch on 32-bit words, where
XLA's elementwise kernels reach 4250 GB/s on an H200; on bfloat16 arrays they reach only 3350 GB/s, which is no ceiling.
The fastest candidate is the ceiling.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable

import jax
import jax.numpy as jnp

from pallas_kernels import Traffic
from xlafuse.bench.timing import Candidate

COPY = "copy"
_WORD_BYTES = 4
_ALIGNMENT = 1024
"""Words; XLA then reads and writes 16 bytes at a time."""
_MOST_ARRAYS = 8
_NEAR = 0.02
"""Allowed difference between the shares of reads."""
_ALL_READ = 0.95
_ROW = 4096


def ceiling_candidates(traffic: Traffic, *, sets: int, seed: int = 0) -> list[Candidate]:
    """Returns the ceiling's candidates for `traffic`, each with `sets` sets of buffers."""
    total = traffic.bytes // _WORD_BYTES
    shapes = {COPY: (1, 1)}
    reads, writes = array_counts(traffic)
    if reads != writes or reads > 1:
        shapes[f"elementwise, {reads} read {writes} written"] = (reads, writes)
    keys = iter(jax.random.split(jax.random.key(seed), (len(shapes) + 1) * sets * _MOST_ARRAYS))
    candidates = []
    for name, (reads, writes) in shapes.items():
        words = _round_up(max(1, total // (reads + writes)), _ALIGNMENT if total > _ALIGNMENT * _MOST_ARRAYS else 4)
        inputs = [tuple(jax.random.bits(next(keys), (words,), jnp.uint32) for _ in range(reads)) for _ in range(sets)]
        call = jax.jit(elementwise(writes))
        candidates.append(Candidate(name=name, kind="ceiling", call=call, inputs=inputs))
    if sum(traffic.read) > _ALL_READ * traffic.bytes:
        rows = max(1, total // _ROW)
        inputs = [(jax.random.bits(next(keys), (rows, _ROW), jnp.uint32),) for _ in range(sets)]
        candidates.append(Candidate(name="read", kind="ceiling", call=jax.jit(row_sums), inputs=inputs))
    return candidates


def array_counts(traffic: Traffic) -> tuple[int, int]:
    """Returns how many equal arrays to read and how many to write, at most 8 each.

    The counts are the operation's own if its arrays are about equal. Otherwise they are the smallest whose share of
    reads is close to that of the traffic.
    """
    share = sum(traffic.read) / max(1, traffic.bytes)
    own = (len(traffic.read), len(traffic.written))
    counts = ((r, w) for r in range(1, _MOST_ARRAYS + 1) for w in range(1, _MOST_ARRAYS + 1))

    def distance(counts: tuple[int, int]) -> tuple[float, int]:
        off = abs(counts[0] / sum(counts) - share)
        return (0.0 if off <= _NEAR else off), 0 if counts == own else sum(counts)

    return min(counts, key=distance)


def elementwise(writes: int) -> Callable[..., tuple[jax.Array, ...]]:
    """Returns a function from equal arrays of 32-bit words to `writes` such arrays; XLA compiles it to one kernel."""

    def combine(*arrays):
        value = functools.reduce(operator.xor, arrays)
        return tuple(value ^ jnp.uint32(0x9E3779B9 * (i + 1) & 0xFFFFFFFF) for i in range(writes))

    return combine


def row_sums(words: jax.Array) -> tuple[jax.Array]:
    """Sums each row: reads everything and writes almost nothing."""
    return (jnp.sum(words, axis=1, dtype=jnp.uint32),)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
