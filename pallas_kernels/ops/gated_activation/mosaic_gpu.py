"""The gated activation on Mosaic GPU: 16-byte accesses directly to registers, many small blocks.

Only the inputs are saved for the backward pass: computing the activation again costs no memory traffic.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_kernels.primitives.activations import Activation
from pallas_kernels.primitives.compat import store
from pallas_kernels.primitives.elementwise import Blocks, access_columns, default_elementwise, launch


def gated_activation_forward(gate: jax.Array, up: jax.Array | None, *, activation: Activation) -> jax.Array:
    """Returns activation(gate) * up, (rows, features).

    gate, up: (rows, features) of one floating dtype; or gate (rows, 2, features) and up None.
    """
    rows, features = gate.shape[0], gate.shape[-1]
    blocks = _blocks(rows, features, gate.dtype.itemsize)

    def make_work(refs, y_ref):
        inputs = tuple(refs.values())

        def work(row, parts):
            for part in parts:
                sources = _halves(inputs, row, part.columns)
                loaded = [plgpu.load(ref, layout=part.segment.layout, optimized=False) for ref in sources]
                gate, up = (value.astype(jnp.float32) for value in loaded)
                y = activation.value(gate, y_ref.dtype) * up
                store(y_ref.at[row, part.columns], y.astype(y_ref.dtype))

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
    blocks = _blocks(rows, features, dy.dtype.itemsize)
    branches = {"gate": gate} if up is None else {"gate": gate, "up": up}
    names = tuple(branches)

    def make_work(refs, *outputs):
        inputs, dy_ref = [refs[name] for name in names], refs["dy"]

        def work(row, parts):
            for part in parts:
                sources = (*_halves(inputs, row, part.columns), dy_ref.at[row, part.columns])
                loaded = [plgpu.load(ref, layout=part.segment.layout, optimized=False) for ref in sources]
                gate, up, dy = (value.astype(jnp.float32) for value in loaded)
                value, derivative = activation.value_and_derivative(gate, dy_ref.dtype)
                dgate_ref, dup_ref = _halves(outputs, row, part.columns)
                store(dgate_ref, (dy * up * derivative).astype(dgate_ref.dtype))
                store(dup_ref, (dy * value).astype(dup_ref.dtype))

        return work

    out_type = (jax.ShapeDtypeStruct(gate.shape, gate.dtype),) * len(branches)
    outputs = launch("gated_activation_gradient", {**branches, "dy": dy}, out_type, blocks, make_work)
    return outputs[0], (None if up is None else outputs[1])


def _blocks(rows: int, features: int, itemsize: int) -> Blocks:
    vectors = default_elementwise(rows, features, itemsize).vectors
    return Blocks(rows=rows, features=features, columns=access_columns(vectors, itemsize), itemsize=itemsize)


def _halves(refs, row, columns) -> tuple[Any, Any]:
    """Returns references to the gate's and the linear branch's part of a row, in two arrays or packed in one."""
    if len(refs) == 1:
        return refs[0].at[row, 0, columns], refs[0].at[row, 1, columns]
    return refs[0].at[row, columns], refs[1].at[row, columns]
