"""How the cache is split among blocks, and what fits in shared memory."""

from __future__ import annotations

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


def fitting_stages(most: int, *, warpgroups: int, head_size: int, itemsize: int, new_tokens: int = 0) -> int:
    """The stages of a consumer's ring that fit in shared memory; `new_tokens` go into the caches."""
    query = (QUERIES * ROWS + 2 * new_tokens) * head_size * itemsize
    staging = warpgroups * ROWS * (stored_columns(head_size) + 2) * 4
    stage = 2 * warpgroups * TILE_KEYS * head_size * itemsize
    room = SHARED_BYTES - _OTHER_BYTES - query - staging
    return max(1, min(most, room // stage))


def stored_columns(head_size: int) -> int:
    """Columns of a result that are combined and stored at a time."""
    return 64 if head_size % 64 == 0 else 32


def choose_splits(sequences: int, keys: int, cores: int) -> int:
    """The fewest parts that keep nearly all multiprocessors busy until the end.

    sequences: pairs of a sequence and a key head, each with `keys` keys.
    """
    most = max(1, min(_MOST_SPLITS, keys // _FEWEST_KEYS))

    def busy(splits: int) -> float:
        parts = sequences * splits
        return parts / (-(-parts // cores) * cores)

    best = max(busy(splits) for splits in range(1, most + 1))
    return next(splits for splits in range(1, most + 1) if busy(splits) >= _NEAR * best)
