"""Launch configurations of the gated linear layer's kernels: the untuned choice, and the candidates worth measuring."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import jax

from pallas_kernels import tuning
from pallas_kernels.primitives.few_rows.config import (
    MOST_FUSED_NORM_ROWS,
    MOST_ROWS,
    FewRowsConfig,
    choose_few_rows,
    fused_norm_candidates,
    with_fused_norm,
)
from pallas_kernels.primitives.few_rows.config import candidates as few_rows_candidates
from pallas_kernels.primitives.gemm.config import EVEN, MIXED, MOST_MIXED_ROWS, GemmConfig, ProductCost, choose_config

Config = GemmConfig | FewRowsConfig
FEWEST_OUTPUTS = 2688
"""The fewest outputs at which the kernel for few rows beat XLA: 64 rows of 2688 features, 12.3 µs and 16.2 (H200)."""


def problem(x: jax.Array, w: jax.Array, activation: str) -> tuning.Problem:
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
    return tuning.implementations("gated_linear", problem(x, w, activation), untuned=untuned)


def tuned_config(known: tuning.Problem, rows: int, *, is_normed: bool = False) -> Config:
    """Returns the forward kernel's measured best configuration of a problem, else the untuned one.

    is_normed: whether x is normalised before the products; the launch may compute that norm.
    """
    outputs, features = int(known["outputs"]), int(known["features"])
    untuned: Config = _many_rows(rows, outputs)
    if rows <= MOST_ROWS:
        untuned = choose_few_rows(rows, outputs, features, products=2)
        untuned = with_fused_norm(untuned, rows) if is_normed else untuned
    return tuning.configuration("gated_linear", "forward", known, lambda: candidates(rows), untuned=untuned)


def is_preferred(rows: int, outputs: int, features: int) -> bool:
    """Whether the kernel is faster than XLA, as measured or estimated.

    Speed relative to XLA on an H200, with 4096 features and 14336 outputs: 1.05 at 8192 rows, 1.20 at 512, 1.14 at 16.
    """
    if rows <= MOST_ROWS:
        return outputs >= FEWEST_OUTPUTS
    ours, xla = estimate(rows, outputs, features)
    return ours < xla


def estimate(rows: int, outputs: int, features: int) -> tuple[float, float]:
    """Returns the estimated times of the kernel of many rows and of XLA, in microseconds."""
    written = 2 * rows * outputs
    cost = ProductCost(rows=rows, outputs=outputs, features=features, accumulators=2, written_bytes=written)
    return cost.estimate(_many_rows(rows, outputs))


def _many_rows(rows: int, outputs: int) -> GemmConfig:
    return choose_config(rows, outputs, accumulators=2, is_mixed=rows <= MOST_MIXED_ROWS, is_even=True)


def candidates(rows: int) -> dict[str, Config]:
    """Returns the forward kernel's configurations worth measuring, by name."""
    if rows <= MOST_ROWS:
        return {**few_rows_candidates(), **(fused_norm_candidates() if rows <= MOST_FUSED_NORM_ROWS else {})}
    return {
        "128x256": GemmConfig(),
        "128x(256+256+256+128)": MIXED[2],
        "128x256 cluster m": GemmConfig(cluster=2),
        "128x256 cluster m, even waves": EVEN,
    }
