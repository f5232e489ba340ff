"""Adding up what blocks found for the same queries, each with some of the keys."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.ops.attention.problem import Problem
from pallas_kernels.ops.attention.schedule import Schedule


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
    for i, (head, tile) in enumerate(schedule.rest_places):
        batch, q_head = divmod(head, problem.heads)
        start = tile * rows
        count = min(rows, out.shape[1] - start)
        out = out.at[batch, start : start + count, q_head].set(whole[i, :count])
        lse = lse.at[batch, q_head, start : start + rows].set(total[i])
    return out, lse
