"""Adding up what blocks found for the same queries, each with some of the keys."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.ops.attention.forward.schedule import Schedule
from pallas_kernels.ops.attention.problem import Problem


def with_parts(
    out: jax.Array,
    lse: jax.Array,
    part_out: jax.Array,
    part_lse: jax.Array,
    *,
    problem: Problem,
    schedule: Schedule,
    rows: int,
) -> tuple[jax.Array, jax.Array]:
    """out and lse with the tiles that were taken in parts filled in.

    part_out: (tiles * parts, rows, head size), normalised. part_lse: (tiles * parts, rows). Every part sees keys.
    """
    shape = (schedule.rest, schedule.parts, rows)
    part_lse = part_lse.reshape(shape)
    total = jax.nn.logsumexp(part_lse, axis=1)
    weights = jnp.exp(part_lse - total[:, None])
    whole = jnp.sum(part_out.reshape(*shape, -1).astype(jnp.float32) * weights[..., None], axis=1).astype(out.dtype)
    heads, tiles = np.array(schedule.rest_places).T[..., None]
    batch, head = np.divmod(heads, problem.heads)
    row = tiles * rows + np.arange(rows)
    # Rows beyond the last query are dropped.
    out = out.at[batch, row, head].set(whole, mode="drop", unique_indices=True)
    return out, lse.at[batch, head, row].set(total, mode="drop", unique_indices=True)
