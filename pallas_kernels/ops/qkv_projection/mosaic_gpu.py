"""The projections forward on Mosaic GPU: one launch in which each tile belongs to one of the three weights.

x is read once for all three, and their tiles fill the multiprocessors together. Heads are normalised and rotated on the
accumulator: with a tile of whole heads, both members of a pair are in the same thread's registers. The angles come from
a table of the rows' cosines and sines, 0.5 KB per row, which XLA computes from the positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from pallas_kernels.arguments import Norm
from pallas_kernels.ops._products.norm import can_fuse_norm
from pallas_kernels.ops.qkv_projection.config import Config, gemm_config, problem, tuned_config
from pallas_kernels.ops.rope.angles import cosine_and_sine, turns
from pallas_kernels.primitives.few_rows.config import FewRowsConfig
from pallas_kernels.primitives.few_rows.heads import Rotation
from pallas_kernels.primitives.few_rows.kernel import few_rows_product
from pallas_kernels.primitives.few_rows.norm import RowNorm
from pallas_kernels.primitives.gemm.epilogue import Beside, Heads
from pallas_kernels.primitives.gemm.kernel import gemm


@dataclass(frozen=True, kw_only=True)
class HeadForm:
    """The static parameters of the heads' norms and rotation.

    size: columns of a head, or None if heads are neither normalised nor rotated. theta: of the rotation, or None.
    epsilons: of the norms of query and key heads, each None for no norm.
    """

    size: int | None = None
    theta: float | None = None
    epsilons: tuple[float | None, ...] = (None, None)

    @property
    def of_query_and_key(self) -> tuple[Heads | None, Heads | None]:
        """Returns the kernel's parameters for query heads and for key heads."""
        query, key = (self._heads(epsilon) for epsilon in self.epsilons)
        return query, key

    def _heads(self, epsilon: float | None) -> Heads | None:
        is_rotated = self.theta is not None
        if self.size is None or not (is_rotated or epsilon is not None):
            return None
        return Heads(size=self.size, epsilon=epsilon, rotated=is_rotated)


def angle_table(positions: jax.Array, head_size: int, theta: float) -> tuple[jax.Array, jax.Array]:
    """Computes cosine and sine of every row's angles, (rows, head_size / 2) float32 each; exact for int32 positions."""
    whole, fraction = turns(head_size, theta)
    return cosine_and_sine(positions.astype(jnp.int32)[:, None], jnp.asarray(whole)[None], jnp.asarray(fraction)[None])


def chosen_config(x: jax.Array, weights: Sequence[jax.Array], form: HeadForm) -> Config:
    """Returns the measured best configuration for x (rows, features), else the untuned one."""
    known = problem(x, weights, head_size=form.size, is_rotated=form.theta is not None)
    return tuned_config(known, x.shape[0], head_size=form.size)


def can_fuse_norm_of(config: Config, norm: Norm | None, x: jax.Array, form: HeadForm) -> bool:
    """Whether the projections' launch computes the norm of x; it cannot together with norms of heads."""
    return can_fuse_norm(config, norm, x) and form.epsilons == (None, None)


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
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns x @ w for each of the three weights, heads normalised and rotated; (rows, outputs) each.

    x: (rows, features), weights: (features, outputs) each, all of one 16-bit dtype. row_scale: (rows,) float32.
    biases: (outputs,) each. head_scales: (head size,) each. positions: (rows,) int32, with a `form` that rotates.
    norm: of x's rows, in the same launch; with a configuration of few rows, without head norms and row_scale.
    """
    config = config or chosen_config(x, weights, form)
    if isinstance(config, FewRowsConfig):
        if form.epsilons == (None, None):
            return _transposed(x, weights, form, norm, row_scale, biases, positions, config)
        # The other kernel computes norms of heads.
        config = gemm_config(x.shape[0], [w.shape[1] for w in weights], head_size=form.size)
    if norm is not None:
        raise ValueError("qkv_projection_forward: only a product of few rows, without head norms, has a norm in it.")
    angles = None
    if form.theta is not None and form.size is not None:
        assert positions is not None
        angles = angle_table(positions, form.size, form.theta)
    beside = [
        Beside(heads=heads, bias=bias, scale=scale)
        for heads, bias, scale in zip((*form.of_query_and_key, None), biases, (*head_scales, None), strict=True)
    ]
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
