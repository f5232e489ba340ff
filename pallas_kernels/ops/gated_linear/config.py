"""The gated layer's key in the tuned table, its configuration, and when its kernel is preferred."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import jax

from pallas_kernels import tuning
from pallas_kernels.ops._products.product import Config, candidates, default_config, estimate
from pallas_kernels.primitives.few_rows.config import MOST_ROWS

FEWEST_OUTPUTS = 2688
"""The fewest outputs at which the kernel for few rows beat XLA: 64 rows of 2688 features, 12.3 µs and 16.2 (H200)."""


def tuned_key(x: jax.Array, w: jax.Array, activation: str) -> tuning.Key:
    """Returns the layer's key in the tuned table; reads only shapes and dtypes of x and one of the weights."""
    return {
        "rows": tuning.near(prod(x.shape[:-1])),
        "features": w.shape[0],
        "outputs": w.shape[1],
        "dtype": x.dtype.name,
        "activation": activation,
    }


def preferred(x: jax.Array, w: jax.Array, activation: str) -> Sequence[str]:
    """Returns the implementations to try if the caller requests none: the measured best, else by a rule."""
    untuned = ("mosaic",) if is_preferred(prod(x.shape[:-1]), w.shape[1], w.shape[0]) else ()
    return tuning.implementations("gated_linear", tuned_key(x, w, activation), untuned=untuned)


def tuned_config(known: tuning.Key, rows: int, *, is_normed: bool = False) -> Config:
    """Returns the forward kernel's measured best configuration of a key, else the untuned one.

    is_normed: whether x is normalised before the products; the launch may compute that norm.
    """
    untuned = default_config(rows, int(known["outputs"]), int(known["features"]), products=2, is_normed=is_normed)
    found = candidates(rows, products=2, is_normed=is_normed)
    return tuning.configuration("gated_linear", "forward", known, lambda: found, untuned=untuned)


def is_preferred(rows: int, outputs: int, features: int) -> bool:
    """Whether the kernel is faster than XLA, as measured or estimated.

    Speed relative to XLA on an H200, with 4096 features and 14336 outputs: 1.05 at 8192 rows, 1.20 at 512, 1.14 at 16.
    """
    if rows <= MOST_ROWS:
        return outputs >= FEWEST_OUTPUTS
    ours, xla = estimate(rows, outputs, features, products=2)
    return ours < xla
