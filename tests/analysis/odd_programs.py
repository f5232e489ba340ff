"""Programs that an analysis may stumble over, several kinds in each, so that few are compiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

bf16, f32, s32 = jnp.bfloat16, jnp.float32, jnp.int32


def shape(*sizes: int, dtype: Any = f32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, dtype)


def chunks(x: Array, w: Array, starts: Array) -> Array:
    """A loop that writes chunks of two carried arrays in place; its gradient sets the chunks to zero as it goes."""

    def step(carried: tuple[Array, Array], start: Array) -> tuple[tuple[Array, Array], None]:
        out, other = carried
        made = jnp.tanh(lax.dynamic_slice_in_dim(x, start, 4) @ w)
        out = lax.dynamic_update_slice_in_dim(out, made, start, 0)
        return (out, lax.dynamic_update_slice_in_dim(other, made * 2, start, 0)), None

    (out, other), _ = lax.scan(step, (jnp.zeros_like(x), x), starts)
    return jnp.mean(out.astype(f32) ** 2) + other.astype(f32).sum()


def branches(flag: Array, x: Array) -> Array:
    """Branches that launch nothing, in a branch and in a loop, and a loop that swaps what it carries."""
    x = lax.switch(flag, [lambda x: x, lambda x: lax.cond(x[0, 0] > 0, jnp.sin, lambda x: x, x), jnp.cos], x)
    x = lax.scan(lambda x, step: (lax.cond(step > 2, jnp.tanh, lambda x: x, x), None), x, jnp.arange(4))[0]
    swapped = lax.fori_loop(0, 5, lambda _, pair: (pair[1], pair[0] + 1), (x, x * 2))
    return swapped[0] @ swapped[1]


def empty_and_small(nothing: Array, number: Array, waves: Array, bits: Array, small: Array) -> tuple[Any, ...]:
    """Arrays without elements, scalars, complex numbers, booleans, one-byte and two-byte numbers, constants."""
    products = (nothing @ jnp.ones((16, 4)), nothing.T @ nothing, nothing.sum(0))
    odd = (jnp.sin(number), (waves @ waves).real, jnp.abs(jnp.exp(waves)), jnp.fft.ifft(waves).imag)
    return *products, *odd, bits & (small > 0), small.astype(f32).sum(), jnp.arange(3), jnp.ones((2, 2)), waves


def expanded(x: Array, groups: Array, experts: Array, rows: Array) -> Array:
    """Operations that XLA expands or hands to libraries, and their gradients."""
    grouped = lax.ragged_dot(x, experts, groups)
    summed = jax.ops.segment_sum(grouped, rows, 16)
    pooled = lax.reduce_window(summed, 0.0, lax.add, (3, 3), (1, 1), "SAME")
    ranked, _ = lax.top_k(jnp.cumsum(pooled, 1), 4)
    factor = jnp.linalg.cholesky(pooled @ pooled.T + jnp.eye(16))
    solved = jax.scipy.linalg.solve_triangular(factor, ranked, lower=True)
    return (jnp.sort(solved, 0) * jnp.fft.rfft(pooled).real[:, :4]).sum() + jnp.var(x.at[rows].add(x)[rows])


def odd_programs() -> dict[str, tuple[Callable[..., Any], tuple[Any, ...]]]:
    """Each program with its arguments."""
    return {
        "chunks_gradient": (
            jax.grad(chunks, (0, 1)),
            (shape(32, 64, 256, dtype=bf16), shape(256, 256, dtype=bf16), shape(8, dtype=s32)),
        ),
        "branches": (branches, (shape(dtype=s32), shape(64, 64))),
        "branches_gradient": (
            jax.grad(lambda flag, x: branches(flag, x).sum(), 1),
            (shape(dtype=s32), shape(64, 64)),
        ),
        "empty_and_small": (
            empty_and_small,
            (
                shape(0, 16),
                shape(),
                shape(8, 8, dtype=jnp.complex64),
                shape(64, dtype=jnp.bool_),
                shape(64, dtype=jnp.int8),
            ),
        ),
        "nothing_to_do": (lambda x: (x, x), (shape(8, 8),)),
        "expanded_gradient": (
            jax.grad(expanded, (0, 2)),
            (shape(64, 32), shape(4, dtype=s32), shape(4, 32, 32), shape(64, dtype=s32)),
        ),
    }
