"""The linear layers' key in the tuned table, their configuration, and when their kernels are preferred."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod

from pallas_kernels import tuning
from pallas_kernels.arguments import Norm
from pallas_kernels.ops._products.layer import Layer, LayerArrays
from pallas_kernels.ops._products.product import Config, default_config
from pallas_kernels.primitives.few_rows.config import MOST_FUSED_NORM_ROWS, MOST_ROWS, choose_few_rows
from pallas_kernels.primitives.gemm.config import (
    EVEN,
    MIXED,
    MOST_MIXED_ROWS,
    NARROW,
    GemmConfig,
    choose_config,
    estimated_us,
)

FEWEST_FEATURES = 4096
"""The fewest features of plain products; with fewer, nothing has been measured."""
FEWEST_NORMED_ROWS = 512
"""The fewest rows for which the norm's backward kernel was measured to outweigh a slower product. With gradients, 640
rows of 896 features and outputs take 29.9 µs, by XLA 34.2; 4096 of 1280 and 1152 107.7 and 143.1 (H200)."""
MOST_SQUARED_FEW_ROWS, FEWEST_SQUARED_FEATURES, FEWEST_SQUARED_OUTPUTS = 16, 8192, 4096
"""The measured range of the product of few rows with mean squares."""


def tuned_key(layer: Layer, arrays: LayerArrays) -> tuning.Key:
    """Returns the layer's key in the tuned table; reads only shapes and dtypes of the arrays."""
    x, w, bias, residual = arrays
    name = None if layer.activation is None else layer.activation.name
    present = ("bias" if bias is not None else None, name, "residual" if residual is not None else None)
    return {
        "rows": tuning.near(prod(x.shape[:-1])),
        "features": w.shape[0],
        "outputs": w.shape[1],
        "dtype": x.dtype.name if layer.out_dtype == x.dtype else f"{x.dtype.name}-to-{layer.out_dtype.name}",
        "behind": "+".join(filter(None, present)) or "nothing",
    }


def preferred(layer: Layer, arrays: LayerArrays) -> Sequence[str]:
    """Returns the implementations to try if the caller requests none: the measured best, else by a rule."""
    x, w, _, residual = arrays
    is_best = is_preferred(
        prod(x.shape[:-1]),
        w.shape[1],
        w.shape[0],
        has_activation=layer.activation is not None,
        residual_bytes=0 if residual is None else residual.dtype.itemsize,
        out_bytes=layer.out_dtype.itemsize,
    )
    return tuning.implementations("linear", tuned_key(layer, arrays), untuned=("mosaic",) if is_best else ())


def tuned_config(known: tuning.Key, rows: int, *, is_normed: bool = False, keeps_product: bool = False) -> Config:
    """Returns the measured best configuration of a key, else the untuned one; arguments as `default_config`'s."""
    sizes = int(known["outputs"]), int(known["features"])
    untuned = default_config(rows, *sizes, is_normed=is_normed, keeps_products=keeps_product)
    config = tuning.configuration("linear", "forward", known, lambda: candidates(rows), untuned=untuned)
    # One buffer per result, so that four stages fit beside two results.
    return replace(config, store_slots=1) if keeps_product and isinstance(config, GemmConfig) else config


def candidates(rows: int) -> Mapping[str, Config]:
    """Returns the configurations worth measuring, by name; of few rows only the untuned one is."""
    if rows <= MOST_ROWS:
        return {}
    return {
        "128x256": GemmConfig(),
        "128x(256+192)": MIXED[1],
        "128x256 cluster m": GemmConfig(cluster=2),
        "128x256 cluster m, even waves": EVEN,
        "128x128": NARROW,
    }


def is_preferred(
    rows: int, outputs: int, features: int, *, has_activation: bool, residual_bytes: int = 0, out_bytes: int = 2
) -> bool:
    """Whether the kernel is faster than XLA, as measured or estimated.

    has_activation: whether an activation follows. residual_bytes, out_bytes: of one value of the residual, 0 without
    one, and of one value of the result.

    Speed relative to XLA on an H200: with gelu 1.10 at 8192 rows and 1.10 to 1.21 at 512, with a residual 1.02 and
    1.03; up to 64 rows 1.01 (14336 features and a residual) to 1.39. Plain products of many rows are as fast as XLA's
    (0.99 to 1.02), so XLA computes them, except with tiles of two widths: 1.14 at 512 rows and 14336 outputs.
    """
    if rows <= MOST_ROWS:
        return outputs >= 4096 and features >= 2048
    if not has_activation and not residual_bytes:
        is_known = rows == MOST_MIXED_ROWS and features >= FEWEST_FEATURES
        return is_known and bool(choose_config(rows, outputs, is_mixed=True).passes)
    ours, xla = estimated_us(rows, outputs, features, read_bytes=residual_bytes, out_bytes=out_bytes)
    return ours < xla


def preferred_with_norm(layer: Layer, arrays: LayerArrays, norm: Norm) -> tuple[Sequence[str], bool]:
    """Returns what `norm_linear` tries if the caller requests nothing, and whether the kernel is the best forward."""
    (*leading, features), outputs = arrays.x.shape, arrays.w.shape[1]
    rows = prod(leading)
    is_best = is_preferred_with_norm(rows, outputs, features, has_activation=layer.activation is not None)
    has_best_gradient = norm.mean_square is None and arrays.residual is None and rows >= FEWEST_NORMED_ROWS
    return ("mosaic",) if is_best or has_best_gradient else (), is_best


def is_preferred_with_norm(rows: int, outputs: int, features: int, *, has_activation: bool) -> bool:
    """Whether the kernels of norm and layer are faster than XLA, as measured or estimated.

    On an H200, 4096 features: 1.15 times as fast as XLA at 512 rows with LayerNorm, bias, gelu and 16384 outputs, 1.01
    at 8192 rows with RMSNorm and 4096 outputs. With RMSNorm in the launch, at 16 rows and at 1: 1.22 and 1.33 for 4096
    outputs, 1.28 and 1.26 for 6144, 1.19 and 1.23 for 8192, 1.12 and 1.06 for 14336. At 64 rows of 6656 features and
    outputs, with given mean squares, 1.28.
    """
    if rows <= MOST_FUSED_NORM_ROWS:
        return choose_few_rows(rows, outputs, features, is_normed=True).fuses_norm
    if rows <= MOST_ROWS:
        return is_preferred(rows, outputs, features, has_activation=has_activation)
    ours, xla = estimated_us(rows, outputs, features, is_fused=not has_activation)
    return ours < xla


def is_preferred_with_squares(rows: int, outputs: int, features: int) -> bool:
    """Whether `linear_residual_norm`'s kernel is faster than XLA, as measured or estimated.

    On an H200, 14336 features and 4096 outputs: 1.01 times as fast as XLA at 8192 rows, 1.02 at 512, 1.09 and 1.1 at 1
    and 16. 211 rows of 128 features and 13824 outputs: 1.06 with gradients.
    """
    if rows <= MOST_SQUARED_FEW_ROWS:
        return outputs >= FEWEST_SQUARED_OUTPUTS and features >= FEWEST_SQUARED_FEATURES
    if rows <= MOST_ROWS:
        return outputs >= FEWEST_SQUARED_OUTPUTS and features >= FEWEST_SQUARED_FEATURES // 2 and rows > MOST_ROWS // 2
    ours, xla = estimated_us(rows, outputs, features, read_bytes=2)
    return ours < xla
