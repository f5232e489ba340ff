"""Three forms of one kernel for softmax, to study what fusion saves. `pallas_kernels.softmax` uses the fastest one.

| form | launches | reads of x | writes | further arrays |
| --- | --- | --- | --- | --- |
| THREE_KERNEL | 3 | 3 | 1 | a row's maximum and sum, written and read |
| ONLINE | 1 | 2, the second out of the L2 cache where it lasts | 1 | none |
| FUSED | 1 | 1 | 1 | none |

Each takes (rows, features), features from 128 to 16384, and returns the weights.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.ops.softmax.masking import Masking
from pallas_kernels.ops.softmax.mosaic_gpu import softmax_forward
from pallas_kernels.primitives import settings
from pallas_kernels.primitives.platform import varying_like
from pallas_kernels.primitives.row_kernel import compiler_params
from pallas_kernels.primitives.rows import load_row, map_row, row_max, row_sum, split_row, store_row, to_float32

THREE_KERNEL = "three kernels"
"""A maximum, a sum of exponentials and a division, each of which reads x from memory."""
ONLINE = "online"
"""Maximum and sum in one pass over the row, chunk by chunk; the weights in a second pass."""
FUSED = "fused"
"""The row stays in registers."""


def softmax_three_kernels(x: jax.Array) -> jax.Array:
    """Computes softmax in the form `THREE_KERNEL`."""
    segments = split_row(x.shape[1], x.dtype.itemsize)

    def load(x_ref):
        return to_float32(load_row(x_ref.at[lax.axis_index("row")], segments))

    def softmax_maximum(x_ref, maximum_ref):
        maximum_ref[lax.axis_index("row")] = row_max(load(x_ref))

    def softmax_sum(x_ref, maximum_ref, sum_ref):
        row = lax.axis_index("row")
        maximum = maximum_ref[row]
        sum_ref[row] = row_sum(map_row(lambda v: jnp.exp(v - maximum), load(x_ref)), segments)

    def softmax_divide(x_ref, maximum_ref, sum_ref, y_ref):
        row = lax.axis_index("row")
        maximum, inverse = maximum_ref[row], 1 / sum_ref[row]
        store_row(y_ref.at[row], map_row(lambda v: jnp.exp(v - maximum) * inverse, load(x_ref)), segments)

    def launch(body, out_type, *operands):
        output = settings.kernel(
            body,
            out_type=out_type,
            grid=(x.shape[0],),
            grid_names=("row",),
            compiler_params=compiler_params(x.dtype),
        )(*operands)
        return varying_like(output, x)

    one_a_row = jax.ShapeDtypeStruct(x.shape[:1], jnp.float32)
    maximum = launch(softmax_maximum, one_a_row, x)
    total = launch(softmax_sum, one_a_row, x, maximum)
    return launch(softmax_divide, jax.ShapeDtypeStruct(x.shape, x.dtype), x, maximum, total)


def softmax_online(x: jax.Array, *, chunk: int = 2048) -> jax.Array:
    """Computes softmax in the form `ONLINE`."""
    return softmax_forward(x, None, masking=Masking(), register_columns=0, chunk=chunk)


def softmax_fused(x: jax.Array) -> jax.Array:
    """Computes softmax in the form `FUSED`."""
    return softmax_forward(x, None, masking=Masking(), register_columns=x.shape[1])


FORMS: Mapping[str, Callable[[jax.Array], jax.Array]] = MappingProxyType(
    {THREE_KERNEL: softmax_three_kernels, ONLINE: softmax_online}
)
"""Softmax kernels that only the study compares, by name."""
