"""dkey and dvalue: a block holds keys and values and goes over the queries of all heads that see them.

Scores are computed transposed, keys along rows, so that weights and score gradients are left operands of the next
products without leaving their registers: with q, k, v, do tiles of query, key, value and dout,

    s = k @ q.T;  p = exp(s - lse);  dv += p @ do;  dp = v @ do.T;  ds = p * (dp - delta);  dk += ds @ q

Query heads that share a key head are summed in the accumulators; where there are few keys, blocks share a group's
heads, and their sums are added up behind. Source: Dao, "FlashAttention-2", 2023, https://arxiv.org/abs/2307.08691
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
from jax import lax

from pallas_kernels.ops.attention.backward.config import WARPGROUP_ROWS, KeysConfig
from pallas_kernels.ops.attention.backward.keys.consumer import Computing
from pallas_kernels.ops.attention.backward.keys.producer import Block, Launch, Refs
from pallas_kernels.ops.attention.backward.tiles import added
from pallas_kernels.ops.attention.gqa_packing import Packing
from pallas_kernels.ops.attention.problem import Problem
from pallas_kernels.ops.attention.tiles.row_tiles import TileForm
from pallas_kernels.primitives import settings
from pallas_kernels.primitives.flop_metadata import Products


def key_value_gradients(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    dout: jax.Array,
    rows: jax.Array,
    extras: Mapping[str, jax.Array],
    *,
    problem: Problem,
    form: TileForm,
    config: KeysConfig,
    packing: Packing | None = None,
    product: Products | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Returns (dkey, dvalue), like key and value.

    Args:
        query, key, value, dout: in device memory.
        rows: of `rows_of`.
        extras: those that there are of "query_segments", "key_segments" (padded to whole tiles), "tiles" (with
            segments: (batch, tiles of keys, 4)), "words", "dense" (its last axes keys, queries).
        form: of their tiles.
    """
    launch = Launch(problem=problem, form=form, config=config, batch=query.shape[0], packing=packing)

    def attention_backward_keys(query_ref, key_ref, value_ref, dout_ref, rows_ref, extras_refs, *others):
        *gradients, scratch = others
        dkey_ref, dvalue_ref = gradients if config.parts == 1 else (gradients[0].at[0], gradients[0].at[1])
        refs = Refs(
            query=query_ref,
            key=key_ref,
            value=value_ref,
            dout=dout_ref,
            rows=rows_ref,
            extras=extras_refs,
            dkey=dkey_ref,
            dvalue=dvalue_ref,
        )
        warpgroup = lax.axis_index("warpgroup")
        block = Block.of(launch, refs, scratch, queries=query.shape[1])

        def compute(makes_dkey: bool, makes_dvalue: bool, first: Any):
            Computing(block=block, makes_dkey=makes_dkey, makes_dvalue=makes_dvalue, first=first).run()

        def compute_tile(own: Block, warpgroup: Any):
            plgpu.barrier_wait(own.scratch.held)
            Computing(block=own, makes_dkey=True, makes_dvalue=True, first=warpgroup * WARPGROUP_ROWS).run()

        @pl.when(warpgroup == config.warpgroups)
        def _():
            plgpu.set_max_registers(config.memory_registers, action="decrease")
            block.bring()

        @pl.when(warpgroup < config.warpgroups)
        def _():
            plgpu.set_max_registers(config.compute_registers, action="increase")
            if config.tiles > 1:
                lax.fori_loop(0, block.tiles, lambda i, _: compute_tile(block.at(i), warpgroup), None)
                return
            plgpu.barrier_wait(block.scratch.held)
            if config.shares_keys:
                compute(True, True, warpgroup * WARPGROUP_ROWS)
                return
            pl.when(warpgroup == 0)(lambda: compute(False, True, 0))
            pl.when(warpgroup == 1)(lambda: compute(True, False, 0))

    kernel = settings.kernel(
        attention_backward_keys,
        out_type=launch.results(key),
        grid=(launch.blocks * launch.lanes,),
        grid_names=("block",),
        num_threads=config.warpgroups + 1,
        thread_name="warpgroup",
        scratch_types=(launch.scratch_types(),),
        compiler_params=plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=not config.automatic_barriers),
        products=product and product.times(4),
    )
    made = kernel(query, key, value, dout, rows, dict(extras))
    return (added(made[0][0]), added(made[0][1])) if config.parts > 1 else tuple(made)
