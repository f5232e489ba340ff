"""The gated activation backward on Mosaic GPU: one pass reads gate, up and dy and writes dgate and dup.

Nothing is saved in the forward pass but its inputs: computing the activation again costs no bytes.
"""

from __future__ import annotations

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_kernels.ops.gated_activation.config import ElementwiseConfig, default_backward
from pallas_kernels.ops.gated_activation.mosaic_gpu import halves
from pallas_kernels.primitives.activations import Activation
from pallas_kernels.primitives.elementwise import Blocks, launch


def gated_activation_backward(
    gate: jax.Array,
    up: jax.Array | None,
    dy: jax.Array,
    *,
    activation: Activation,
    config: ElementwiseConfig | None = None,
) -> tuple[jax.Array, jax.Array | None]:
    """Returns (dgate, dup), like gate and up; packed as they are packed.

    gate, up: (rows, features) of one floating dtype, or gate (rows, 2, features) and up None. dy: (rows, features).
    """
    rows, features = dy.shape
    itemsize = dy.dtype.itemsize
    config = config or default_backward(rows * features, itemsize)
    blocks = Blocks(rows=rows, features=features, columns=config.columns(itemsize), itemsize=itemsize)
    branches = {"gate": gate} if up is None else {"gate": gate, "up": up}

    def make_work(refs, *outputs):
        inputs, dy_ref = [refs[name] for name in branches], refs["dy"]

        def work(row, parts):
            for part in parts:
                sources = (*halves(inputs, row, part.columns), dy_ref.at[row, part.columns])
                loaded = [plgpu.load(ref, layout=part.segment.layout, optimized=False) for ref in sources]
                gate, up, dy = (value.astype(jnp.float32) for value in loaded)
                value, derivative = activation.value_and_derivative(gate, dy_ref.dtype)
                dgate_ref, dup_ref = halves(outputs, row, part.columns)
                dgate_ref[...] = (dy * up * derivative).astype(dgate_ref.dtype)
                dup_ref[...] = (dy * value).astype(dup_ref.dtype)

        return work

    out_type = (jax.ShapeDtypeStruct(gate.shape, gate.dtype),) * len(branches)
    outputs = launch("gated_activation_gradient", {**branches, "dy": dy}, out_type, blocks, make_work)
    return outputs[0], (None if up is None else outputs[1])
