"""Kernels that change arrays in place, through references."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.custom_batching import custom_vmap


def changed_in_place[T](launch: Callable[..., Any], operands: tuple[Any, ...], changed: T) -> tuple[Any, T]:
    """Calls `launch(*operands, references)` with references to arrays; returns its result and the changed arrays.

    In jax 0.11.2 a call of `plgpu.kernel` with a reference among its operands is an effect, which `jax.checkpoint` runs
    in the first pass only: the pass that computes again makes the reference and reads it unchanged. Here references
    are made, changed and read in one step for JAX. The effect is not seen outside, so both passes run it.

    Args:
        operands, changed: trees of arrays. All arrays that `launch` uses must be among them.
    """

    def run(operands: tuple[Any, ...], changed: T) -> tuple[Any, T]:
        references = jax.tree.map(jax.new_ref, changed)
        result = launch(*operands, references)
        return result, jax.tree.map(jax.freeze, references)

    return _one_step(run)(operands, changed)


def _one_step(function: Callable[..., Any]) -> Callable[..., Any]:
    whole = custom_vmap(function)

    @whole.def_vmap
    def _mapped(axis_size, is_batched, *operands):
        axes = jax.tree.map(lambda batched: 0 if batched else None, tuple(is_batched))
        results = _one_step(jax.vmap(function, in_axes=axes, axis_size=axis_size))(*operands)
        return results, jax.tree.map(lambda _: True, results)

    return whole
