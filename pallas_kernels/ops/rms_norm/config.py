"""Launch configurations of the RMSNorm kernels: what may be chosen, and what is chosen untuned."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

SHARED_MEMORY_BYTES = 227 * 1024
"""What a streaming multiprocessor of Hopper gives to its blocks."""


@dataclass(frozen=True, kw_only=True)
class ForwardConfig:
    """How the forward kernel cuts its work: one block of one warpgroup a row.

    register_columns: the longest row held in registers (206 of them a thread at 16384 bf16 columns).
    chunk: columns in registers at a time in a longer row, which is read twice, the second time from the L2 cache.
    """

    register_columns: int = 16384
    chunk: int = 4096


@dataclass(frozen=True, kw_only=True)
class BackwardConfig:
    """How the backward kernel cuts its work: persistent blocks of one warpgroup, each taking every n-th row.

    loads: "pipeline" brings rows to shared memory by TMA, `steps` of them in flight; "direct" reads them into
        registers; "chunked" walks along each row twice, `chunk` columns at a time.
    blocks_per_core: blocks a streaming multiprocessor. Each writes one row of partial column sums.
    second_read: where the second pass over a row finds it: kept in registers as float32 ("float32"), or read again from
        shared memory or the L1 cache ("reload"; 168 registers instead of 202 at 4096 bf16 columns, no spills at 8192).
    gain: where the scale lives between rows.
    """

    loads: Literal["pipeline", "direct", "chunked"] = "pipeline"
    blocks_per_core: int = 3
    steps: int = 3
    second_read: Literal["float32", "reload"] = "reload"
    gain: Literal["registers", "shared"] = "shared"
    chunk: int = 2048


def default_forward(features: int, itemsize: int) -> ForwardConfig:
    """The untuned choice for rows of `features` values of `itemsize` bytes."""
    del features, itemsize
    return ForwardConfig()


def default_backward(features: int, itemsize: int, *, scale_itemsize: int, streams: int) -> BackwardConfig:
    """The untuned choice. `streams` arrays are read: x and dy, and the sum's cotangent where there is one."""
    if features > 8192:
        return BackwardConfig(loads="chunked", blocks_per_core=4)
    if features * itemsize % 16:
        return BackwardConfig(loads="direct", blocks_per_core=3)
    blocks = 3 if features <= 4096 else 2
    return pipeline_config(features, itemsize, scale_itemsize=scale_itemsize, streams=streams, blocks_per_core=blocks)


def pipeline_config(
    features: int, itemsize: int, *, scale_itemsize: int, streams: int, blocks_per_core: int
) -> BackwardConfig:
    """As many rows in flight, up to 4, as `blocks_per_core` blocks can hold in shared memory."""
    # 4 KiB a block: the scratch of the sums, the barriers, and what the driver keeps.
    budget = SHARED_MEMORY_BYTES // blocks_per_core - features * scale_itemsize - 4096
    steps = min(4, budget // (streams * features * itemsize))
    if steps < 2:
        if blocks_per_core > 1:
            return pipeline_config(
                features, itemsize, scale_itemsize=scale_itemsize, streams=streams, blocks_per_core=blocks_per_core - 1
            )
        return BackwardConfig(loads="direct", blocks_per_core=2)
    return BackwardConfig(loads="pipeline", blocks_per_core=blocks_per_core, steps=steps)


def forward_candidates(features: int, itemsize: int) -> dict[str, ForwardConfig]:
    """The configurations worth measuring, by name."""
    candidates = {"registers": ForwardConfig(register_columns=features)} if features <= 16384 else {}
    for chunk in (2048, 4096, 8192):
        if features > 2 * chunk:
            candidates[f"chunk {chunk}"] = ForwardConfig(register_columns=chunk, chunk=chunk)
    del itemsize
    return candidates


def backward_candidates(
    features: int, itemsize: int, *, scale_itemsize: int, streams: int
) -> dict[str, BackwardConfig]:
    """The configurations worth measuring, by name."""
    if features > 8192:
        return {
            f"chunked {chunk}, {blocks} blocks": BackwardConfig(loads="chunked", chunk=chunk, blocks_per_core=blocks)
            for chunk in (1024, 2048)
            for blocks in (2, 4, 6)
        }
    limits = (3, 6, 9, 12) if features <= 2048 else (1, 2, 3)
    candidates = {}
    for blocks in limits:
        candidates[f"direct, {blocks} blocks"] = BackwardConfig(loads="direct", blocks_per_core=blocks)
        if features * itemsize % 16 == 0:
            config = pipeline_config(
                features, itemsize, scale_itemsize=scale_itemsize, streams=streams, blocks_per_core=blocks
            )
            if config.loads == "pipeline":
                candidates[f"pipeline, {config.blocks_per_core} blocks, {config.steps} steps"] = config
    return candidates
