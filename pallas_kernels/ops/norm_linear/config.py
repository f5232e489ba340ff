"""When the normalised linear layer prefers its kernels, which have `linear`'s configurations."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from pallas_kernels.arguments import Norm
from pallas_kernels.ops._products.layer import Layer, LayerArrays
from pallas_kernels.ops.linear.config import is_preferred as is_linear_preferred
from pallas_kernels.primitives.few_rows.config import MOST_FUSED_NORM_ROWS, MOST_ROWS, choose_few_rows
from pallas_kernels.primitives.gemm.config import estimated_us

FEWEST_ROWS = 512
"""The fewest rows for which the norm's backward kernel was measured to outweigh a slower product. With gradients, 640
rows of 896 features and outputs take 29.9 µs, by XLA 34.2; 4096 of 1280 and 1152 107.7 and 143.1 (H200)."""


def preferred(layer: Layer, arrays: LayerArrays, norm: Norm) -> tuple[Sequence[str], bool]:
    """Returns the implementations to try if the caller requests none, and whether the kernel is the best forward."""
    (*leading, features), outputs = arrays.x.shape, arrays.w.shape[1]
    rows = prod(leading)
    is_best = is_preferred(rows, outputs, features, has_activation=layer.activation is not None)
    has_best_gradient = norm.mean_square is None and arrays.residual is None and rows >= FEWEST_ROWS
    return ("mosaic",) if is_best or has_best_gradient else (), is_best


def is_preferred(rows: int, outputs: int, features: int, *, has_activation: bool) -> bool:
    """Whether the kernels are faster than XLA, as measured or estimated.

    On an H200, 4096 features: 1.15 times as fast as XLA at 512 rows with LayerNorm, bias, gelu and 16384 outputs, 1.01
    at 8192 rows with RMSNorm and 4096 outputs. With RMSNorm in the launch, at 16 rows and at 1: 1.22 and 1.33 for 4096
    outputs, 1.28 and 1.26 for 6144, 1.19 and 1.23 for 8192, 1.12 and 1.06 for 14336. At 64 rows of 6656 features and
    outputs, with given mean squares, 1.28.
    """
    if rows <= MOST_FUSED_NORM_ROWS:
        return choose_few_rows(rows, outputs, features, is_normed=True).fuses_norm
    if rows <= MOST_ROWS:
        return is_linear_preferred(rows, outputs, features, has_activation=has_activation)
    ours, xla = estimated_us(rows, outputs, features, is_fused=not has_activation)
    return ours < xla
