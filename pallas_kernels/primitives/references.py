"""Kernels that change arrays in place, through references."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.custom_batching import custom_vmap


def in_place(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a function that makes references, lets kernels change them, and returns their values: one step for JAX.

    In jax 0.11.2 a call of `plgpu.kernel` with a reference among its operands is an effect, which `jax.checkpoint` runs
    in the first pass only: the pass that computes again makes the reference and reads it unchanged. The effect of the
    whole is not seen outside, so both passes run it.

    Args:
        function: takes trees of arrays as positional arguments. All arrays that it uses must be among them.
    """
    whole = custom_vmap(function)

    @whole.def_vmap
    def _mapped(axis_size, is_batched, *operands):
        axes = jax.tree.map(lambda batched: 0 if batched else None, tuple(is_batched))
        results = in_place(jax.vmap(function, in_axes=axes, axis_size=axis_size))(*operands)
        return results, jax.tree.map(lambda _: True, results)

    return whole
