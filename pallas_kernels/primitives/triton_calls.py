"""Checks where the Triton kernels run, and sizes their blocks. Does not import Triton itself."""

from __future__ import annotations

from importlib.util import find_spec

import jax

from pallas_kernels.primitives.platform import target_device

TRITON_DTYPES = ("bfloat16", "float16", "float32")
SHORTEST_ROW = 128
"""Shorter rows leave most lanes of a warp idle, and XLA is as fast."""
LONGEST_ROW = 32768
"""The longest row in the registers of one block: 32 values per thread of 32 warps."""


def triton_unsupported(x: jax.Array) -> str | None:
    """Returns why Triton kernels over the rows of `x` cannot run on the device of this trace, or None if they can."""
    if x.dtype.name in TRITON_DTYPES and x.ndim and x.size and not SHORTEST_ROW <= x.shape[-1] <= LONGEST_ROW:
        return f"rows have {x.shape[-1]} features, the kernels take {SHORTEST_ROW} to {LONGEST_ROW}"
    return triton_missing(x)


def triton_missing(x: jax.Array) -> str | None:
    """Returns why Triton kernels that take any shape cannot run on the device of this trace, or None if they can."""
    if x.dtype.name not in TRITON_DTYPES:
        return f"x is {x.dtype.name}, the kernels take {', '.join(TRITON_DTYPES)}"
    if find_spec("jax_triton") is None:
        return "jax_triton is not installed: pip install 'xlafuse[triton]'"
    device = target_device()
    if device.platform != "cuda":
        return f"the kernels are for NVIDIA GPUs and this trace is for {device.kind!r} ({device.platform})"
    return None


def row_block(features: int) -> tuple[int, int]:
    """Returns the columns, a power of two, and the warps of the block that holds a row: about 16 values per thread."""
    columns = 1 << max(0, features - 1).bit_length()
    return columns, max(1, min(16, columns // 512))
