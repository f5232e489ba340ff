"""How a call is cut: matrix products, chunks of the vocabulary, and whose logits are kept."""

from __future__ import annotations

from dataclasses import dataclass, replace

from pallas_kernels.primitives.gemm.config import GemmConfig, choose_config
from pallas_kernels.primitives.platform import target_device

CHUNK_UNIT = 256
"""Chunks of the vocabulary are multiples of it: of a tile's columns."""
ROW_UNIT = 64
"""Kept rows are a multiple of it, or all: of the rows that a warpgroup has of a tile."""
_FEWEST_ROWS, _FEWEST_TOKENS = 512, 32000
"""Of a call that takes the kernels unasked, of what was measured."""
_FEWEST_CHUNKS, _MOST_CHUNKS = 6, 12
"""Of a large vocabulary: a chunk's gradients are in memory at once, and each chunk adds to all of hidden's gradient."""


@dataclass(frozen=True, kw_only=True)
class LossConfig:
    """The cut of a call.

    statistics: of the product that gives the losses. recompute: of that which gives gradients of logits. hidden: of
    the product of a chunk's gradients with w. weight: of that with the hidden states. chunk: columns of the vocabulary
    that are worked at at a time in the backward pass, a multiple of 256. keeps_logits: where the gradient of w is asked
    for, its memory holds logits of the first rows until they are needed; else all are computed twice.
    """

    statistics: GemmConfig
    recompute: GemmConfig
    hidden: GemmConfig
    weight: GemmConfig
    chunk: int
    keeps_logits: bool = True


def default_config(rows: int, vocabulary: int, features: int) -> LossConfig:
    """The untuned choice for a (rows, vocabulary) array of logits with sums over so many features."""
    chunk = default_chunk(vocabulary, features)
    product = choose_config(rows, vocabulary)
    # Small buffers for float32 sums, so that four stages still fit.
    hidden = replace(choose_config(rows, features), store_columns=32)
    return LossConfig(
        statistics=product,
        recompute=product,
        hidden=hidden,
        weight=choose_config(features, chunk),
        chunk=chunk,
    )


def default_chunk(vocabulary: int, features: int) -> int:
    """Columns of a chunk: those with the fewest waves of tiles over the whole gradient of w."""
    cores, row_tiles = target_device().core_count, -(-features // 128)
    tiles = -(-vocabulary // CHUNK_UNIT)

    def waves(columns: int) -> int:
        whole, rest = divmod(tiles, columns)
        return whole * -(-columns * row_tiles // cores) + -(-rest * row_tiles // cores)

    fewest = max(1, -(-tiles // _MOST_CHUNKS))
    choices = range(fewest, max(fewest, tiles // _FEWEST_CHUNKS) + 1)
    return CHUNK_UNIT * min(choices, key=lambda columns: (waves(columns), columns))


def chunk_bounds(vocabulary: int, chunk: int) -> list[tuple[int, int]]:
    """First column and width of every chunk; a short last one is part of the one before."""
    starts = list(range(0, vocabulary, chunk))
    if len(starts) > 1 and vocabulary - starts[-1] < CHUNK_UNIT:
        starts.pop()
    return [(start, end - start) for start, end in zip(starts, [*starts[1:], vocabulary], strict=True)]


def kept_rows(rows: int, features: int) -> int:
    """How many rows of logits the memory of w's gradient holds."""
    return rows if rows <= features else features // ROW_UNIT * ROW_UNIT


def is_preferred(rows: int, vocabulary: int, features: int, *, keeps_gradients: bool) -> bool:
    """Whether the kernels run where the caller leaves the choice: where they were measured to be faster.

    keeps_gradients: whether the forward pass makes the gradients (a reduction, no loss scale). With all logits kept
    (no more tokens than features) an H200 was 1.08 times as fast as XLA, loss and gradients together, with 3 GB less
    memory (4096 tokens, 4096 features, vocabulary 128256). Further tokens' logits are computed twice: more work than
    XLA's.
    """
    return keeps_gradients and _FEWEST_ROWS <= rows <= features and vocabulary >= _FEWEST_TOKENS


def candidates(rows: int, vocabulary: int, features: int) -> dict[str, LossConfig]:
    """The configurations worth measuring, by name; those named "forward" concern the loss alone, too."""
    default = default_config(rows, vocabulary, features)
    plain = GemmConfig()
    found = {
        "forward: 128x256": replace(default, statistics=plain),
        "forward: 128x256 cluster m": replace(default, statistics=GemmConfig(cluster=2)),
        "forward: 128x128": replace(default, statistics=GemmConfig(tile_n=128, stages=6)),
        "all logits twice": replace(default, keeps_logits=False),
        "gradients 128x256": replace(default, hidden=replace(plain, store_columns=32), weight=plain),
    }
    tiles = default.chunk // CHUNK_UNIT
    if tiles > 1:
        found["half a chunk"] = replace(default, chunk=-(-tiles // 2) * CHUNK_UNIT)
    return found
