"""dquery, dkey and dvalue in one kernel, which computes scores once: five products a tile instead of seven.

A block works as in `keys`, and multiplies its score gradients by its keys besides. That product is the block's
share of dquery, which the warpgroup that brings queries adds to a float32 array in device memory, by TMA. The blocks
that share queries do so in the order of their keys, each one waiting for the one before it: sums come out the same
whatever the order in which blocks run. The first one stores its share, so that nothing need be set to zero before; the
last one stores no sum, but dquery, or other blocks make it of the sums (`finish`). A block goes over queries
from the last one down, as do those that it waits for, which were all launched before it: so the first of the running
blocks never waits, and none waits for ever.

Sources: the backward pass of Shah et al., "FlashAttention-3", 2024, https://arxiv.org/abs/2407.08608; queries from the
last one down: Qiang et al., "DASH: Deterministic Attention Scheduling", 2026,
https://arxiv.org/abs/2601.21824
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import lax

from pallas_kernels.ops.attention.backward.config import WARPGROUPS
from pallas_kernels.ops.attention.backward.fused_consumer import Computing
from pallas_kernels.ops.attention.backward.fused_launch import Block, Launch, Outputs
from pallas_kernels.ops.attention.backward.fused_producer import Adding
from pallas_kernels.ops.attention.backward.tiles import Inputs, added
from pallas_kernels.ops.attention.launch import block_kernel, run_roles
from pallas_kernels.ops.attention.problem import Problem
from pallas_kernels.ops.attention.row_tiles import TileForm

Gradients = tuple[jax.Array, jax.Array, jax.Array]


def by_batch(launch: Callable[..., Gradients], problem: Problem, operands: tuple[jax.Array, ...]) -> Gradients:
    """launch(problem, operands), of which copies under `jax.vmap` are one launch.

    The copies that JAX would make of the kernel share its semaphores, so that none knows whose turn it is.

    Args:
        operands: whose first axis is the batch, as is that of the results.
    """

    @jax.custom_batching.custom_vmap
    def compute(operands):
        return launch(problem, operands)

    @compute.def_vmap
    def _mapped(count, is_mapped, operands):
        def flat(array, mapped):
            whole = array if mapped else jnp.broadcast_to(array, (count, *array.shape))
            return whole.reshape(-1, *whole.shape[2:])

        batch = problem.batch
        results = by_batch(launch, replace(problem, batch=count * batch), tuple(map(flat, operands, is_mapped[0])))
        return tuple(array.reshape(count, batch, *array.shape[1:]) for array in results), (True, True, True)

    return compute(operands)


def fused_gradients(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    dout: jax.Array,
    rows: jax.Array,
    *,
    problem: Problem,
    form: TileForm,
    parts: int,
) -> Gradients:
    """Returns (dquery, dkey, dvalue), like query, key and value.

    Copies under `jax.vmap` run as one launch, with which they share no turns. Beside its results a launch takes a
    float32 array like query with whole tiles of queries; and where blocks share a group's heads, as many dkeys and
    dvalues as there are parts.

    Args:
        rows: of `rows_of`.
        problem: with whole tiles of keys.
        form: of tiles of query, key, value and dout.
        parts: blocks that share a group's heads.
    """
    return by_batch(partial(_run, form=form, parts=parts), problem, (query, key, value, dout, rows))


def _run(problem: Problem, operands: tuple[jax.Array, ...], *, form: TileForm, parts: int) -> Gradients:
    query, key, value, *_ = operands
    launch = Launch(problem=problem, form=form, parts=parts)

    def attention_backward_fused(query_ref, key_ref, value_ref, dout_ref, rows_ref, *others):
        dquery_ref, *gradients, sums_ref, scratch = others
        dkey_ref, dvalue_ref = gradients if parts == 1 else (gradients[0].at[0], gradients[0].at[1])
        inputs = Inputs(query=query_ref, key=key_ref, value=value_ref, dout=dout_ref, rows=rows_ref)
        outputs = Outputs(dquery_ref, dkey_ref, dvalue_ref, sums_ref)
        warpgroup, number = lax.axis_index("warpgroup"), lax.axis_index("block")
        block = Block.of(launch, inputs, outputs, scratch, number, length=query.shape[1])

        def produce():
            _either(launch, number, Adding(block).run, lambda finish: _fetch(launch, block, finish, number))

        def consume():
            computing = Computing(block=block, warpgroup=warpgroup)
            _either(launch, number, computing.run, lambda finish: _finish(launch, block, finish, number, warpgroup))

        run_roles(warpgroup, WARPGROUPS, produce, consume, launch.registers, consumers_first=launch.warps_apart)

    kernel = block_kernel(
        attention_backward_fused,
        out_type=launch.results(query, key, value),
        blocks=launch.adders + (launch.finishers.blocks if launch.finishers else 0),
        consumers=WARPGROUPS,
        scratch=(launch.scratch_types(),),
        products=problem.product and problem.product.times(5),
        automatic_barriers=launch.automatic_barriers,
    )
    dquery, *gradients, _ = kernel(*operands)
    dkey, dvalue = gradients if parts == 1 else map(added, gradients[0])
    return dquery, dkey, dvalue


def _either(launch: Launch, number: jax.Array, adds, finishes) -> None:
    """What a block does: the last ones finish, if there are such."""
    if launch.finishers is None:
        adds()
        return
    pl.when(number < launch.adders)(adds)
    pl.when(number >= launch.adders)(partial(finishes, launch.finishers))


def _fetch(launch: Launch, block: Block, finishers, number: jax.Array) -> None:
    scratch = block.scratch
    finishers.bring(
        number - launch.adders,
        launch.part_of,
        block.outputs.sums,
        scratch.share,
        block.turns,
        scratch.fetched,
        scratch.made,
    )


def _finish(launch: Launch, block: Block, finishers, number: jax.Array, warpgroup: jax.Array) -> None:
    scratch = block.scratch
    finishers.finish(
        number - launch.adders,
        launch.part_of,
        block.outputs.dquery,
        scratch.share,
        scratch.done,
        scratch.fetched,
        scratch.made,
        warpgroup=warpgroup,
        scale=launch.problem.scale,
    )
