"""dquery: a block holds queries and goes over the keys that they see.

With q, k, v, do tiles of query, key, value and dout,

    s = q @ k.T;  p = exp(s - lse);  dp = do @ v.T;  ds = p * (dp - delta);  dq += ds @ k

where ds is a left operand that never leaves its registers. Scores are computed here once more instead of being added up
over blocks of the other kernel: results do not depend on the order in which blocks run.

What each query's row needs (`rows_of`) this kernel can make, too: a block has its queries' dout, and is brought their
output in the place of the first keys.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
from jax import lax

from pallas_kernels.ops.attention.backward.config import QueriesConfig
from pallas_kernels.ops.attention.backward.queries.consumer import Computing
from pallas_kernels.ops.attention.backward.queries.producer import Block, Launch, Refs
from pallas_kernels.ops.attention.backward.tiles import added
from pallas_kernels.ops.attention.gqa_packing import Packing
from pallas_kernels.ops.attention.problem import Problem
from pallas_kernels.ops.attention.tiles.row_tiles import TileForm
from pallas_kernels.primitives import settings
from pallas_kernels.primitives.flop_metadata import Products


def query_gradients(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    dout: jax.Array,
    rows: jax.Array | tuple[jax.Array, jax.Array],
    extras: Mapping[str, jax.Array],
    *,
    problem: Problem,
    form: TileForm,
    config: QueriesConfig,
    makes_dbias: bool = False,
    period: int | None = None,
    packing: Packing | None = None,
    product: Products | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """Returns dquery, like query; `rows_of`'s rows; and the gradients of all scores where they are asked for.

    Args:
        query, key, value, dout: in device memory.
        rows: of `rows_of`; or what the kernel makes them of: the output, like query, and the log-sum-exp, (batch,
            heads, queries padded to whole tiles).
        extras: those that there are of "query_segments", "key_segments" (padded to whole tiles), "tiles" (with
            segments: (batch, tiles of queries, 4)), "words", "dense"; and "places", the keys' numbers (padded, int32).
        form: of the tiles of query, key, value and dout.
        makes_dbias: whether to store (batch, heads, queries, keys), float32, both padded to whole tiles. No tile is
            skipped then.
        period: under a causal mask with packed heads, the queries of a head: numbers begin anew after so many.
        packing: how rows of the packed problem lie in query, dout and output; None: as they are.
        product: one of the kernel's matrix products, for the FLOPs that the program states.
    """
    makes_rows = isinstance(rows, tuple)
    launch = Launch(
        problem=problem,
        form=form,
        config=config,
        batch=query.shape[0],
        makes_rows=makes_rows,
        makes_dbias=makes_dbias,
        period=period,
        packing=packing,
    )

    def attention_backward_queries(query_ref, key_ref, value_ref, dout_ref, rows_refs, extras_refs, *others):
        dquery_ref, *made, scratch = others
        refs = Refs(
            query=query_ref,
            key=key_ref,
            value=value_ref,
            dout=dout_ref,
            rows=rows_refs,
            extras=extras_refs,
            dquery=dquery_ref,
            made_rows=made[0] if makes_rows else None,
            dbias=made[-1] if makes_dbias else None,
        )
        warpgroup = lax.axis_index("warpgroup")
        block = Block.of(launch, refs, scratch, keys=key.shape[1])

        @pl.when(warpgroup == config.warpgroups)
        def _():
            plgpu.set_max_registers(config.memory_registers, action="decrease")
            block.bring()

        @pl.when(warpgroup < config.warpgroups)
        def _():
            plgpu.set_max_registers(config.compute_registers, action="increase")
            Computing(block=block, warpgroup=warpgroup).run()

    params = plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=not config.automatic_barriers)
    if problem.masking.has_segments:
        params = replace(params, reduction_scratch_bytes=0)  # there is no room, and no sum across warps
    kernel = settings.kernel(
        attention_backward_queries,
        out_type=launch.results(query),
        grid=(launch.blocks * launch.lanes,),
        grid_names=("block",),
        num_threads=config.warpgroups + 1,
        thread_name="warpgroup",
        scratch_types=(launch.scratch_types(),),
        compiler_params=params,
        products=product and product.times(3),
    )
    dquery, *others = kernel(query, key, value, dout, rows, dict(extras))
    dquery = dquery if config.parts == 1 else added(dquery)
    made = others.pop(0) if makes_rows else rows
    return dquery, made, others[0] if others else None
