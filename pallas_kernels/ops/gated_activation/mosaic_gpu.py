"""The gated activation on Mosaic GPU: 16-byte accesses directly to registers, many small blocks.

Only the inputs are saved for the backward pass: computing the activation again costs no memory traffic.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import partial
from typing import Any

import jax

from pallas_kernels.primitives.activations import Activation
from pallas_kernels.primitives.compat import store
from pallas_kernels.primitives.elementwise import elementwise_blocks, launch, load_wide, rows_from
from pallas_kernels.primitives.gradients import with_backward


def gated_activation_forward(gate: jax.Array, up: jax.Array | None, *, activation: Activation) -> jax.Array:
    """Returns activation(gate) * up, (rows, features).

    gate, up: (rows, features) of one floating dtype; or gate (rows, 2, features) and up None.
    """
    rows, features = gate.shape[0], gate.shape[-1]
    blocks = elementwise_blocks(rows, features, gate.dtype.itemsize, stride=features if up is None else None)

    def make_work(refs):
        y_ref = refs.pop("y")

        def work(first, part):
            sources = _halves(refs.values(), first, blocks.at_once)
            loaded = [load_wide({"gate": gate, "up": up}, part) for gate, up in sources]
            for own, y_row in zip(loaded, rows_from(y_ref, first, blocks.at_once), strict=True):
                y = activation.value(own["gate"], y_ref.dtype) * own["up"]
                store(y_row.at[part.columns], y.astype(y_ref.dtype))

        return work

    outputs = {"y": jax.ShapeDtypeStruct((rows, features), gate.dtype)}
    return launch("gated_activation", {"gate": gate, "up": up}, outputs, blocks, make_work)["y"]


def gated_activation_backward(
    gate: jax.Array, up: jax.Array | None, dy: jax.Array, *, activation: Activation
) -> tuple[jax.Array, jax.Array | None]:
    """Returns (dgate, dup), like gate and up; packed as they are packed.

    gate, up: (rows, features) of one floating dtype, or gate (rows, 2, features) and up None. dy: (rows, features).
    """
    rows, features = dy.shape
    blocks = elementwise_blocks(rows, features, dy.dtype.itemsize, stride=features if up is None else None)

    def make_work(refs):
        dy_ref, *outputs = (refs.pop(name) for name in ("dy", *names))

        def work(first, part):
            sources, results = (_halves(of, first, blocks.at_once) for of in (refs.values(), outputs))
            dy_rows = rows_from(dy_ref, first, blocks.at_once)
            rows = [{"gate": gate, "up": up, "dy": dy} for (gate, up), dy in zip(sources, dy_rows, strict=True)]
            for own, (dgate_row, dup_row) in zip([load_wide(each, part) for each in rows], results, strict=True):
                value, derivative = activation.value_and_derivative(own["gate"], dy_ref.dtype)
                store(dgate_row.at[part.columns], (own["dy"] * own["up"] * derivative).astype(dy_ref.dtype))
                store(dup_row.at[part.columns], (own["dy"] * value).astype(dy_ref.dtype))

        return work

    operands = {"gate": gate, "up": up, "dy": dy}
    names = ("dgate",) if up is None else ("dgate", "dup")
    gradients: dict[str, Any] = dict.fromkeys(names, jax.ShapeDtypeStruct(gate.shape, gate.dtype))
    found = launch("gated_activation_gradient", operands, gradients, blocks, make_work)
    return found["dgate"], found.get("dup")


def gated_activation_mosaic(activation: Activation, gate: jax.Array, up: jax.Array | None) -> jax.Array:
    """Returns what `gated_activation_forward` does; differentiable."""
    forward = partial(gated_activation_forward, activation=activation)
    backward = partial(gated_activation_backward, activation=activation)
    return with_backward(forward, backward)(gate, up)


def _halves(refs: Collection[Any], first: jax.Array, count: int) -> list[tuple[Any, Any]]:
    """Returns references to the gate's and the linear branch's rows, which are in two arrays or packed in one."""
    rows = [rows_from(ref, first, count) for ref in refs]
    return [tuple(rows_from(row, 0, 2)) for row in rows[0]] if len(rows) == 1 else list(zip(*rows, strict=True))
