"""Launch configurations of the softmax kernels: the choices, the untuned defaults, and the candidates."""

from __future__ import annotations

from dataclasses import dataclass

CAUSAL_PIECES = 8
"""A causal row in registers is read in up to so many pieces; those right of the diagonal are not read from memory."""

SHARED_BYTES = 220 * 1024
"""Shared memory that the rows of a block may take."""


@dataclass(frozen=True, kw_only=True)
class RowConfig:
    """How a kernel cuts its work: one block of one warpgroup a row.

    register_columns: the longest row held in registers.
    shared_warpgroups: backward, warpgroups of a block that holds a longer row in shared memory, where it fits and
        divides over them; 0 for no such block.
    shared_columns: of such a row, columns that a warp has in registers at a time.
    chunk: columns in registers at a time in a longer row yet, which is read twice, the second time from the L2 cache.
    """

    register_columns: int
    shared_warpgroups: int = 0
    shared_columns: int = 512
    chunk: int = 4096


DEFAULT_FORWARD = RowConfig(register_columns=16384)
"""The untuned choice: 64 KiB of float32 weights fill half of the registers."""


def default_backward(itemsize: int) -> RowConfig:
    """The untuned choice: two rows take 145 registers a thread at 8192 columns; longer ones go to shared memory."""
    return RowConfig(register_columns=8192, shared_warpgroups=4, chunk=8192 // itemsize)


def forward_candidates(features: int) -> dict[str, RowConfig]:
    """The configurations worth measuring, by name."""
    return _candidates(features, DEFAULT_FORWARD.register_columns)


def backward_candidates(features: int, itemsize: int) -> dict[str, RowConfig]:
    """The configurations worth measuring, by name."""
    candidates = _candidates(features, default_backward(itemsize).register_columns)
    if features >= 8192 and 2 * features * itemsize <= SHARED_BYTES:
        for warpgroups in (2, 4):
            config = RowConfig(register_columns=0, shared_warpgroups=warpgroups)
            candidates[f"shared {warpgroups} warpgroups"] = config
    return candidates


def _candidates(features: int, longest: int) -> dict[str, RowConfig]:
    candidates = {"registers": RowConfig(register_columns=features)} if features <= longest else {}
    for chunk in (2048, 4096):
        if features > chunk:
            candidates[f"chunk {chunk}"] = RowConfig(register_columns=0, chunk=chunk)
    return candidates
