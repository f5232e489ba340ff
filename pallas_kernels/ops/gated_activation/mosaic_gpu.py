"""The gated activation forward on Mosaic GPU: 16-byte accesses straight to registers, many small blocks."""

from __future__ import annotations

from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_kernels.ops.gated_activation.config import ElementwiseConfig, default_forward
from pallas_kernels.primitives.activations import Activation
from pallas_kernels.primitives.elementwise import Blocks, launch


def gated_activation_forward(
    gate: jax.Array, up: jax.Array | None, *, activation: Activation, config: ElementwiseConfig | None = None
) -> jax.Array:
    """Returns activation(gate) * up, (rows, features).

    gate, up: (rows, features) of one floating dtype; or gate (rows, 2, features) and up None.
    """
    rows, features = gate.shape[0], gate.shape[-1]
    itemsize = gate.dtype.itemsize
    config = config or default_forward(rows * features, itemsize)
    blocks = Blocks(rows=rows, features=features, columns=config.columns(itemsize), itemsize=itemsize)

    def make_work(refs, y_ref):
        inputs = tuple(refs.values())

        def work(row, parts):
            for part in parts:
                sources = halves(inputs, row, part.columns)
                loaded = [plgpu.load(ref, layout=part.segment.layout, optimized=False) for ref in sources]
                gate, up = (value.astype(jnp.float32) for value in loaded)
                y_ref[row, part.columns] = (activation.value(gate, y_ref.dtype) * up).astype(y_ref.dtype)

        return work

    operands = {"gate": gate} if up is None else {"gate": gate, "up": up}
    out_type = jax.ShapeDtypeStruct((rows, features), gate.dtype)
    return launch("gated_activation", operands, out_type, blocks, make_work)


def halves(refs, row, columns) -> tuple[Any, Any]:
    """References of the gate's and the other branch's part of a row, in two arrays or packed in one."""
    if len(refs) == 1:
        return refs[0].at[row, 0, columns], refs[0].at[row, 1, columns]
    return refs[0].at[row, columns], refs[1].at[row, columns]
