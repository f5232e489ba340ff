"""Launch configurations: the matrix products, the chunks of the vocabulary, and which logits are kept."""

from __future__ import annotations

from pallas_kernels.primitives.gemm.config import fills
from pallas_kernels.primitives.gemm.operands import COLUMNS, FEWEST_OUTPUTS
from pallas_kernels.primitives.platform import target_device

CHUNK_UNIT = 256
"""Chunks of the vocabulary are multiples of this, a tile's columns."""
_FEWEST_ROWS, _FEWEST_TOKENS = 512, 32000
"""The smallest sizes for which the kernels are preferred; smaller ones have not been measured."""
_MANY_LOGITS = 2**23
"""Logits that do not stay in the L2 cache between XLA's launches."""
_FEWEST_CHUNKS, _MOST_CHUNKS = 6, 12
"""The number of chunks of a large vocabulary. A chunk's gradients are in memory at once, so chunks must not be large;
each chunk adds to all of hidden's gradient, so there must not be many."""


def columns_for(vocabulary: int) -> int:
    """Returns the columns of w that the kernels take for a vocabulary, or the vocabulary if it is too small for them.

    Behind the vocabulary they are zeros. Copying them costs at most as much as a product of the 512 rows for which the
    kernels are preferred. XLA's own products of odd vocabularies take 2.2 to 2.9 times as long.
    """
    return vocabulary if vocabulary < FEWEST_OUTPUTS else -(-vocabulary // COLUMNS) * COLUMNS


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


def is_preferred(rows: int, vocabulary: int, features: int, *, keeps_gradients: bool) -> bool:
    """Whether the kernels were measured to be faster than XLA, and so are preferred.

    keeps_gradients: whether the forward pass computes the gradients (a reduction, no loss scale).

    With all logits kept (no more tokens than features), loss and gradients took 1/1.08 of XLA's time on an H200, with
    3 GB less memory (4096 tokens, 4096 features, vocabulary 128256). With more tokens all logits are computed
    twice, which is more work than XLA's.
    """
    return keeps_gradients and _FEWEST_ROWS <= rows <= features and vocabulary >= _FEWEST_TOKENS


def is_preferred_forward(rows: int, vocabulary: int) -> bool:
    """Whether the kernel is preferred where no gradient is taken: it never writes the logits.

    Losses of 8192 tokens with 64 features and a vocabulary of 1408 take 18.8 µs on an H100, by XLA 72.8. With more
    features the product is a larger part: 1.08 times as fast on an H200 with 4096, 1.21 times with 2048.
    """
    return rows >= _FEWEST_ROWS and rows * vocabulary >= _MANY_LOGITS and fills(rows, vocabulary)
