"""Launch configurations of the projections' kernel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import jax

from pallas_kernels.ops._products.product import Config
from pallas_kernels.ops.rope.heads_kernel import HeadNorm
from pallas_kernels.primitives.few_rows.config import FewRowsConfig
from pallas_kernels.primitives.few_rows.heads import HEAD_SIZES
from pallas_kernels.primitives.gemm.config import EVEN, FEW_ROWS, MANY_ROWS, NARROW, GemmConfig
from pallas_kernels.primitives.platform import target_device

MOST_FEW_ROWS = 16
_SPLIT_FEATURES = 4096
"""Split-K pays from this many features on; see TUNING.md."""
_SPLIT_BLOCKS = 0.75
"""Split-K makes at most this many blocks a multiprocessor."""
NARROW_COST = 1.25
"""How much longer a column takes in tiles of 128 columns. 3264 rows of 2048 features, 2048 and twice 512 outputs take
78.9 µs in three waves of wide tiles, 85.8 in five of narrow ones; 128 rows of 1024, three times 1024, 15.2 and 10.1."""


@dataclass(frozen=True, kw_only=True)
class HeadForm:
    """The static parameters of the heads' norms and rotation.

    size: columns of a head, or None if heads are neither normalised nor rotated.
    norms: of query and key heads, each None for no norm.
    """

    size: int | None = None
    is_rotated: bool = False
    norms: tuple[HeadNorm | None, HeadNorm | None] = (None, None)

    @property
    def is_normed(self) -> bool:
        """Whether query or key heads are normalised."""
        return self.norms != (None, None)


def chosen_config(x: jax.Array, weights: Sequence[jax.Array], form: HeadForm) -> Config:
    """Returns the configuration for x (rows, features)."""
    (rows, features), widths = x.shape, [w.shape[1] for w in weights]
    return default_config(rows, widths, features=features, head_size=form.size)


def default_config(rows: int, widths: Sequence[int], *, features: int, head_size: int | None) -> Config:
    """Returns the configuration: for few rows the transposed product, if its tiles hold whole heads."""
    config = _transposed(head_size)
    if rows > MOST_FEW_ROWS or config is None:
        return gemm_config(rows, widths, head_size=head_size)
    return replace(config, splits=_split_k(features, sum(-(-width // config.columns) for width in widths)))


def gemm_config(rows: int, widths: Sequence[int], *, head_size: int | None) -> GemmConfig:
    """Returns the configuration for the kernel that also rotates heads, which must lie whole in a tile.

    widths: columns of each weight, which has tiles of its own.
    """
    if rows <= FEW_ROWS:
        return GemmConfig(tile_m=64, tile_n=max(128, head_size or 0), tile_k=128, stages=8, warpgroups=1)
    wide = EVEN if rows >= MANY_ROWS else GemmConfig()
    if (head_size or 0) > NARROW.tile_n:
        return wide

    def cost(config: GemmConfig) -> int:
        tiles = -(-rows // config.tile_m) * sum(-(-width // config.tile_n) for width in widths)
        return -(-tiles // target_device().core_count) * config.tile_n

    return NARROW if NARROW_COST * cost(NARROW) < cost(wide) else wide


def _split_k(features: int, tiles: int) -> int:
    """Returns the split-K factor."""
    device = target_device()
    if features < _SPLIT_FEATURES or device.is_interpreted:  # the interpreter has no stores to another block's memory
        return 1
    return next((splits for splits in (8, 4) if tiles * splits <= _SPLIT_BLOCKS * device.core_count), 1)


def _transposed(head_size: int | None) -> FewRowsConfig | None:
    """Returns the transposed product's tiles of a head, or of 128 columns, or None if halves of heads are no groups.

    A norm of x is in the launch. `primitives/few_rows/TUNING.md` has the measurements of other tilings.
    """
    if head_size is not None and head_size not in HEAD_SIZES:
        return None
    return FewRowsConfig(columns=head_size or 128, depth=64, warpgroups=4, stages=64, fuses_norm=True)
