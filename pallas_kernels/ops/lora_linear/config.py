"""Which launches a call of the low-rank corrected linear layer takes, and when it is preferred."""

from __future__ import annotations

DEPTH = 64
"""If XLA computes x @ a, ranks are padded with zeros to a multiple of this, the depth of a step of the main loop."""
MOST_RANK_OF_ONE_LAUNCH = 64
"""The columns of the buffers through which x @ a is stored."""
_ONE_LAUNCH_ROWS = 512
"""With fewer rows nothing has been measured."""
_MANY_ROWS = 2048


def takes_one_launch(rows: int, rank: int) -> bool:
    """Whether a few blocks of the launch compute x @ a for all; otherwise XLA computes it before."""
    return rank <= MOST_RANK_OF_ONE_LAUNCH and _ONE_LAUNCH_ROWS <= rows < _MANY_ROWS


def preferred(rows: int, outputs: int, features: int, rank: int) -> tuple[str, ...]:
    """The implementations to try before XLA: the kernel where it was measured to be faster.

    On an H200 8192 rows take 0.86 of XLA's time (4096 features and outputs, rank 16). 512 rows take 0.73 and 0.71 (4096
    and 14336 outputs), 9 and 33 µs less, and 512 to 1536 rows of 256 to 1024 features 0.56 to 0.93. The backward pass
    loses some of that, since it computes x @ a again: 14456 rows of 14720 features and 512 outputs take 2258 µs with
    their gradients, XLA 1879. Few outputs make few blocks with long loops, too: 1024 rows of 8192 features and 256
    outputs take 40.6 µs forward, XLA 22.2.
    """
    is_wide = features < 4 * outputs
    return ("mosaic",) if is_wide and (rows >= _MANY_ROWS or takes_one_launch(rows, rank)) else ()
