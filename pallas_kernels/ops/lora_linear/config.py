"""Launch configurations of the low-rank corrected linear layer: what is chosen untuned, and what is worth measuring."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from pallas_kernels.primitives.gemm.choice import MIXED, choose_config
from pallas_kernels.primitives.gemm.config import SHARED_BYTES, GemmConfig

DEPTH = 64
"""Ranks are filled up with zeros to a multiple of it where x @ a is an array: a step of the main loop."""
_JOINT_RANKS = (16, 32, 64)
"""Ranks are filled up to one of them where x @ a stays on the chip: multiples of what the tensor cores take at a time,
and divisors of a step's depth."""
MOST_JOINT_RANK = _JOINT_RANKS[-1]
"""The accumulators of x @ w and x @ a share the registers of a warpgroup."""
_AHEAD_ROWS = 512
"""With fewer nothing has been measured."""
_MANY_ROWS = 2048
_FEWEST_MEASURED = 4096
"""Features and outputs, with fewer rows than those."""
_OTHER_BYTES = 3072
"""Of shared memory, for barriers, alignment and Mosaic GPU's own scratch."""


@dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """The cut of a call.

    product: of x @ w; two computing warpgroups at least share the rows of a tile. Tiles of several widths only "ahead".
    low: where x @ a is computed. "before": once, by a launch of XLA's; the kernel takes it and b for more depth of x
        and w. "inside": by every block for its own rows, along with x @ w, in one launch. "ahead": in the same launch
        by a few blocks for all.
    """

    product: GemmConfig
    low: Literal["before", "inside", "ahead"]

    def fitted(self, *, rank: int, itemsize: int) -> GemmConfig:
        """The product's cut with as many stages as fit. rank: filled up."""
        if self.low != "inside":
            return self.product.fitted(itemsize=itemsize, operands=(1, 1), products=1, stored_bytes=itemsize)
        cut = replace(self.product, store_slots=1)
        store = cut.tile_m * min(cut.store_columns, cut.tile_n) * itemsize
        stage = (cut.tile_m + cut.tile_n + rank) * cut.tile_k * itemsize
        return replace(cut, stages=max(2, min(cut.stages, (SHARED_BYTES - _OTHER_BYTES - store) // stage)))


def joint_rank(rank: int) -> int:
    """What a rank is filled up to where x @ a stays on the chip."""
    return next(size for size in _JOINT_RANKS if size >= rank)


def default_config(rows: int, outputs: int, features: int, rank: int) -> LoraConfig:
    """The untuned choice for a (rows, outputs) result with sums over so many features."""
    del features
    if rank <= MOST_JOINT_RANK and _AHEAD_ROWS <= rows < _MANY_ROWS:
        return LoraConfig(product=choose_config(rows, outputs, is_mixed=True), low="ahead")
    inside = rows < _AHEAD_ROWS and rank <= MOST_JOINT_RANK
    return LoraConfig(product=choose_config(rows, outputs), low="inside" if inside else "before")


def default_gradient_config(rows: int, outputs: int, features: int) -> GemmConfig | None:
    """Of the kernel for x's gradient; None for XLA's products, which it has not been measured against."""
    del rows, outputs, features


def is_preferred(rows: int, outputs: int, features: int, rank: int) -> bool:
    """Whether the kernel runs where the caller leaves the choice: where it was measured to be faster.

    On an H200 8192 rows take 0.86 of XLA's time (4096 features and outputs, rank 16). 512 rows take 0.73 and 0.71 (4096
    and 14336 outputs): 9 and 33 µs less. A gradient gives some of that back: x @ a is computed again, a launch.
    """
    is_large = min(outputs, features) >= _FEWEST_MEASURED and rank <= MOST_JOINT_RANK
    return rows >= _MANY_ROWS or (rows >= _AHEAD_ROWS and is_large)


def candidates(rows: int, rank: int) -> dict[str, LoraConfig]:
    """The configurations worth measuring, by name."""
    cuts = {"128x256": GemmConfig()}
    if rows >= _MANY_ROWS:
        cuts["128x256 cluster m"] = GemmConfig(cluster="m")
    else:
        cuts["128x128"] = GemmConfig(tile_n=128, stages=6)
        cuts["128x224"] = GemmConfig(tile_n=224, store_columns=32, store_slots=4)
    found = {f"{name}, x @ a before": LoraConfig(product=cut, low="before") for name, cut in cuts.items()}
    if rank > MOST_JOINT_RANK:
        return found
    found |= {f"{name}, x @ a inside": LoraConfig(product=cut, low="inside") for name, cut in cuts.items()}
    ahead = {name: LoraConfig(product=cut, low="ahead") for name, cut in cuts.items() if cut.cluster is None}
    ahead["128x(256+192)"] = LoraConfig(product=MIXED[1], low="ahead")
    return found | {f"{name}, x @ a ahead": cut for name, cut in ahead.items() if rank <= cut.product.store_columns}
