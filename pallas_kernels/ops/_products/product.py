"""Products with one weight or several: the kernel for many rows or for few, their configurations and gradients."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from pallas_kernels.ops._products.norm import scaled_rows
from pallas_kernels.primitives.few_rows.config import (
    MOST_FUSED_NORM_ROWS,
    MOST_ROWS,
    FewRowsConfig,
    choose_few_rows,
    fused_norm_candidates,
)
from pallas_kernels.primitives.few_rows.config import candidates as few_rows_candidates
from pallas_kernels.primitives.few_rows.kernel import few_rows_product
from pallas_kernels.primitives.few_rows.norm import RowNorm
from pallas_kernels.primitives.gemm.config import (
    EVEN,
    MIXED,
    MOST_MIXED_ROWS,
    NARROW,
    GemmConfig,
    choose_config,
    estimated_us,
)
from pallas_kernels.primitives.gemm.epilogue import Epilogue
from pallas_kernels.primitives.gemm.kernel import gemm
from pallas_kernels.primitives.gradients import input_gradient, weight_gradients

Config = GemmConfig | FewRowsConfig


def product(
    x: jax.Array,
    weights: Sequence[jax.Array],
    *,
    config: Config,
    name: str,
    epilogue: Epilogue | None = None,
    bias: jax.Array | Sequence[jax.Array] | None = None,
    row_scale: jax.Array | None = None,
    norm: RowNorm | None = None,
    residual: jax.Array | None = None,
    row_squares: bool = False,
    out_dtype: jnp.dtype | None = None,
) -> tuple[jax.Array, ...]:
    """Returns the epilogue's results for x's products with the weights, as `gemm` does.

    x: (rows, features); weights: (features, outputs) each, of one 16-bit dtype. norm: of x's rows, in the same launch;
    only with a configuration of few rows, and without row_scale. The other arguments are those of `gemm`.
    """
    options = {"epilogue": epilogue, "bias": bias, "row_scale": row_scale, "residual": residual}
    options |= {"row_squares": row_squares, "out_dtype": out_dtype, "config": config, "name": name}
    if isinstance(config, FewRowsConfig):
        return few_rows_product(x, weights, norm=norm, **options)
    if norm is not None:
        raise ValueError(f"{name}: only a product of few rows has a norm in it.")
    return gemm([x], weights, **options)


def product_gradients(
    x: jax.Array, weights: Sequence[jax.Array], cotangents: Sequence[jax.Array], row_scale: jax.Array | None
) -> tuple[jax.Array, tuple[jax.Array, ...], jax.Array | None]:
    """Returns the gradients of x, of the weights and of row_scale, or None without one.

    x: (rows, features), multiplied by row_scale (rows,) before the products. cotangents: (rows, outputs), of each
    product.
    """
    # Float32 if the factors' gradient is summed from it.
    dtype = None if row_scale is None else jnp.dtype(jnp.float32)
    scaled = scaled_rows(x, row_scale)
    if len(weights) == 1:
        (w,), (d,) = weights, cotangents
        dscaled, dweights = jnp.matmul(d, w.T, preferred_element_type=dtype), (scaled.T @ d,)
    else:
        dweights = weight_gradients(scaled, cotangents)
        dscaled = input_gradient(cotangents, weights, dtype=dtype)
    if row_scale is None:
        return dscaled, dweights, None
    dx = (dscaled * row_scale[:, None]).astype(x.dtype)
    return dx, dweights, jnp.sum(dscaled * x.astype(jnp.float32), axis=1)


def default_config(
    rows: int, outputs: int, features: int, *, products: int = 1, is_normed: bool = False, keeps_products: bool = False
) -> Config:
    """Returns the untuned configuration. outputs: of each product.

    is_normed: whether x's rows are normalised before; the launch may compute that norm. keeps_products: whether the
    products are results, too.
    """
    if rows <= MOST_ROWS:
        return choose_few_rows(rows, outputs, features, products=products, is_normed=is_normed)
    # Neither mixed widths nor even waves were measured with products that are kept.
    is_mixed = rows <= MOST_MIXED_ROWS and not keeps_products
    return choose_config(rows, outputs, accumulators=products, is_mixed=is_mixed, is_even=not keeps_products)


def candidates(rows: int, *, products: int = 1, is_normed: bool = False) -> dict[str, Config]:
    """Returns the configurations worth measuring, by name."""
    if rows <= MOST_ROWS:
        normed = fused_norm_candidates() if is_normed and rows <= MOST_FUSED_NORM_ROWS else {}
        return {**few_rows_candidates(), **normed}
    found: dict[str, Config] = {
        "128x256": GemmConfig(),
        f"128x({'+'.join(map(str, MIXED[products].passes))})": MIXED[products],
        "128x256 cluster m": GemmConfig(cluster=2),
        "128x256 cluster m, even waves": EVEN,
    }
    if products == 1:
        found["128x128"] = NARROW
    return found


def estimate(
    rows: int,
    outputs: int,
    features: int,
    *,
    products: int = 1,
    read_bytes: int = 0,
    out_bytes: int = 2,
    is_fused: bool = False,
) -> tuple[float, float]:
    """Returns the estimated times of the kernel of many rows and of XLA, in microseconds.

    read_bytes, out_bytes: of one value of what the epilogue reads, and of the result. is_fused: whether XLA's product
    writes the result.
    """
    config = choose_config(rows, outputs, accumulators=products, is_mixed=rows <= MOST_MIXED_ROWS, is_even=True)
    bytes_of = {"read_bytes": rows * outputs * read_bytes, "written_bytes": rows * outputs * out_bytes}
    return estimated_us(rows, outputs, features, config, products=products, **bytes_of, is_fused=is_fused)
