"""How the cache is split among blocks: the default configuration."""

from __future__ import annotations

from dataclasses import dataclass, replace

from pallas_kernels.primitives.hopper import SHARED_BYTES

HEAD_SIZES = (64, 96, 128, 192, 256)
"""Columns of the heads that the kernel takes."""
ROWS = 64
"""Rows of a product of the tensor cores."""
TILE_KEYS = 64
"""Keys of a tile: 128 are as fast (two parts 486.0, then 484.5 µs)."""
QUERIES = 2
"""Buffers for queries, so that those of the next part are loaded early."""
_OTHER_BYTES = 4096
"""Shared memory for barriers and the compiler's reductions."""
_FEWEST_KEYS = 128
"""The least keys of a part: fewer are not worth its overhead."""
_MOST_SPLITS = 64
_NEAR = 0.96
"""The share of the best occupancy that fewer parts must reach to be taken."""


@dataclass(frozen=True, kw_only=True)
class DecodeConfig:
    """How a launch splits its work: one block a multiprocessor, each with several parts of sequences.

    splits: parts of each sequence's keys.
    warpgroups: consumers, which take a part's tiles in turn.
    stages: key tiles, and value tiles, in each consumer's ring.
    """

    splits: int = 1
    warpgroups: int = 2
    stages: int = 8

    def fitted(self, *, head_size: int, itemsize: int, new_tokens: int = 0) -> DecodeConfig:
        """The configuration with only as many stages as fit in shared memory; `new_tokens` go into the caches."""
        query = (QUERIES * ROWS + 2 * new_tokens) * head_size * itemsize
        staging = self.warpgroups * ROWS * (stored_columns(head_size) + 2) * 4
        stage = 2 * self.warpgroups * TILE_KEYS * head_size * itemsize
        room = SHARED_BYTES - _OTHER_BYTES - query - staging
        return replace(self, stages=max(1, min(self.stages, room // stage)))


def stored_columns(head_size: int) -> int:
    """Columns of a result that are combined and stored at a time."""
    return 64 if head_size % 64 == 0 else 32


def default_config(*, sequences: int, keys: int, head_size: int, cores: int) -> DecodeConfig:
    """The default configuration; sequences: pairs of a sequence and a key head, each with `keys` keys."""
    # With larger heads, two rings would have room for a tile or two each.
    return DecodeConfig(splits=choose_splits(sequences, keys, cores), warpgroups=2 if head_size <= 128 else 1)


def choose_splits(sequences: int, keys: int, cores: int) -> int:
    """The fewest parts that keep nearly all multiprocessors busy until the end."""
    most = max(1, min(_MOST_SPLITS, keys // _FEWEST_KEYS))

    def busy(splits: int) -> float:
        parts = sequences * splits
        return parts / (-(-parts // cores) * cores)

    best = max(busy(splits) for splits in range(1, most + 1))
    return next(splits for splits in range(1, most + 1) if busy(splits) >= _NEAR * best)
