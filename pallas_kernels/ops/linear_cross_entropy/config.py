"""Launch configurations: the matrix products, the chunks of the vocabulary, and which logits are kept."""

from __future__ import annotations

from dataclasses import dataclass, replace

from pallas_kernels.primitives.gemm.config import GemmConfig, choose_config, fills
from pallas_kernels.primitives.gemm.operands import COLUMNS, FEWEST_OUTPUTS
from pallas_kernels.primitives.platform import target_device

CHUNK_UNIT = 256
"""Chunks of the vocabulary are multiples of this, a tile's columns."""
ROW_UNIT = 64
"""Kept rows are all rows or a multiple of this, a warpgroup's rows of a tile."""
_FEWEST_ROWS, _FEWEST_TOKENS = 512, 32000
"""The smallest sizes for which the kernels are preferred; smaller ones have not been measured."""
_MANY_LOGITS = 2**23
"""Logits that do not stay in the L2 cache between XLA's launches."""
_FEWEST_CHUNKS, _MOST_CHUNKS = 6, 12
"""The number of chunks of a large vocabulary. A chunk's gradients are in memory at once, so chunks must not be large;
each chunk adds to all of hidden's gradient, so there must not be many."""


@dataclass(frozen=True, kw_only=True)
class LossConfig:
    """The launch configurations of a call's products, and its chunks.

    statistics: of the product for the losses. recompute: of the product that computes logits again for their
    gradients. hidden: of the product of a chunk's gradients and w. weight: of their product with the hidden states.
    chunk: columns of the vocabulary that the backward pass takes at a time, a multiple of 256.
    """

    statistics: GemmConfig
    recompute: GemmConfig
    hidden: GemmConfig
    weight: GemmConfig
    chunk: int


def columns_for(vocabulary: int) -> int:
    """Returns the columns of w that the kernels take for a vocabulary, or the vocabulary if it is too small for them.

    Behind the vocabulary they are zeros. Copying them costs at most as much as a product of the 512 rows for which the
    kernels are preferred. XLA's own products of odd vocabularies take 2.2 to 2.9 times as long.
    """
    return vocabulary if vocabulary < FEWEST_OUTPUTS else -(-vocabulary // COLUMNS) * COLUMNS


def default_config(rows: int, vocabulary: int, features: int) -> LossConfig:
    """Returns the untuned configuration for (rows, vocabulary) logits with sums over `features`."""
    chunk = default_chunk(vocabulary, features)
    product = choose_config(rows, vocabulary)
    # Small buffers for float32 sums, so that four stages fit.
    hidden = replace(choose_config(rows, features), store_columns=32)
    return LossConfig(
        statistics=product,
        recompute=product,
        hidden=hidden,
        weight=choose_config(features, chunk),
        chunk=chunk,
    )


def default_chunk(vocabulary: int, features: int) -> int:
    """Returns the chunk width that needs the fewest waves of tiles for the whole gradient of w."""
    cores, row_tiles = target_device().core_count, -(-features // 128)
    tiles = -(-vocabulary // CHUNK_UNIT)

    def waves(columns: int) -> int:
        whole, rest = divmod(tiles, columns)
        return whole * -(-columns * row_tiles // cores) + -(-rest * row_tiles // cores)

    fewest = max(1, -(-tiles // _MOST_CHUNKS))
    choices = range(fewest, max(fewest, tiles // _FEWEST_CHUNKS) + 1)
    return CHUNK_UNIT * min(choices, key=lambda columns: (waves(columns), columns))


def chunk_bounds(vocabulary: int, chunk: int) -> list[tuple[int, int]]:
    """Returns first column and width of every chunk; a short last chunk is merged with the one before."""
    starts = list(range(0, vocabulary, chunk))
    if len(starts) > 1 and vocabulary - starts[-1] < CHUNK_UNIT:
        starts.pop()
    return [(start, end - start) for start, end in zip(starts, [*starts[1:], vocabulary], strict=True)]


def kept_rows(rows: int, features: int) -> int:
    """Returns how many rows of logits the memory of w's gradient holds."""
    return rows if rows <= features else features // ROW_UNIT * ROW_UNIT


def is_preferred(rows: int, vocabulary: int, features: int, *, keeps_gradients: bool) -> bool:
    """Whether the kernels were measured to be faster than XLA, and so are preferred.

    keeps_gradients: whether the forward pass computes the gradients (a reduction, no loss scale).

    With all logits kept (no more tokens than features), loss and gradients took 1/1.08 of XLA's time on an H200, with
    3 GB less memory (4096 tokens, 4096 features, vocabulary 128256). The logits of further tokens are computed twice,
    which is more work than XLA's.
    """
    return keeps_gradients and _FEWEST_ROWS <= rows <= features and vocabulary >= _FEWEST_TOKENS


def is_preferred_forward(rows: int, vocabulary: int) -> bool:
    """Whether the kernel is preferred where no gradient is taken: it never writes the logits.

    Losses of 8192 tokens with 64 features and a vocabulary of 1408 take 18.8 µs on an H100, by XLA 72.8. With more
    features the product is a larger part: 1.08 times as fast on an H200 with 4096, 1.21 times with 2048.
    """
    return rows >= _FEWEST_ROWS and rows * vocabulary >= _MANY_LOGITS and fills(rows, vocabulary)
