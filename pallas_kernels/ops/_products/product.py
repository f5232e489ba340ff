"""Products with one weight or several: the kernel for many rows or for few, their configurations and gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.arguments import Norm
from pallas_kernels.ops._products.norm import before_product
from pallas_kernels.primitives.few_rows.config import MOST_ROWS, FewRowsConfig, choose_few_rows
from pallas_kernels.primitives.few_rows.kernel import few_rows_product
from pallas_kernels.primitives.gemm.config import MOST_MIXED_ROWS, GemmConfig, choose_config
from pallas_kernels.primitives.gemm.kernel import gemm
from pallas_kernels.primitives.gradients import input_gradient, products_apart, weight_gradients
from pallas_kernels.primitives.integer_gemm.kernel import integer_gemm
from pallas_kernels.primitives.platform import varying_like

Config = GemmConfig | FewRowsConfig


def product(
    x: jax.Array,
    weights: Sequence[jax.Array],
    *,
    norm: Norm | None = None,
    scales: Sequence[jax.Array] = (),
    config: Config,
    **options: Any,
) -> tuple[jax.Array, ...]:
    """Returns the epilogue's results for the products of x's rows, which the norm normalises, with the weights.

    x: (rows, features); weights: (features, outputs) each, of one 16-bit dtype; or with scales, (groups, outputs),
    integers (outputs, features). options: those of `few_rows_product`, `gemm` or, of one integer weight,
    `integer_gemm`, by the kind of the configuration.
    """
    x, before = before_product(norm, x, config)
    options |= before
    if isinstance(config, FewRowsConfig):
        return few_rows_product(x, weights, scales=scales, config=config, **options)
    if scales:
        return (integer_gemm(x, weights[0], scales[0][0], config=config, **options),)
    return gemm([x], weights, config=config, **options)


def product_gradients(
    x: jax.Array, weights: Sequence[jax.Array], cotangents: Sequence[jax.Array]
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    """Returns the gradients of x (rows, features) and of the weights. cotangents: (rows, outputs), of each product."""
    if len(weights) == 1:
        (w,), (d,) = weights, cotangents
        return d @ w.T, (x.T @ d,)
    return input_gradient(cotangents, weights), weight_gradients(x, cotangents)


def bias_gradient(bias: jax.Array | None, dy: jax.Array) -> jax.Array | None:
    """Returns the gradient of a bias (outputs,) of dy's columns, or None without a bias. dy: (rows, outputs)."""
    if bias is None:
        return None
    return varying_like(jnp.sum(dy, axis=0, dtype=jnp.float32).astype(bias.dtype), dy)


@jax.custom_vjp
def products_by_xla(
    x: jax.Array, weights: tuple[jax.Array, ...], biases: tuple[jax.Array | None, ...]
) -> tuple[jax.Array, ...]:
    """Returns x's product with each weight plus its bias, (rows, outputs) of x's dtype; differentiable."""
    # XLA's product adds a bias of its own dtype without a pass over the result.
    pairs = zip(products_apart(x, weights), biases, strict=True)
    return tuple(y if bias is None else y + bias.astype(y.dtype) for y, bias in pairs)


def _backward(saved, cotangents):
    x, weights, biases = saved
    return *product_gradients(x, weights, cotangents), tuple(map(bias_gradient, biases, cotangents))


products_by_xla.defvjp(lambda *operands: (products_by_xla(*operands), operands), _backward)


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
