"""The projections forward on Mosaic GPU: one launch in which each tile belongs to one of the three weights.

x is read once for all three, and their tiles fill the multiprocessors together. Heads are rotated on the accumulator:
with a tile of whole heads, both members of a pair are in the same thread's registers. The angles come from tables of
the rows' cosines and sines, 0.5 KB per row, which XLA computes once for all layers that have them. Heads that are
normalised have a launch of their own (`rope/heads.py`): in the accumulator's registers the norm spilled, and took
longer than that. So have few rows whose tables have a column for each of a head.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.arguments import Norm, Rope
from pallas_kernels.ops._products.product import Config, product
from pallas_kernels.ops.qkv_projection.config import HeadForm, chosen_config
from pallas_kernels.ops.qkv_projection.mosaic_gpu_vjp import Operands, Tables, heads_of, qkv_projection_backward
from pallas_kernels.ops.qkv_projection.reference import qkv_projection_reference
from pallas_kernels.ops.rope.heads import launch_heads
from pallas_kernels.ops.rope.tables import rotating
from pallas_kernels.primitives.few_rows.config import FewRowsConfig
from pallas_kernels.primitives.gemm.epilogue import Rotation
from pallas_kernels.primitives.settings import usual_promotion


def qkv_projection_forward(
    form: HeadForm,
    given: Operands,
    tables: Tables | None = None,
    *,
    config: Config | None = None,
    **options: Any,
) -> tuple[tuple[jax.Array, ...], Sequence[jax.Array | None]]:
    """Returns query, key and value, and the products of query and key that the backward pass needs.

    Results are x @ w for each of the three weights, heads normalised and rotated, (rows, outputs) each. Products have
    their biases; each is None if its heads are not normalised.

    tables: cosines and sines, with a `form` that rotates. options: further ones of `product`.
    """
    config = config or chosen_config(given.x, given.weights, form)
    by_column = tables is not None and tables[0].shape[1] == form.size
    if form.size is None or not (form.is_normed or (by_column and isinstance(config, FewRowsConfig))):
        return _projected(form, given, tables, config, **options), (None, None)
    products = _projected(HeadForm(size=form.size), given, None, config, **options)
    heads, _ = launch_heads(
        heads_of(form, given, products), tables, size=form.size, is_backward=False, name="qkv_heads"
    )
    kept = [None if norm is None else each for each, norm in zip(products, form.norms, strict=False)]
    return (*heads, products[2]), kept


def qkv_projection_mosaic(form: HeadForm, given: Operands, tables: Tables | None) -> tuple[jax.Array, ...]:
    """Returns query, key and value; differentiable. Arguments as for `qkv_projection_forward`."""
    return rotating(partial(_forward, form), partial(_backward, form), partial(_reference, form))(given, tables)


@usual_promotion()
def _forward(form, given, tables):
    results, products = qkv_projection_forward(form, given, tables)
    return results, (given, tables, products)


@usual_promotion()
def _backward(form, saved, cotangents):
    given, tables, products = saved
    return qkv_projection_backward(form, given, tables, products, cotangents)


@usual_promotion()
def _reference(form, given, tables):
    norms = [
        None if norm is None else Norm(scale, epsilon=norm.epsilon, rounds_before_scale=norm.rounds_before_scale)
        for scale, norm in zip(given.head_scales, form.norms, strict=True)
    ]
    x, pairs = given.x, zip(given.biases, given.weights, strict=True)
    results = qkv_projection_reference(
        x,
        *given.weights,
        bias=[jnp.zeros(w.shape[1], x.dtype) if b is None else b for b, w in pairs],
        head_size=form.size,
        rope=Rope(cos=tables[0], sin=tables[1]),
        q_norm=norms[0],
        k_norm=norms[1],
    )
    return tuple(each.reshape(x.shape[0], -1) for each in results)


def _projected(
    form: HeadForm, given: Operands, tables: Tables | None, config: Config, **options: Any
) -> tuple[jax.Array, ...]:
    """Returns the products with their biases, heads rotated if there are tables."""
    rotation = None if tables is None else Rotation(size=form.size or 0, cos=tables[0], sin=tables[1])
    options |= {"bias": given.biases, "rotation": rotation, "is_concatenated": True, "name": "qkv_projection"}
    return product(given.x, given.weights, config=config, **options)
