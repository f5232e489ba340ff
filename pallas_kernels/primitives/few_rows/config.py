"""How a product of few rows is cut up."""

from __future__ import annotations

from dataclasses import dataclass, replace

from pallas_kernels.primitives.gemm.config import SHARED_BYTES

_RESERVED_BYTES = 3072
"""For Mosaic GPU's own scratch (2048), barriers, alignment, and what a norm inside keeps of rows: 2776 were seen."""
GROUP = 64
"""Columns of the result that the tensor cores compute at a time: the product is made transposed."""


@dataclass(frozen=True, kw_only=True)
class WarpsCut:
    """How a product is cut up whose steps are shared by warps, see by_warps.py.

    columns: of a block, 64 or 128; of a product with rotated heads, a head. depth: of a step. stages: steps under way.
    warpgroups: that compute; one more sends.
    """

    columns: int = GROUP
    depth: int = 256
    stages: int = 4
    warpgroups: int = 1


@dataclass(frozen=True, kw_only=True)
class FewRowsConfig:
    """The cut of a (rows, K) x (K, N) product.

    columns: of the result, of each accumulator, that a block computes at a time; a multiple of 64.
    depth: of a step.
    stages: steps of each warpgroup under way at once; fewer where they do not fit.
    warpgroups: of a block, which take its steps in turn; their sums meet as those of a cluster's blocks do.
    splits: blocks of a cluster that share a tile's depth, 1, 2, 4 or 8. They add up what they have through one
        another's shared memory, in a fixed order.
    norm_inside: whether an operation that normalises x's rows has this launch do it, where that can (see norm.py), and
        not one before it.
    in_parts: whether integers of a step, with a scale an output, are widened in parts of 64 along the depth, a product
        each.
    in_flight: steps whose products are still under way when a warpgroup goes on to the next, 0 or 1; of 16-bit weights.
    by_warps: the cut instead of this one, where the product has a norm inside and it fits.
    direct: whether results go from registers to device memory where they can, not through shared memory.
    """

    columns: int = 128
    depth: int = 64
    stages: int = 16
    warpgroups: int = 1
    splits: int = 1
    norm_inside: bool = False
    in_parts: bool = False
    in_flight: int = 0
    direct: bool = False
    by_warps: WarpsCut | None = None

    def fitted(self, *, stage_bytes: int, other_bytes: int) -> FewRowsConfig | None:
        """The same with as many stages as fit beside `other_bytes`; None where those are not even two."""
        fitting = (SHARED_BYTES - _RESERVED_BYTES - other_bytes) // (self.warpgroups * stage_bytes)
        return None if fitting < 2 else replace(self, stages=min(self.stages, fitting))
