"""The public function: checks, dispatch, and the gradient by the kernels. XLA gathers the rows."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from pallas_kernels.dispatch import Implementation, choose
from pallas_kernels.ops.embedding.config import is_preferred, is_product, is_too_narrow
from pallas_kernels.ops.embedding.mosaic_gpu_vjp import table_gradient
from pallas_kernels.ops.embedding.reference import embedding_reference, gather_rows
from pallas_kernels.primitives.checks import as_arrays, as_int32, check_lookup, check_width
from pallas_kernels.primitives.gradients import with_backward
from pallas_kernels.primitives.operation import operation
from pallas_kernels.primitives.platform import MOSAIC_DTYPES, dtypes_unsupported, mosaic_gpu_unsupported, varying_alike
from pallas_kernels.primitives.rows import THREADS

MODES = ("fill", "clip", "promise_in_bounds")
_MOST_INDICES = 2**30 - 1
"""The most indices and rows of a table together: their doubles are int32."""


def _from_parts(arguments: Mapping[str, Any], sums: Mapping[str, Any]) -> jax.Array:
    """Looks up the ids of this device's rows; the others' rows are zeros in the sum."""
    table, ids, mode = arguments["table"], arguments["ids"], arguments["mode"]
    part = table.shape[0]
    rows = part * lax.axis_size(sums["v"].axes)
    ids = ids.astype(jnp.int32) if mode == "clip" else jnp.where(ids < 0, ids + rows, ids).astype(jnp.int32)
    is_valid = (ids >= 0) & (ids < rows)
    own = jnp.clip(ids, 0, rows - 1) - lax.axis_index(sums["v"].axes) * part
    is_here = (own >= 0) & (own < part)
    adds = is_here if mode == "clip" else is_here & is_valid
    found = embedding(table, jnp.where(is_here, own, 0), dtype=arguments["dtype"])
    found = jnp.where(adds[..., None], found, lax.stop_gradient(found))
    y = sums["v"].total(jnp.where(is_here[..., None], found, 0))
    return jnp.where(is_valid[..., None], y, jnp.nan) if mode == "fill" else y


@operation("table: +v d, ids: ... -> ... d", _from_parts)
def embedding(
    table: jax.Array,
    ids: jax.Array,
    *,
    mode: str = "fill",
    dtype: DTypeLike | None = None,
    implementation: Implementation = None,
) -> jax.Array:
    """Returns the rows of a table that `ids` names.

    Equivalent to `jnp.take(table, ids, axis=0, mode=mode).astype(dtype)`, and with "promise_in_bounds" to
    `table[ids].astype(dtype)`. XLA gathers the rows. "mosaic" is another gradient of the table: it sorts the indices
    and adds up the rows of each in float32, in a fixed order and without atomics. So it repeats bit for bit, and takes
    about as long for equal indices as for different ones. XLA's scatter-add of 8192 rows of 1024 bfloat16 values into
    two takes 38 ms on an H100, since an atomic addition of 16 bits is a loop that tries again.

    Into few rows (256, of float32 rows 16) the gradient is a matrix product, `one_hot(ids).T @ dy`, in 7 µs for those.
    There an infinite or NaN value of `dy` makes its column of the gradient NaN, and not in one row alone.

    Args:
        table: (rows, features), bfloat16, float16 or float32 (float64 with "xla").
        ids: of any shape and integer dtype.
        mode: what an index out of range means. A negative one first counts from the last row, except with "clip".
            "fill": its row is NaN. "clip": the first or last row. "promise_in_bounds": the first or last row, but as
            with "fill" it adds nothing to the gradient.
        dtype: the rows' dtype; None for the table's. The gradient has the table's, and is rounded once.
        implementation: one of the names below, a sequence of them in order of preference, or None.
            "mosaic": the gradient by Mosaic GPU kernels, for Hopper GPUs or `plgpu.force_gpu_interpret_mode`, which
                need 128 features; or the product.
            "xla": always runs. The gradient is a scatter-add in float32, whose order may differ between runs.
            None: "mosaic", if it can run, for at least 2^18 values in all: of 16 bits, or into at most 16 rows of the
                table. Else "xla".

    Returns:
        (*ids.shape, features).

    Raises:
        TypeError, ValueError: the arguments do not fit together, or the mode or implementation is unknown.
        NotImplementedError: the requested implementation cannot run; the message says why.
    """
    table, ids = as_arrays("embedding", table=table, ids=ids)
    check_lookup("embedding", MODES, mode, table, ids=ids)
    out_dtype = _dtype(table, dtype)
    ids = as_int32(ids)
    support = {"mosaic": partial(mosaic_unsupported, table, ids, out_dtype), "xla": lambda: None}
    is_best = is_preferred(ids.size, table.shape, out_dtype.itemsize)
    chosen = choose("embedding", implementation, support, preferred=("mosaic",) if is_best else ())
    if chosen == "xla" or table.size == 0 or ids.size == 0:
        return embedding_reference(table, ids, mode=mode, dtype=out_dtype)
    backward = partial(embedding_backward, rows=table.shape[0], dtype=table.dtype, mode=mode)
    lookup = with_backward(
        lambda table, ids: gather_rows(table, ids, mode).astype(out_dtype),
        lambda ids, dy: (backward(ids, dy), None),
        saves=lambda table, ids: (ids,),
    )
    return lookup(*varying_alike((table, ids)))


def mosaic_unsupported(table: jax.Array, ids: jax.Array, dtype: jnp.dtype) -> str | None:
    """Returns why the Mosaic GPU kernels cannot compute the gradient of this call here, or None if they can."""
    if reason := dtypes_unsupported(table=table):
        return reason
    if dtype.name not in MOSAIC_DTYPES:
        return f"rows of {dtype.name} are asked for, the kernels take {', '.join(MOSAIC_DTYPES)}"
    rows, features = table.shape
    if ids.size and is_too_narrow(table.shape, dtype.itemsize):
        return f"rows have {features} features, a warpgroup shares at least {THREADS}"
    if ids.size + rows > _MOST_INDICES:
        return f"{ids.size} indices and {rows} rows are more than {_MOST_INDICES}, which int32 cannot count twice"
    return mosaic_gpu_unsupported()


def _dtype(table: jax.Array, dtype: DTypeLike | None) -> jnp.dtype:
    """Returns the result's dtype."""
    if dtype is None:
        return table.dtype
    found = jax.dtypes.canonicalize_dtype(dtype)
    if not jnp.issubdtype(found, jnp.floating):
        raise TypeError(f"embedding: dtype must be floating, got {found.name}.")
    check_width("embedding", "dtype", found)
    return found


def embedding_backward(ids: jax.Array, dy: jax.Array, *, rows: int, dtype: DTypeLike, mode: str) -> jax.Array:
    """Computes the gradient of a table of `rows` rows and dtype `dtype`, by the kernels."""
    if mode == "clip":
        ids = jnp.clip(ids, 0, rows - 1)
    else:
        ids = jnp.where(ids < 0, ids + rows, ids)
        ids = jnp.where((ids < 0) | (ids >= rows), rows, ids)
    gradient = one_hot_gradient if is_product(rows, dy.dtype.itemsize) else table_gradient
    return gradient(dy.reshape(-1, dy.shape[-1]), ids.reshape(-1), rows, dtype)


def one_hot_gradient(dy: jax.Array, ids: jax.Array, rows: int, dtype: DTypeLike) -> jax.Array:
    """Computes what `table_gradient` does as a matrix product, for few rows. Its products with ones are exact."""
    one_hot = jax.nn.one_hot(ids, rows, dtype=dy.dtype)
    precision = {"precision": "highest", "preferred_element_type": jnp.float32}
    return lax.dot_general(one_hot, dy, (((0,), (0,)), ((), ())), **precision).astype(dtype)
