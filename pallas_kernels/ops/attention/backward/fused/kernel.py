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

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.ops.attention.backward.config import FusedConfig, padded_head
from pallas_kernels.ops.attention.backward.fused.consumer import Computing
from pallas_kernels.ops.attention.backward.fused.launch import WARPGROUPS, Block, Launch, Outputs
from pallas_kernels.ops.attention.backward.fused.producer import Adding
from pallas_kernels.ops.attention.backward.tiles import Inputs, added
from pallas_kernels.ops.attention.problem import Problem
from pallas_kernels.ops.attention.tiles.row_tiles import GROUP
from pallas_kernels.primitives import settings

Gradients = tuple[jax.Array, jax.Array, jax.Array]


def by_batch(
    launch: Callable[..., Gradients],
    problem: Problem,
    operands: tuple[jax.Array, ...],
    extras: Mapping[str, jax.Array],
) -> Gradients:
    """launch(problem, operands, extras), of which copies under `jax.vmap` are one launch.

    The copies that JAX would make of the kernel share its semaphores, so that none knows whose turn it is.

    Args:
        operands: whose first axis is the batch, as is that of the results.
        extras: "words", with which copies come one after the other, since a dropout mask depends on the place in the
            batch; and "dense" (1 or batch, ...).
    """

    @jax.custom_batching.custom_vmap
    def compute(operands, extras):
        return launch(problem, operands, extras)

    @compute.def_vmap
    def _mapped(count, is_mapped, operands, extras):
        def whole(array, mapped):
            return array if mapped else jnp.broadcast_to(array, (count, *array.shape))

        operands = tuple(map(whole, operands, is_mapped[0]))
        extras = {name: whole(array, is_mapped[1][name]) for name, array in extras.items()}
        if "words" in extras:
            results = jax.lax.map(lambda one: by_batch(launch, problem, *one), (operands, extras))
            return results, (True, True, True)
        batch = problem.batch
        if "dense" in extras:
            dense = extras["dense"]
            extras["dense"] = jnp.broadcast_to(dense, (count, batch, *dense.shape[2:]))
        operands, extras = jax.tree.map(lambda array: array.reshape(-1, *array.shape[2:]), (operands, extras))
        results = by_batch(launch, replace(problem, batch=count * batch), operands, extras)
        return tuple(array.reshape(count, batch, *array.shape[1:]) for array in results), (True, True, True)

    return compute(operands, dict(extras))


def fused_gradients(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    dout: jax.Array,
    rows: jax.Array,
    extras: Mapping[str, jax.Array],
    *,
    problem: Problem,
    config: FusedConfig,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns (dquery, dkey, dvalue), like query, key and value.

    Copies under `jax.vmap` run as one launch, with which they share no turns. Beside its results a launch takes a
    float32 array like query with whole tiles of queries; and where blocks share a group's heads, as many dkeys and
    dvalues as there are parts.

    Args:
        query, key, value, dout: of heads of at most 128.
        rows: of `rows_of`.
        extras: those that there are of "words" and "dense" (its last axes keys, queries). No segments.
    """
    return by_batch(partial(_run, config=config), problem, (query, key, value, dout, rows), extras)


def _run(
    problem: Problem, operands: tuple[jax.Array, ...], extras: Mapping[str, jax.Array], *, config: FusedConfig
) -> tuple[jax.Array, jax.Array, jax.Array]:
    query, key, value, dout, rows = operands
    batch, length, heads, size = query.shape
    padded = padded_head(size)
    in_panels = padded != size or length % GROUP > 0 or key.shape[1] % GROUP > 0
    launch = Launch(problem=problem, config=config, batch=batch, heads=heads, size=padded, in_panels=in_panels)

    def attention_backward_fused(query_ref, key_ref, value_ref, dout_ref, rows_ref, extras_refs, *others):
        dquery_ref, *gradients, sums_ref, scratch = others
        dkey_ref, dvalue_ref = gradients if config.parts == 1 else (gradients[0].at[0], gradients[0].at[1])
        inputs = Inputs(query=query_ref, key=key_ref, value=value_ref, dout=dout_ref, rows=rows_ref, extras=extras_refs)
        outputs = Outputs(dquery_ref, dkey_ref, dvalue_ref, sums_ref)
        warpgroup, number = lax.axis_index("warpgroup"), lax.axis_index("block")
        block = Block.of(launch, inputs, outputs, scratch, number, length=length)

        def memory_role():
            plgpu.set_max_registers(config.memory_registers, action="decrease")
            _either(launch, number, Adding(block).run, lambda finish: _fetch(launch, block, finish, number))

        def compute_role():
            plgpu.set_max_registers(config.compute_registers, action="increase")
            computing = Computing(block=block, warpgroup=warpgroup)
            _either(launch, number, computing.run, lambda finish: _finish(launch, block, finish, number, warpgroup))

        roles = [(warpgroup == WARPGROUPS, memory_role), (warpgroup < WARPGROUPS, compute_role)]
        for is_own, role in reversed(roles) if launch.keeps_apart else roles:
            pl.when(is_own)(role)

    kernel = settings.kernel(
        attention_backward_fused,
        out_type=launch.results(query, key, value),
        grid=(launch.adders + (launch.finishers.blocks if launch.finishers else 0),),
        grid_names=("block",),
        num_threads=WARPGROUPS + 1,
        thread_name="warpgroup",
        scratch_types=(launch.scratch_types(),),
        compiler_params=plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=not config.automatic_barriers),
        products=problem.product and problem.product.times(5),
    )
    dquery, *gradients, _ = kernel(query, key, value, dout, rows, dict(extras))
    dkey, dvalue = gradients if config.parts == 1 else map(added, gradients[0])
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
