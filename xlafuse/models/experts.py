"""A mixture of experts: a router sends each token to a few of many MLPs."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array, lax

import pallas_kernels
from xlafuse.models.config import BlockConfig
from xlafuse.models.plan import FusionPlan, named

_BY_XLA = ("xla", "triton")
"""Implementations that XLA computes: no Triton kernel multiplies groups of rows by matrices of their own."""


class Routing(NamedTuple):
    """The routing of tokens: a row for each token and chosen expert, sorted by expert.

    weights: (tokens, experts a token), of each expert's result. order: (rows,), the pair of token and choice that each
    row is; place: the row of each pair. sizes: (experts,), the rows of each.
    """

    weights: Array
    order: Array
    place: Array
    sizes: Array


class Experts(nnx.Module):
    """SwiGLU experts: the sum of those that the router likes best, weighted by its softmax (arXiv:2401.04088).

    The router computes in at least float32, so that rounding changes few choices.
    """

    def __init__(self, config: BlockConfig, *, rngs: nnx.Rngs):
        dtype = jnp.dtype(config.param_dtype)
        matrix, matrices = nnx.initializers.lecun_normal(), nnx.initializers.lecun_normal(batch_axis=0)
        count, hidden, mlp = config.num_experts, config.hidden_size, config.mlp_size
        self.config = config
        self.router = nnx.Param(matrix(rngs.params(), (hidden, count), dtype))
        self.gate = nnx.Param(matrices(rngs.params(), (count, hidden, mlp), dtype))
        self.up = nnx.Param(matrices(rngs.params(), (count, hidden, mlp), dtype))
        self.down = nnx.Param(matrices(rngs.params(), (count, mlp, hidden), dtype))

    def __call__(self, x: Array, plan: FusionPlan) -> Array:
        """Applies each token's experts to `x` (B, T, hidden)."""
        dtype = jnp.dtype(self.config.dtype)
        with jax.named_scope("router"):
            tokens = x.reshape(-1, x.shape[-1]).astype(dtype)
            routing = self.route(tokens)
            rows = rows_of(tokens, routing.order, routing.place)
        gate, up, down = (each[...].astype(dtype) for each in (self.gate, self.up, self.down))
        hidden = _expanded(rows, gate, up, routing.sizes, plan.up_projection)
        with jax.named_scope("down_projection"):
            if (how := plan.down_projection) in _BY_XLA:
                y = lax.ragged_dot(hidden, down, routing.sizes)
            else:
                y = pallas_kernels.grouped_linear(hidden, down, routing.sizes, implementation=named(how))
        with jax.named_scope("experts_sum"):
            parts = in_order(y, routing.order, routing.place).reshape(*routing.weights.shape, -1)
            return jnp.sum(parts * routing.weights[..., None], axis=1).astype(dtype).reshape(x.shape)

    def route(self, tokens: Array) -> Routing:
        """Routes tokens (tokens, hidden) to their top-k experts."""
        router, wide = self.router[...].astype(tokens.dtype), jnp.promote_types(tokens.dtype, jnp.float32)
        scores, chosen = lax.top_k(jnp.dot(tokens, router, preferred_element_type=wide), self.config.experts_per_token)
        chosen = chosen.reshape(-1)
        order, pairs = jnp.argsort(chosen), jnp.arange(chosen.size, dtype=jnp.int32)
        return Routing(
            weights=jax.nn.softmax(scores),
            order=order,
            place=jnp.zeros_like(pairs).at[order].set(pairs, unique_indices=True, mode="promise_in_bounds"),
            sizes=jnp.sum(chosen[:, None] == jnp.arange(self.config.num_experts), axis=0, dtype=jnp.int32),
        )


def _expanded(rows: Array, gate: Array, up: Array, sizes: Array, how: str) -> Array:
    """Returns `silu(rows @ gate) * (rows @ up)` by the weights of each row's expert."""
    with jax.named_scope("gate_up_projection"):
        if how not in _BY_XLA:
            return pallas_kernels.grouped_gated_linear(rows, gate, up, sizes, implementation=named(how))
        gated, linear = lax.ragged_dot(rows, gate, sizes), lax.ragged_dot(rows, up, sizes)
    with jax.named_scope("activation"):
        return jax.nn.silu(gated) * linear


@jax.custom_vjp
def rows_of(tokens: Array, order: Array, place: Array) -> Array:
    """Gathers the token of each row, (rows, hidden).

    The gradient gathers each token's rows, too; XLA's own would add rows atomically.
    """
    return _gathered(tokens, order // (order.size // tokens.shape[0]))


@jax.custom_vjp
def in_order(rows: Array, order: Array, place: Array) -> Array:
    """Returns the rows of the pairs of token and choice; the inverse of sorting by `order`."""
    return _gathered(rows, place)


def _gathered(array: Array, index: Array) -> Array:
    return array.at[index].get(mode="promise_in_bounds")


def _rows_fwd(tokens, order, place):
    return rows_of(tokens, order, place), (place, tokens.shape)


def _rows_bwd(saved, cotangent):
    place, (tokens, hidden) = saved
    rows = _gathered(cotangent, place).reshape(tokens, -1, hidden)
    wide = jnp.promote_types(rows.dtype, jnp.float32)
    return jnp.sum(rows, axis=1, dtype=wide).astype(rows.dtype), None, None


rows_of.defvjp(_rows_fwd, _rows_bwd)
in_order.defvjp(
    lambda rows, order, place: (in_order(rows, order, place), order),
    lambda order, cotangent: (_gathered(cotangent, order), None, None),
)
