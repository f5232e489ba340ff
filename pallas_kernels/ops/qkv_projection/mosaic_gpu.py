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

import jax
import jax.numpy as jnp

from pallas_kernels.arguments import Norm, Rope
from pallas_kernels.ops._products.norm import scaled_rows
from pallas_kernels.ops._products.product import Config
from pallas_kernels.ops.qkv_projection.config import HeadForm, chosen_config
from pallas_kernels.ops.qkv_projection.mosaic_gpu_vjp import qkv_projection_backward
from pallas_kernels.ops.qkv_projection.reference import qkv_projection_reference
from pallas_kernels.ops.rope.heads import HeadArray, launch_heads
from pallas_kernels.ops.rope.tables import rotating
from pallas_kernels.primitives.few_rows.config import FewRowsConfig
from pallas_kernels.primitives.few_rows.heads import Rotation
from pallas_kernels.primitives.few_rows.kernel import few_rows_product
from pallas_kernels.primitives.few_rows.norm import RowNorm
from pallas_kernels.primitives.gemm.epilogue import Beside, HeadRotation
from pallas_kernels.primitives.gemm.kernel import gemm
from pallas_kernels.primitives.settings import usual_promotion

Tables = tuple[jax.Array, jax.Array]


def qkv_projection_forward(
    x: jax.Array,
    weights: Sequence[jax.Array],
    *,
    form: HeadForm,
    row_scale: jax.Array | None = None,
    biases: Sequence[jax.Array | None] = (None, None, None),
    head_scales: Sequence[jax.Array | None] = (None, None),
    tables: Tables | None = None,
    norm: RowNorm | None = None,
    config: Config | None = None,
) -> tuple[tuple[jax.Array, ...], Sequence[jax.Array | None]]:
    """Returns query, key and value, and the products of query and key that the backward pass needs.

    Results are x @ w for each of the three weights, heads normalised and rotated, (rows, outputs) each. Products have
    their biases; each is None if its heads are not normalised.

    x: (rows, features), weights: (features, outputs) each, all of one 16-bit dtype. row_scale: (rows,) float32.
    biases: (outputs,) each. head_scales: (head size,) each. tables: cosines and sines, (rows, head size or half of
    that) float32 each, with a `form` that rotates.
    norm: of x's rows, in the product's launch; with a configuration of few rows, without row_scale.
    """
    config = config or chosen_config(x, weights, form)
    product = partial(_projected, x, weights, norm=norm, row_scale=row_scale, biases=biases, config=config)
    by_column = tables is not None and tables[0].shape[1] == form.size
    if form.size is None or not (form.is_normed or (by_column and isinstance(config, FewRowsConfig))):
        return product(form, tables), (None, None)
    *projected, value = product(HeadForm(size=form.size), None)
    heads = [
        HeadArray(
            array=array,
            scale=scale,
            epsilon=epsilon,
            rounds_before_scale=rounds,
            is_rotated=form.is_rotated,
        )
        for array, scale, epsilon, rounds in zip(projected, head_scales, form.epsilons, form.rounds, strict=True)
    ]
    query, key = launch_heads(heads, tables, size=form.size, is_backward=False, name="qkv_heads")
    return (query.array, key.array, value), [None if each.epsilon is None else each.array for each in heads]


def qkv_projection_mosaic(form: HeadForm, x, row_scale, weights, biases, head_scales, tables):
    """Returns query, key and value; differentiable. Arguments as for `qkv_projection_forward`."""
    operands = (x, row_scale, weights, biases, head_scales)
    return rotating(partial(_forward, form), partial(_backward, form), partial(_reference, form))(operands, tables)


@usual_promotion
def _forward(form, operands, tables):
    x, row_scale, weights, biases, head_scales = operands
    given = {"row_scale": row_scale, "biases": biases, "head_scales": head_scales, "tables": tables}
    results, products = qkv_projection_forward(x, weights, form=form, **given)
    return results, (x, weights, given, products)


@usual_promotion
def _backward(form, saved, cotangents):
    x, weights, given, products = saved
    gradients = qkv_projection_backward(x, weights, cotangents, form=form, products=products, **given)
    dx, dweights, drow_scale, dbiases, dhead_scales = gradients
    return dx, drow_scale, dweights, dbiases, dhead_scales


@usual_promotion
def _reference(form, operands, tables):
    x, row_scale, weights, biases, head_scales = operands
    norms = [
        None if epsilon is None else Norm(scale, epsilon=epsilon, rounds_before_scale=rounds)
        for scale, epsilon, rounds in zip(head_scales, form.epsilons, form.rounds, strict=True)
    ]
    filled = [jnp.zeros(w.shape[1], x.dtype) if b is None else b for b, w in zip(biases, weights, strict=True)]
    results = qkv_projection_reference(
        scaled_rows(x, row_scale),
        *weights,
        bias=filled,
        head_size=form.size,
        rope=Rope(cos=tables[0], sin=tables[1]),
        q_norm=norms[0],
        k_norm=norms[1],
    )
    return tuple(each.reshape(x.shape[0], -1) for each in results)


def _projected(
    x: jax.Array,
    weights: Sequence[jax.Array],
    form: HeadForm,
    tables: Tables | None,
    *,
    norm: RowNorm | None,
    row_scale: jax.Array | None,
    biases: Sequence[jax.Array | None],
    config: Config,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns the products with their biases, heads rotated."""
    if isinstance(config, FewRowsConfig):
        return _transposed(x, weights, form, norm, row_scale, biases, tables, config)
    if norm is not None:
        raise ValueError("qkv_projection_forward: only a product of few rows has a norm in it.")
    rotations: list[HeadRotation | None] = [None] * 3
    if form.is_rotated and form.size is not None and tables is not None:
        shape = {"size": form.size, "angles": tables[0].shape[1]}
        rotations = [*(HeadRotation(**shape, has_bias=bias is not None) for bias in biases[:2]), None]
    beside = [Beside(rotation=own, bias=bias) for own, bias in zip(rotations, biases, strict=True)]
    query, key, value = gemm(
        [x],
        list(weights),
        beside=beside,
        angles=tables,
        row_scale=row_scale,
        config=config,
        name="qkv_projection",
    )
    return query, key, value


def _transposed(
    x: jax.Array,
    weights: Sequence[jax.Array],
    form: HeadForm,
    norm: RowNorm | None,
    row_scale: jax.Array | None,
    biases: Sequence[jax.Array | None],
    tables: Tables | None,
    config: FewRowsConfig,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Computes the projections of few rows with the kernel for few rows."""
    rotation = None
    if form.is_rotated and form.size is not None:
        assert tables is not None
        rotation = Rotation(size=form.size, cos=tables[0], sin=tables[1])
    query, key, value = few_rows_product(
        x,
        weights,
        bias=_beside(biases, weights, config.columns),
        row_scale=row_scale,
        norm=norm,
        rotation=rotation,
        is_concatenated=True,
        config=config,
        name="qkv_projection",
    )
    return query, key, value


def _beside(biases: Sequence[jax.Array | None], weights: Sequence[jax.Array], columns: int) -> jax.Array | None:
    """Joins the biases in the order of the weights' columns, each padded to whole tiles; zeros for an absent bias."""
    if all(bias is None for bias in biases):
        return None
    filled = [
        jnp.zeros(w.shape[1], jnp.float32) if bias is None else bias.astype(jnp.float32)
        for bias, w in zip(biases, weights, strict=True)
    ]
    return jnp.concatenate([jnp.pad(bias, (0, -bias.shape[0] % columns)) for bias in filled])
