"""How the cache is split among blocks: the untuned choice, and the candidates worth measuring."""

from __future__ import annotations

from dataclasses import dataclass, replace

SHARED_BYTES = 227 * 1024
"""Shared memory that a block may have."""
ROWS = 64
"""Rows of a product of the tensor cores."""
TILE_KEYS = 64
"""Keys of a tile: 128 are as fast (two parts 486.0, then 484.5 µs)."""
QUERIES = 2
"""Buffers for queries, so that those of the next part come early."""
_OTHER_BYTES = 4096
"""Shared memory for barriers and the compiler's reductions."""
_FEWEST_KEYS = 128
"""Keys of a sequence's part: fewer are not worth a start."""
_MOST_SPLITS = 64
_NEAR = 0.96
"""A share of the multiprocessors' time: cutting further is worth more than this only."""


@dataclass(frozen=True, kw_only=True)
class DecodeConfig:
    """How one launch splits its work: as many blocks as multiprocessors, each with several parts of sequences.

    splits: parts of each sequence's keys, for blocks of their own.
    warpgroups: computing ones, which take a part's tiles in turn.
    stages: tiles of keys and as many of values that a computing warpgroup has room for.
    """

    splits: int = 1
    warpgroups: int = 2
    stages: int = 8

    def fitted(self, *, head_size: int, itemsize: int) -> DecodeConfig:
        """The configuration with as many stages as fit."""
        query = QUERIES * ROWS * head_size * itemsize
        staging = self.warpgroups * ROWS * (stored_columns(head_size) + 2) * 4
        stage = 2 * self.warpgroups * TILE_KEYS * head_size * itemsize
        room = SHARED_BYTES - _OTHER_BYTES - query - staging
        return replace(self, stages=max(1, min(self.stages, room // stage)))


def stored_columns(head_size: int) -> int:
    """Columns of a result that are joined and stored at a time."""
    return 64 if head_size % 64 == 0 else 32


def default_config(*, sequences: int, keys: int, head_size: int, cores: int) -> DecodeConfig:
    """The untuned choice for so many pairs of a sequence and a head of keys, each of `keys` keys."""
    # Beyond 128 columns two rings would have room for a tile or two each.
    return DecodeConfig(splits=choose_splits(sequences, keys, cores), warpgroups=2 if head_size <= 128 else 1)


def choose_splits(sequences: int, keys: int, cores: int) -> int:
    """The fewest parts that keep nearly all multiprocessors busy until the end."""
    most = max(1, min(_MOST_SPLITS, keys // _FEWEST_KEYS))

    def busy(splits: int) -> float:
        parts = sequences * splits
        return parts / (-(-parts // cores) * cores)

    best = max(busy(splits) for splits in range(1, most + 1))
    return next(splits for splits in range(1, most + 1) if busy(splits) >= _NEAR * best)


def candidates(keys: int) -> dict[str, DecodeConfig]:
    """The configurations worth measuring, by name."""
    return {f"{n} parts": DecodeConfig(splits=n) for n in (1, 2, 4, 8, 16, 33) if n * _FEWEST_KEYS <= keys}
