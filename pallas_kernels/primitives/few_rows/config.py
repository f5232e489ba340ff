"""The tiling of a product of few rows, and the untuned choice from sizes alone. TUNING.md has the measurements."""

from __future__ import annotations

from dataclasses import dataclass, replace

from pallas_kernels.primitives.hopper import SHARED_BYTES
from pallas_kernels.primitives.platform import target_device
from pallas_kernels.primitives.transposed import GROUP

_RESERVED_BYTES = 3072
"""Shared memory for Mosaic GPU's own scratch (2048), barriers, alignment and a fused norm's values (2776 measured)."""


@dataclass(frozen=True, kw_only=True)
class FewRowsConfig:
    """The tiling of a (rows, K) x (K, N) product.

    columns: columns of each accumulator that a block computes at a time; a multiple of 64.
    depth: the depth of a step.
    stages: the number of steps of each warpgroup in flight; fewer if they do not fit.
    warpgroups: the number of warpgroups of a block, which take its steps in turn. Their sums are added like those of a
        cluster's blocks.
    splits: the number of blocks of a cluster that share a tile's depth, 1, 2, 4 or 8. They add their sums through each
        other's shared memory, in a fixed order.
    fuses_norm: whether the launch also normalises x's rows, if the operation does so and norm.py supports it.
    in_flight: the number of steps, 0 or 1, whose products may be unfinished when a warpgroup goes on to the next; for
        16-bit weights only.
    """

    columns: int = 128
    depth: int = 64
    stages: int = 16
    warpgroups: int = 1
    splits: int = 1
    fuses_norm: bool = False
    in_flight: int = 0

    def fitted(self, *, stage_bytes: int, other_bytes: int) -> FewRowsConfig | None:
        """Returns the tiling with as many stages as fit beside `other_bytes`, or None if fewer than two fit."""
        fitting = (SHARED_BYTES - _RESERVED_BYTES - other_bytes) // (self.warpgroups * stage_bytes)
        return None if fitting < 2 else replace(self, stages=min(self.stages, fitting))


MOST_ROWS = 64
"""Up to this number of rows, reading the weights takes all the time."""
MOST_FUSED_NORM_ROWS = 16
"""Up to this number of rows, a norm in the launch was measured; with 64, its squares take most of the registers."""
_FEW_TOKENS = 16
"""Up to this number of rows, x takes little of the shared memory."""
_SOME_TOKENS = 24
"""Up to this number of rows, x leaves room for tiles of 128 columns."""
_DEEP = 8192
_LINE_BITS = 1024
"""Bits of an output's integers along the depth in one step."""
_WORTH = 0.7
"""The share of the multiprocessors that reads memory at its full rate."""
_NEARLY = 0.45
"""The least share of the multiprocessors with which a product computes its norm by `_NORMED`."""
_MOST_STAGES = 64
_NORMED = FewRowsConfig(columns=GROUP, depth=256, stages=4, fuses_norm=True, in_flight=1)
_NORMED_WIDE = FewRowsConfig(columns=2 * GROUP, warpgroups=2, stages=_MOST_STAGES, fuses_norm=True, in_flight=1)


def choose_few_rows(
    rows: int,
    n: int,
    k: int,
    *,
    weight_bits: int = 16,
    products: int = 1,
    is_normed: bool = False,
) -> FewRowsConfig:
    """Chooses the tiling for weights (k, n): the widest tiles that are enough for the multiprocessors.

    products: the number of weights. is_normed: whether x's rows are normalised first; the norm is fused where that was
    measured to be faster.
    """
    device = target_device()
    enough = _WORTH * device.core_count
    groups = -(-n // GROUP)
    if weight_bits < 16:
        return _choose_integers(rows, groups, k, weight_bits)
    is_fused = is_normed and rows <= MOST_FUSED_NORM_ROWS
    if is_fused and products == 1 and 2048 <= k < _DEEP and _NEARLY <= groups / device.core_count <= 2:
        return _NORMED if groups <= device.core_count else _NORMED_WIDE
    if groups >= 2 * enough:
        return _NORMED_WIDE if is_fused and products > 1 else FewRowsConfig(columns=2 * GROUP, stages=_MOST_STAGES)
    if groups >= enough or device.is_interpreted:  # the interpreter has no stores to another block's memory
        return FewRowsConfig(columns=GROUP, depth=128, warpgroups=2, stages=_MOST_STAGES)
    depth = 256 if rows <= _FEW_TOKENS and k >= 2048 else 128
    return FewRowsConfig(columns=GROUP, depth=depth, splits=2, stages=_MOST_STAGES)


def _choose_integers(rows: int, groups: int, k: int, bits: int) -> FewRowsConfig:
    """Chooses the tiling for integer weights.

    It has several warpgroups, because widening is slower than memory, but fewer for a large x.
    """
    device = target_device()
    enough = _WORTH * device.core_count
    line, warpgroups = _LINE_BITS // bits, 4 if rows <= _SOME_TOKENS else 2
    if groups >= enough or device.is_interpreted:
        columns = 2 * GROUP if groups >= 2 * enough and rows <= _SOME_TOKENS else GROUP
        return FewRowsConfig(columns=columns, depth=line, warpgroups=warpgroups, stages=_MOST_STAGES)
    depth = max(line, 256) if rows <= _SOME_TOKENS else line
    warpgroups = 3 if k > _DEEP and rows <= _SOME_TOKENS else 2
    return FewRowsConfig(columns=GROUP, depth=depth, splits=2, warpgroups=warpgroups, stages=_MOST_STAGES)
