"""Flash attention forward on Mosaic GPU: one launch, online softmax in registers, products asynchronous.

A block has a tile of queries of one head. Its producer warpgroup loads operands by TMA, and each consumer warpgroup has
64 queries. For each key tile, a consumer starts the product with its queries and, behind it, the product of the
previous tile's weights and values, and computes the softmax of the one while the other runs. Consumers take turns, so
that one's exponentials run beside the other's products. Key tiles are visited from the last to the first; those that no
query sees are skipped, and the mask is applied only to those that it cuts.

Sources: Dao, "FlashAttention-2: faster attention with better parallelism and work partitioning", 2023,
https://arxiv.org/abs/2307.08691; Shah et al., "FlashAttention-3: fast and accurate attention with asynchrony and
low-precision", 2024, https://arxiv.org/abs/2407.08608
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.ops.attention.forward.block import Block, Consumer, load_operands
from pallas_kernels.ops.attention.forward.config import ROWS, STAGES, ForwardConfig, tuned_forward
from pallas_kernels.ops.attention.forward.schedule import Schedule
from pallas_kernels.ops.attention.launch import block_kernel, run_roles
from pallas_kernels.ops.attention.masking import segment_tiles
from pallas_kernels.ops.attention.problem import Extras, Problem
from pallas_kernels.primitives.platform import target_device, varying_like
from pallas_kernels.primitives.row_tiles import TileForm


def attention_forward(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    extras: Extras,
    *,
    problem: Problem,
    config: ForwardConfig | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Returns (out, lse): out as `attention`'s, lse (batch, heads, queries) float32, -inf for a query that sees no key.

    query, key, value: see `attention`; of one 16-bit dtype. Under `jax.shard_map` all arrays vary over the same axes.
    """
    config = config or tuned_forward(problem)
    arrays = extras.padded(config.rows, config.columns)
    if extras.sinks is not None:
        arrays["sinks"] = extras.sinks
    if extras.segments is not None:
        arrays["tiles"] = segment_tiles(problem.masking.key_tiles, *extras.segments, config.rows, config.columns)
    blocks = target_device().core_count if config.is_persistent else None
    schedule = Schedule.of(problem, config.rows, config.columns, blocks)
    table = schedule.table
    if table is not None:
        arrays["table"] = jnp.asarray(table)
    form, value_form = problem.forms
    out_form = replace(value_form, size=problem.value_size // config.output_parts)
    forms = {"q": form, "k": form, "v": value_form, "out": out_form}

    def attention(q_ref, k_ref, v_ref, extra_refs, *refs):
        *results, buffers, barriers = refs
        buffers = {name: forms[name].tiles(ref) if name in forms else ref for name, ref in buffers.items()}
        warpgroup = lax.axis_index("warpgroup")
        block = Block(
            problem=problem,
            config=config,
            schedule=schedule,
            index=lax.axis_index("block"),
            extras=extra_refs,
            buffers=buffers,
            barriers=barriers,
        )
        consumer = Consumer(block=block, warpgroup=warpgroup)
        run_roles(
            warpgroup,
            config.warpgroups,
            lambda: load_operands(block, q_ref, k_ref, v_ref),
            lambda: consumer.run(results),
            config.registers,
        )

    launch = block_kernel(
        attention,
        out_type=[
            jax.ShapeDtypeStruct((*query.shape[:3], value.shape[3]), problem.dtype),
            jax.ShapeDtypeStruct((problem.batch, problem.heads, schedule.tiles * config.rows), jnp.float32),
        ],
        blocks=schedule.blocks,
        consumers=config.warpgroups,
        scratch=_scratch_types(problem, config, forms),
        products=problem.products(1, 1),
        # Only TMA and tensor cores read shared memory, and there are no sums across warps.
        automatic_barriers=False,
        reduction_scratch_bytes=0,
    )
    out, lse = launch(query, key, value, arrays)
    return varying_like(out, query), varying_like(lse[:, :, : problem.masking.queries], query)


def _scratch_types(
    problem: Problem, config: ForwardConfig, forms: dict[str, TileForm]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The types of a block's buffers and barriers, by name."""
    warpgroups, has_segments = config.warpgroups, problem.masking.has_segments
    buffers = {
        "q": forms["q"].scratch(warpgroups, ROWS),
        "k": forms["k"].scratch(STAGES, config.columns),
        "v": forms["v"].scratch(STAGES, config.columns),
        "lse": plgpu.SMEM((warpgroups, ROWS), jnp.float32),
    }
    if config.own_output:
        buffers["out"] = forms["out"].scratch(warpgroups, ROWS)
    if has_segments:
        buffers["segments"] = plgpu.SMEM((STAGES, config.columns), jnp.int32)
    barriers = {
        "q_full": plgpu.Barrier(num_arrivals=forms["q"].copies, num_barriers=warpgroups),
        "q_empty": plgpu.Barrier(num_barriers=warpgroups),
        "k_full": plgpu.Barrier(num_arrivals=forms["k"].copies + has_segments, num_barriers=STAGES),
        "k_empty": plgpu.Barrier(num_arrivals=warpgroups, num_barriers=STAGES),
        "v_full": plgpu.Barrier(num_arrivals=forms["v"].copies, num_barriers=STAGES),
        "v_empty": plgpu.Barrier(num_arrivals=warpgroups, num_barriers=STAGES),
    }
    if config.ping_pong and warpgroups > 1:
        barriers["turn"] = plgpu.Barrier(num_barriers=warpgroups)
    return buffers, barriers
