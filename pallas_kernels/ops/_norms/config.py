"""Launch configurations of the norms: the choices, the untuned defaults, and the candidates worth measuring."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import jax.numpy as jnp

from pallas_kernels.primitives.rows import ACCESS_BYTES, LANES, split_warp_row
from pallas_kernels.specs import Arguments

SHARED_MEMORY_BYTES = 228 * 1024
"""Shared memory of a streaming multiprocessor of Hopper."""
BLOCK_RESERVED_BYTES = 1024
"""Shared memory that the driver reserves for each block."""
LONGEST_WHOLE_ROW = 8192
"""The longest row whose backward pass fits in the registers of one warpgroup."""


@dataclass(frozen=True, kw_only=True)
class ForwardConfig:
    """How the forward kernel cuts its work: one block of one warpgroup a row.

    register_columns: the longest row held in registers as float32 (206 registers a thread at 16384 bf16 columns).
    chunk: columns in registers at a time in a longer row, which is read again from the L2 cache.
    piece: accesses a thread whose scale and bias are in registers at once; 0: those of the whole row.
    """

    register_columns: int = 16384
    chunk: int = 4096
    piece: int = 0


@dataclass(frozen=True, kw_only=True)
class BackwardConfig:
    """How the backward kernel cuts its work: persistent blocks, each taking every n-th row.

    loads: "shared": TMA brings rows to a ring of `steps` stages in shared memory, and `warpgroups` share each row;
        "pipeline": the same for one warpgroup and rows that need not divide evenly.
    blocks_per_core: blocks a streaming multiprocessor. Each writes one row of partial column sums.
    keeps_row: whether a row stays in registers as float32 between its two passes ("shared" only). Else the second pass
        reads it again from shared memory, which saves registers: 168 a thread, not 202, at 4096 bf16 columns.
    """

    loads: Literal["shared", "pipeline"] = "pipeline"
    blocks_per_core: int = 3
    warpgroups: int = 1
    steps: int = 3
    keeps_row: bool = False

    @property
    def name(self) -> str:
        """The name of this candidate in benchmarks."""
        kept = " keeps row" if self.keeps_row else ""
        return f"{self.loads} {self.warpgroups} warpgroups {self.steps} steps{kept}, {self.blocks_per_core} blocks"


@dataclass(frozen=True, kw_only=True)
class BackwardShape:
    """What a backward configuration depends on.

    streams: arrays read row by row (x, dy, and the sum's cotangent where there is one).
    gain_bytes: bytes of one value of the scale; 0 without a scale.
    sums: gradients summed over columns (scale, bias).
    has_dropout: whether the gradient of the dropout's input is written, too.
    centered: whether rows lose their mean.
    """

    features: int
    itemsize: int
    streams: int
    gain_bytes: int
    sums: int = 1
    has_dropout: bool = False
    centered: bool = False

    def shared(
        self, *, warpgroups: int, blocks_per_core: int, keeps_row: bool = False, most_steps: int = 4
    ) -> BackwardConfig | None:
        """A ring of as many rows as fit, up to `most_steps`, for several warpgroups.

        None where fewer than 2 rows fit, where the row does not divide over the warpgroups, or where it would spill.
        """
        if split_warp_row(self.features, self.itemsize, warpgroups=warpgroups) is None:
            return None
        columns = self.features // (warpgroups * LANES)  # a thread
        # Four warpgroups have 128 registers a thread, where two kinds of sums, or a mask, take 16 columns.
        most_columns = 16 if warpgroups == 4 and (self.sums > 1 or self.has_dropout) else 32
        if columns > most_columns or (keeps_row and columns > 16) or warpgroups * blocks_per_core > 12:
            return None
        steps = self._steps(blocks_per_core, self.features * self.gain_bytes + 3072, most=most_steps)
        if steps < 2:
            return None
        return BackwardConfig(
            loads="shared", warpgroups=warpgroups, blocks_per_core=blocks_per_core, steps=steps, keeps_row=keeps_row
        )

    def pipeline(self, *, blocks_per_core: int) -> BackwardConfig | None:
        """A pipeline of rows for one warpgroup; None where TMA cannot align them, or they do not fit."""
        if self.features * self.itemsize % ACCESS_BYTES or self.features * max(1, self.sums) > LONGEST_WHOLE_ROW:
            return None
        # Sums over a warpgroup take 2 KiB of scratch, the barriers' page another one.
        steps = self._steps(blocks_per_core, self.features * self.gain_bytes + 4096)
        return BackwardConfig(loads="pipeline", blocks_per_core=blocks_per_core, steps=steps) if steps >= 2 else None

    def default(self) -> BackwardConfig | None:
        """The untuned choice; None where XLA is faster: a kernel that walked along long rows in chunks took 19.2 µs at
        64 x 15712, XLA 11.4, and 65.5 µs at 521 x 11168 with a residual, XLA 39.9."""
        blocks = (3, 2, 1) if self.features <= 4096 else (2, 1)  # more columns: 216 registers and more
        # Rows too long for one warpgroup that several load by less than 16 bytes a thread.
        narrow = (self.shared(warpgroups=w, blocks_per_core=1) for w in (2, 4))
        configs = (*self._shared_choices(), *(self.pipeline(blocks_per_core=b) for b in blocks), *narrow)
        return next((config for config in configs if config is not None), None)

    def _shared_choices(self) -> list[BackwardConfig | None]:
        """Rings to try, the best first."""
        if self.itemsize == 2 and self.features == 8192 and not self.has_dropout:
            # 64 KiB in flight are enough: LayerNorm at 8192 rows 102 µs, 4 steps 113 µs; RMSNorm with a residual 130 µs
            # kept with 2 steps, 134 µs with 4, read again 136 µs.
            return [self.shared(warpgroups=4, blocks_per_core=1, keeps_row=True, most_steps=2)]
        # Where dropout writes one array more, 2 rows in flight: RMSNorm at 8192 x 8192 bf16 174 µs, 4 rows 187 µs; at
        # 32768 x 4096 330 µs with 2 blocks of 2 warpgroups, 349 µs with more rows in flight.
        is_two_steps = self.itemsize == 2 and self.has_dropout and self.features in (4096, 8192)
        # Fewer warpgroups where four would not have 16 bytes of a row for each thread. LayerNorm joins four sums of
        # each line, which 16 warps do slower than 8: at 32768 x 4096 bf16 290 and 257 µs.
        per_warpgroup = LANES * ACCESS_BYTES // self.itemsize
        most = 2 if self.features <= 4096 and (self.centered or is_two_steps) else 4
        warpgroups = next((w for w in (4, 2, 1) if w <= most and self.features % (w * per_warpgroup) == 0), 0)
        # Two streams leave time that a second block fills.
        four = (2, 1) if self.streams == 2 and not (self.centered or self.has_dropout) else (1,)
        two = (1,) if self.centered and self.streams == 3 and self.features > 2048 and not is_two_steps else (2, 1)
        blocks = {4: four, 2: two, 1: (6, 4, 3, 2, 1), 0: ()}[warpgroups]
        steps = 2 if is_two_steps else 4
        return [self.shared(warpgroups=warpgroups, blocks_per_core=b, most_steps=steps) for b in blocks]

    def candidates(self) -> dict[str, BackwardConfig]:
        """The configurations worth measuring, by name."""
        if self.features <= 2048:
            pairs, blocks = ((1, 4), (1, 8), (2, 2), (4, 2)), (8,)
        else:
            pairs, blocks = ((4, 1), (4, 2), (2, 2)), (3,)
        configs = [
            self.shared(warpgroups=w, blocks_per_core=b, keeps_row=keeps_row, most_steps=steps)
            for w, b in pairs
            for keeps_row in (False, True)
            for steps in (2, 4)
        ]
        configs += [self.pipeline(blocks_per_core=b) for b in blocks]
        return {config.name: config for config in configs if config is not None}

    def _steps(self, blocks_per_core: int, other_bytes: int, *, most: int = 4) -> int:
        budget = SHARED_MEMORY_BYTES // blocks_per_core - BLOCK_RESERVED_BYTES - other_bytes
        return min(most, budget // (self.streams * self.features * self.itemsize))


def default_forward(features: int, itemsize: int, *, centered: bool) -> ForwardConfig:
    """The untuned choice for rows of `features` values of `itemsize` bytes."""
    if itemsize == 2 and centered and 2048 < features <= 8192:
        # LayerNorm at 8192 x 8192 bf16: 167 registers and 71.4 µs, in pieces 127 and 66.5 µs.
        return ForwardConfig(piece=2 if features <= 4096 else 4)
    return ForwardConfig()


def forward_candidates(features: int) -> dict[str, ForwardConfig]:
    """The configurations worth measuring, by name."""
    candidates = {"registers": ForwardConfig(register_columns=features)} if features <= 16384 else {}
    for piece in (2, 4):
        candidates[f"pieces of {piece}"] = ForwardConfig(register_columns=features, piece=piece)
    for chunk in (2048, 4096, 8192):
        if features > 2 * chunk:
            candidates[f"chunk {chunk}"] = ForwardConfig(register_columns=chunk, chunk=chunk)
    return candidates


def norm_variants(
    phase: str,
    arguments: Arguments,
    *,
    forward: Callable[..., Any],
    backward: Callable[..., Any],
    centered: bool = False,
    has_dropout: bool = False,
) -> Mapping[str, Callable[..., Any]]:
    """`forward` or `backward` with each candidate as its `config`, by name: what `OpSpec.variants` asks for."""
    x, scale = arguments["x"], arguments.get("scale")
    features, itemsize = x.shape[-1], jnp.dtype(x.dtype).itemsize
    if phase == "forward":
        return {name: partial(forward, config=c) for name, c in forward_candidates(features).items()}
    shape = BackwardShape(
        features=features,
        itemsize=itemsize,
        streams=2 if arguments.get("residual") is None else 3,
        gain_bytes=0 if scale is None else jnp.dtype(scale.dtype).itemsize,
        sums=sum(arguments.get(name) is not None for name in ("scale", "bias")),
        has_dropout=has_dropout,
        centered=centered,
    )
    return {name: partial(backward, config=c) for name, c in shape.candidates().items()}
