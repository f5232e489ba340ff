"""Launch configurations of the softmax kernels: their parameters, the untuned defaults, and the candidates."""

from __future__ import annotations

from dataclasses import dataclass

CAUSAL_PIECES = 8
"""The most pieces of a causal row in registers; pieces right of the diagonal are not read from memory."""

SHARED_BYTES = 220 * 1024
"""The most shared memory for the rows of a block."""


@dataclass(frozen=True, kw_only=True)
class RowConfig:
    """How a kernel splits its work: one block of one warpgroup per row.

    register_columns: the longest row held in registers.
    shared_warpgroups: in the backward pass, the warpgroups of a block that holds a longer row in shared memory, if it
        fits and divides evenly over them; 0 for no such block.
    shared_columns: columns of such a row that a warp has in registers at a time.
    chunk: columns in registers at a time in a row that is longer still. Such a row is read twice, the second time from
        the L2 cache.
    """

    register_columns: int
    shared_warpgroups: int = 0
    shared_columns: int = 512
    chunk: int = 4096


DEFAULT_FORWARD = RowConfig(register_columns=16384)
"""The untuned configuration: 64 KiB of float32 weights fill half of the registers."""


def default_backward(itemsize: int) -> RowConfig:
    """Returns the untuned configuration.

    Two rows take 145 registers per thread at 8192 columns; longer rows go to shared memory.
    """
    return RowConfig(register_columns=8192, shared_warpgroups=4, chunk=8192 // itemsize)


def forward_candidates(features: int) -> dict[str, RowConfig]:
    """Returns the configurations worth measuring, by name."""
    return _candidates(features, DEFAULT_FORWARD.register_columns)


def backward_candidates(features: int, itemsize: int) -> dict[str, RowConfig]:
    """Returns the configurations worth measuring, by name."""
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
