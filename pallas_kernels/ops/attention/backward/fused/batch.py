"""`jax.vmap` of a launch that has state of its own: the mapped axis becomes part of the batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import jax
import jax.numpy as jnp

from pallas_kernels.ops.attention.problem import Problem

Gradients = tuple[jax.Array, jax.Array, jax.Array]


def by_batch(
    launch: Callable[..., Gradients],
    problem: Problem,
    operands: tuple[jax.Array, ...],
    extras: Mapping[str, jax.Array],
) -> Gradients:
    """launch(problem, operands, extras), of which copies under `jax.vmap` are one launch.

    The copies that JAX would make of the kernel share its semaphores, so that none knows whose turn it is.

    Args:
        operands: whose first axis is the batch, as is that of the results.
        extras: "words", with which copies come one after the other, since a dropout mask depends on the place in the
            batch; and "dense" (1 or batch, ...).
    """

    @jax.custom_batching.custom_vmap
    def compute(operands, extras):
        return launch(problem, operands, extras)

    @compute.def_vmap
    def _mapped(count, is_mapped, operands, extras):
        def whole(array, mapped):
            return array if mapped else jnp.broadcast_to(array, (count, *array.shape))

        operands = tuple(map(whole, operands, is_mapped[0]))
        extras = {name: whole(array, is_mapped[1][name]) for name, array in extras.items()}
        if "words" in extras:
            results = jax.lax.map(lambda one: by_batch(launch, problem, *one), (operands, extras))
            return results, (True, True, True)
        batch = problem.batch
        if "dense" in extras:
            dense = extras["dense"]
            extras["dense"] = jnp.broadcast_to(dense, (count, batch, *dense.shape[2:]))
        operands, extras = jax.tree.map(lambda array: array.reshape(-1, *array.shape[2:]), (operands, extras))
        results = by_batch(launch, replace(problem, batch=count * batch), operands, extras)
        return tuple(array.reshape(count, batch, *array.shape[1:]) for array in results), (True, True, True)

    return compute(operands, dict(extras))
