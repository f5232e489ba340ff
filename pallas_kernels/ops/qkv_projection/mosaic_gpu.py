"""The projections forward on Mosaic GPU: one launch in which each tile belongs to one of the three weights.

x is read once for all three, and their tiles fill the multiprocessors together. Heads are rotated on the accumulator:
with a tile of whole heads, both members of a pair are in the same thread's registers. The angles come from a table of
the rows' cosines and sines, 0.5 KB per row, which XLA computes from the positions. Heads that are normalised have a
launch of their own (`rope/heads.py`): in the accumulator's registers the norm spilled, and took longer than that.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp

from pallas_kernels.ops._products.product import Config
from pallas_kernels.ops.qkv_projection.config import HeadForm, chosen_config
from pallas_kernels.ops.qkv_projection.mosaic_gpu_vjp import qkv_projection_backward
from pallas_kernels.ops.rope.angles import cosine_and_sine, turns
from pallas_kernels.ops.rope.heads import HeadArray, launch_heads
from pallas_kernels.primitives.few_rows.config import FewRowsConfig
from pallas_kernels.primitives.few_rows.heads import Rotation
from pallas_kernels.primitives.few_rows.kernel import few_rows_product
from pallas_kernels.primitives.few_rows.norm import RowNorm
from pallas_kernels.primitives.gemm.epilogue import Beside, HeadRotation
from pallas_kernels.primitives.gemm.kernel import gemm
from pallas_kernels.primitives.settings import usual_promotion


def angle_table(positions: jax.Array, head_size: int, theta: float) -> tuple[jax.Array, jax.Array]:
    """Computes cosine and sine of every row's angles, (rows, head_size / 2) float32 each; exact for int32 positions."""
    whole, fraction = turns(head_size, theta)
    return cosine_and_sine(positions.astype(jnp.int32)[:, None], jnp.asarray(whole)[None], jnp.asarray(fraction)[None])


def qkv_projection_forward(
    x: jax.Array,
    weights: Sequence[jax.Array],
    *,
    form: HeadForm,
    row_scale: jax.Array | None = None,
    biases: Sequence[jax.Array | None] = (None, None, None),
    head_scales: Sequence[jax.Array | None] = (None, None),
    positions: jax.Array | None = None,
    norm: RowNorm | None = None,
    config: Config | None = None,
) -> tuple[tuple[jax.Array, ...], Sequence[jax.Array | None]]:
    """Returns query, key and value, and the products of query and key that the backward pass needs.

    Results are x @ w for each of the three weights, heads normalised and rotated, (rows, outputs) each. Products have
    their biases; each is None if its heads are not normalised.

    x: (rows, features), weights: (features, outputs) each, all of one 16-bit dtype. row_scale: (rows,) float32.
    biases: (outputs,) each. head_scales: (head size,) each. positions: (rows,) int32, with a `form` that rotates.
    norm: of x's rows, in the product's launch; with a configuration of few rows, without row_scale.
    """
    config = config or chosen_config(x, weights, form)
    product = partial(_projected, x, weights, norm=norm, row_scale=row_scale, biases=biases, config=config)
    if not form.is_normed or form.size is None:
        return product(form, positions), (None, None)
    *projected, value = product(HeadForm(size=form.size), None)
    heads = [
        HeadArray(
            array=array,
            scale=scale,
            epsilon=epsilon,
            rounds_before_scale=rounds,
            is_rotated=form.theta is not None,
        )
        for array, scale, epsilon, rounds in zip(projected, head_scales, form.epsilons, form.rounds, strict=True)
    ]
    query, key = launch_heads(heads, positions, size=form.size, theta=form.theta, is_backward=False, name="qkv_heads")
    return (query.array, key.array, value), [None if each.epsilon is None else each.array for each in heads]


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def qkv_projection_mosaic(form: HeadForm, x, row_scale, weights, biases, head_scales, positions):
    """Returns query, key and value; differentiable. Arguments as for `qkv_projection_forward`."""
    return _forward(form, x, row_scale, weights, biases, head_scales, positions)[0]


@usual_promotion
def _forward(form, x, row_scale, weights, biases, head_scales, positions):
    operands = {"row_scale": row_scale, "biases": biases, "head_scales": head_scales, "positions": positions}
    results, products = qkv_projection_forward(x, weights, form=form, **operands)
    return results, (x, weights, operands, products)


@usual_promotion
def _backward(form, saved, cotangents):
    x, weights, operands, products = saved
    gradients = qkv_projection_backward(x, weights, cotangents, form=form, products=products, **operands)
    dx, dweights, drow_scale, dbiases, dhead_scales = gradients
    return dx, drow_scale, dweights, dbiases, dhead_scales, None


qkv_projection_mosaic.defvjp(_forward, _backward)


def _projected(
    x: jax.Array,
    weights: Sequence[jax.Array],
    form: HeadForm,
    positions: jax.Array | None,
    *,
    norm: RowNorm | None,
    row_scale: jax.Array | None,
    biases: Sequence[jax.Array | None],
    config: Config,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns the products with their biases, heads rotated."""
    if isinstance(config, FewRowsConfig):
        return _transposed(x, weights, form, norm, row_scale, biases, positions, config)
    if norm is not None:
        raise ValueError("qkv_projection_forward: only a product of few rows has a norm in it.")
    angles, rotations = None, [None] * 3
    if form.theta is not None and form.size is not None:
        assert positions is not None
        angles = angle_table(positions, form.size, form.theta)
        rotations = [*(HeadRotation(size=form.size, has_bias=bias is not None) for bias in biases[:2]), None]
    beside = [Beside(rotation=own, bias=bias) for own, bias in zip(rotations, biases, strict=True)]
    query, key, value = gemm(
        [x],
        list(weights),
        beside=beside,
        angles=angles,
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
    positions: jax.Array | None,
    config: FewRowsConfig,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Computes the projections of few rows with the kernel for few rows, which also computes the angles."""
    rotation = None
    if form.theta is not None and form.size is not None:
        assert positions is not None
        whole, fraction = (jnp.asarray(table) for table in turns(form.size, form.theta))
        rotation = Rotation(
            size=form.size,
            positions=positions.astype(jnp.int32),
            whole=whole,
            fraction=fraction,
            angles=cosine_and_sine,
        )
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
