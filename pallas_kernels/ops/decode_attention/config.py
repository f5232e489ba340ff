"""How the cache is cut up among blocks: what is chosen untuned, and what is worth measuring."""

from __future__ import annotations

from dataclasses import dataclass, replace

SHARED_BYTES = 227 * 1024
"""What a block may have."""
ROWS = 64
"""Rows of a product of the tensor cores."""
_OTHER_BYTES = 4096
"""Of shared memory, for barriers and what the compiler reduces in."""
_FEWEST_KEYS = 128
"""Of a sequence's part: fewer are not worth a start."""
_MOST_SPLITS = 64
_NEAR = 0.96
"""A share of the multiprocessors' time: cutting further is worth more than this only."""


@dataclass(frozen=True, kw_only=True)
class DecodeConfig:
    """The cut of one launch.

    splits: parts of each sequence's keys, for blocks of their own.
    tile_keys: keys of a tile, a multiple of 64.
    warpgroups: computing ones, which take a part's tiles in turn.
    stages: tiles of keys and as many of values that a computing warpgroup has room for.
    is_persistent: as many blocks as multiprocessors, each with several parts; else a block a part.
    """

    splits: int = 1
    tile_keys: int = 64
    warpgroups: int = 2
    stages: int = 8
    is_persistent: bool = True
    compute_registers: int | None = 240
    memory_registers: int | None = 24

    def fitted(self, *, head_size: int, itemsize: int) -> DecodeConfig:
        """The same with as many stages as there is room for."""
        query = (2 if self.is_persistent else 1) * ROWS * head_size * itemsize
        staging = self.warpgroups * ROWS * (stored_columns(head_size) + 2) * 4
        stage = 2 * self.warpgroups * self.tile_keys * head_size * itemsize
        room = SHARED_BYTES - _OTHER_BYTES - query - staging
        return replace(self, stages=max(1, min(self.stages, room // stage)))


def stored_columns(head_size: int) -> int:
    """Of a result, that are put together and leave at once."""
    return 64 if head_size % 64 == 0 else 32


def default_config(*, sequences: int, keys: int, head_size: int, cores: int) -> DecodeConfig:
    """The untuned choice for so many pairs of a sequence and a head of keys, each of `keys` keys."""
    config = DecodeConfig(splits=choose_splits(sequences, keys, cores))
    if head_size <= 128:
        return config
    # Two rings would have room for a tile or two each.
    return replace(config, warpgroups=1, compute_registers=None, memory_registers=None)


def choose_splits(sequences: int, keys: int, cores: int) -> int:
    """The fewest parts that keep nearly all multiprocessors busy until the end."""
    most = max(1, min(_MOST_SPLITS, keys // _FEWEST_KEYS))

    def busy(splits: int) -> float:
        parts = sequences * splits
        return parts / (-(-parts // cores) * cores)

    best = max(busy(splits) for splits in range(1, most + 1))
    return next(splits for splits in range(1, most + 1) if busy(splits) >= _NEAR * best)


def candidates(*, sequences: int, keys: int, cores: int) -> dict[str, DecodeConfig]:
    """The configurations worth measuring, by name."""
    found = {f"{n} parts": DecodeConfig(splits=n) for n in (1, 2, 4, 8, 16, 33) if n * _FEWEST_KEYS <= keys}
    splits = choose_splits(sequences, keys, cores)
    found["tiles of 128"] = DecodeConfig(splits=splits, tile_keys=128)
    found["a block a part"] = DecodeConfig(splits=splits, is_persistent=False)
    found["three warpgroups"] = DecodeConfig(splits=splits, warpgroups=3, compute_registers=160)
    return found
