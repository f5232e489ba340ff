"""Launch configurations of the RMSNorm kernels: what may be chosen, and what is chosen untuned."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pallas_kernels.primitives.rows import split_warp_row

SHARED_MEMORY_BYTES = 228 * 1024
"""What a streaming multiprocessor of Hopper gives to its blocks."""
BLOCK_RESERVED_BYTES = 1024
"""What the driver keeps of it for each block."""


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
    """How the backward kernel cuts its work: persistent blocks, each taking every n-th row.

    loads: "pipeline" brings rows to shared memory by TMA, `steps` of them in flight, for a block of one warpgroup;
        "shared" does so for `warpgroups` that share each row; "direct" reads rows into registers; "chunked" walks along
        each row twice, `chunk` columns at a time.
    blocks_per_core: blocks a streaming multiprocessor. Each writes one row of partial column sums.
    second_read: where the second pass over a row finds it: kept in registers as float32 ("float32"), or read again from
        shared memory or the L1 cache ("reload"; 168 registers instead of 202 at 4096 bf16 columns, no spills at 8192).
    gain: where the scale lives between rows.
    """

    loads: Literal["pipeline", "shared", "direct", "chunked"] = "pipeline"
    blocks_per_core: int = 3
    warpgroups: int = 1
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
    sizes = {"scale_itemsize": scale_itemsize, "streams": streams}
    if features <= 4096:
        configs = (pipeline_config(features, itemsize, blocks_per_core=b, **sizes) for b in (3, 2, 1))
        config = next((config for config in configs if config is not None), None)
    else:
        config = shared_config(features, itemsize, warpgroups=-(-features // 4096), blocks_per_core=1, **sizes)
    if config is not None:
        return config
    if features <= 8192:
        return BackwardConfig(loads="direct", blocks_per_core=3 if features <= 4096 else 2)
    return BackwardConfig(loads="chunked", blocks_per_core=4)


def pipeline_config(
    features: int, itemsize: int, *, scale_itemsize: int, streams: int, blocks_per_core: int
) -> BackwardConfig | None:
    """As many rows in flight, up to 4, as `blocks_per_core` blocks can hold; None for fewer than 2."""
    if features * itemsize % 16 or features > 8192:  # TMA's alignment; registers
        return None
    # Sums over a warpgroup take 2 KiB of scratch, the barriers' page another one.
    steps = _steps(blocks_per_core, features * scale_itemsize, streams * features * itemsize, scratch_bytes=4096)
    if steps < 2:
        return None
    return BackwardConfig(loads="pipeline", blocks_per_core=blocks_per_core, steps=steps)


def shared_config(
    features: int, itemsize: int, *, scale_itemsize: int, streams: int, warpgroups: int, blocks_per_core: int
) -> BackwardConfig | None:
    """The same for `warpgroups` a block; None also where the row does not divide over them, or spills."""
    if split_warp_row(features, itemsize, warpgroups=warpgroups) is None or features > 4096 * warpgroups:
        return None
    if warpgroups > 4:  # 64 registers a thread are not enough
        return None
    steps = _steps(blocks_per_core, features * scale_itemsize, streams * features * itemsize)
    if steps < 2:
        return None
    return BackwardConfig(loads="shared", warpgroups=warpgroups, blocks_per_core=blocks_per_core, steps=steps)


def _steps(blocks_per_core: int, gain_bytes: int, row_bytes: int, scratch_bytes: int = 2048) -> int:
    budget = SHARED_MEMORY_BYTES // blocks_per_core - BLOCK_RESERVED_BYTES - gain_bytes - scratch_bytes
    return min(4, budget // row_bytes)


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
    sizes = {"scale_itemsize": scale_itemsize, "streams": streams}
    blocks = (4, 8, 12) if features <= 2048 else (1, 2, 3)
    configs: list[BackwardConfig | None] = []
    if features <= 8192:
        configs += [BackwardConfig(loads="direct", blocks_per_core=b) for b in blocks[1:]]
        configs += [pipeline_config(features, itemsize, blocks_per_core=b, **sizes) for b in blocks]
    else:
        configs += [BackwardConfig(loads="chunked", chunk=1024, blocks_per_core=b) for b in (4, 6)]
        configs += [BackwardConfig(loads="chunked", chunk=2048, blocks_per_core=b) for b in (2, 4)]
    for warpgroups in (1, 2, 4):
        for b in blocks:
            configs.append(shared_config(features, itemsize, warpgroups=warpgroups, blocks_per_core=b, **sizes))
    return {_name(config): config for config in configs if config is not None}


def _name(config: BackwardConfig) -> str:
    detail = {
        "direct": "",
        "chunked": f" {config.chunk}",
        "pipeline": f" {config.steps} steps",
        "shared": f" {config.warpgroups} warpgroups {config.steps} steps",
    }[config.loads]
    return f"{config.loads}{detail}, {config.blocks_per_core} blocks"
