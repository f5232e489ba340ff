"""The linear layer's key in the tuned table, its configuration, and when its kernels are preferred."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod

from pallas_kernels import tuning
from pallas_kernels.ops._products.layer import Layer, LayerArrays
from pallas_kernels.ops._products.product import Config, default_config
from pallas_kernels.primitives.few_rows.config import MOST_ROWS
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
