"""The gated activation on Mosaic GPU: 16-byte accesses directly to registers, many small blocks.

Only the inputs are saved for the backward pass: computing the activation again costs no memory traffic.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.primitives.activations import Activation
from pallas_kernels.primitives.compat import store
from pallas_kernels.primitives.elementwise import (
    Part,
    elementwise_blocks,
    launch,
    load_part,
    rows_from,
)


def gated_activation_forward(gate: jax.Array, up: jax.Array | None, *, activation: Activation) -> jax.Array:
    """Returns activation(gate) * up, (rows, features).

    gate, up: (rows, features) of one floating dtype; or gate (rows, 2, features) and up None.
    """
    rows, features = gate.shape[0], gate.shape[-1]
    blocks = elementwise_blocks(rows, features, gate.dtype.itemsize, stride=features if up is None else None)

    def make_work(refs, y_ref):
        def work(first, part):
            sources = _halves(refs.values(), first, blocks.at_once)
            loaded = [_load(row, part) for row in sources]
            for (gate, up), y_row in zip(loaded, rows_from(y_ref, first, blocks.at_once), strict=True):
                y = activation.value(gate, y_ref.dtype) * up
                store(y_row.at[part.columns], y.astype(y_ref.dtype))

        return work

    operands = {"gate": gate} if up is None else {"gate": gate, "up": up}
    out_type = jax.ShapeDtypeStruct((rows, features), gate.dtype)
    return launch("gated_activation", operands, out_type, blocks, make_work)


def gated_activation_backward(
    gate: jax.Array, up: jax.Array | None, dy: jax.Array, *, activation: Activation
) -> tuple[jax.Array, jax.Array | None]:
    """Returns (dgate, dup), like gate and up; packed as they are packed.

    gate, up: (rows, features) of one floating dtype, or gate (rows, 2, features) and up None. dy: (rows, features).
    """
    rows, features = dy.shape
    blocks = elementwise_blocks(rows, features, dy.dtype.itemsize, stride=features if up is None else None)
    branches = {"gate": gate} if up is None else {"gate": gate, "up": up}

    def make_work(refs, *outputs):
        dy_ref = refs.pop("dy")

        def work(first, part):
            sources, results = (_halves(of, first, blocks.at_once) for of in (refs.values(), outputs))
            dy_rows = rows_from(dy_ref, first, blocks.at_once)
            loaded = [_load((*halves, dy_row), part) for halves, dy_row in zip(sources, dy_rows, strict=True)]
            for (gate, up, dy), (dgate_row, dup_row) in zip(loaded, results, strict=True):
                value, derivative = activation.value_and_derivative(gate, dy_ref.dtype)
                store(dgate_row.at[part.columns], (dy * up * derivative).astype(dy_ref.dtype))
                store(dup_row.at[part.columns], (dy * value).astype(dy_ref.dtype))

        return work

    out_type = (jax.ShapeDtypeStruct(gate.shape, gate.dtype),) * len(branches)
    outputs = launch("gated_activation_gradient", {**branches, "dy": dy}, out_type, blocks, make_work)
    return outputs[0], (None if up is None else outputs[1])


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def gated_activation_mosaic(activation: Activation, gate: jax.Array, up: jax.Array | None) -> jax.Array:
    """Returns what `gated_activation_forward` does; differentiable."""
    return gated_activation_forward(gate, up, activation=activation)


gated_activation_mosaic.defvjp(
    lambda activation, gate, up: (gated_activation_forward(gate, up, activation=activation), (gate, up)),
    lambda activation, saved, dy: gated_activation_backward(saved[0], saved[1], dy, activation=activation),
)


def _halves(refs: Collection[Any], first: jax.Array, count: int) -> list[tuple[Any, Any]]:
    """Returns references to the gate's and the linear branch's rows, which are in two arrays or packed in one."""
    rows = [rows_from(ref, first, count) for ref in refs]
    return [tuple(rows_from(row, 0, 2)) for row in rows[0]] if len(rows) == 1 else list(zip(*rows, strict=True))


def _load(row_refs: Sequence[Any], part: Part) -> list[jax.Array]:
    loaded = load_part(dict(enumerate(row_refs)), part)
    return [value.astype(jnp.float32) for value in loaded.values()]
