"""dquery, dkey and dvalue in one kernel, which computes scores once: five products a tile instead of seven.

A block works as in `keys`, and also multiplies its score gradients by its keys. That product is the block's share of
dquery. The producer adds it by TMA to a float32 array in device memory. The blocks that share queries add in the order
of their keys, each one waiting for the one before it: sums do not depend on the order in which blocks run. The first
one stores its share, so that no sum need be zeroed before; the last one stores dquery instead of a sum, or further
blocks, the finishers, compute dquery from the sums. A block visits query tiles from the last one down, as do those that
it waits for, all of which were launched before it: so the first of the running blocks never waits, and none waits for
ever.

If the problem is not deterministic, a block adds as soon as the first one has stored its share: the first signal is
that one's, as all others wait for it. Only who stores dquery, the last block or a finisher, waits for all. Each waits
for some of the blocks that it waits for otherwise, all launched before it (`block_place` numbers a lane's tiles in
order, in each section), so that none waits for ever here either.

Finishers come last, so that they run where the last round of the others leaves multiprocessors free: of 1024 blocks of
as much work each, 132 at a time, the last 100 leave 32 multiprocessors free for an eighth of the launch. A second
kernel behind all of them would take its time in addition.

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
from pallas_kernels.ops.attention.backward.fused_launch import Block, Launch, Outputs
from pallas_kernels.ops.attention.backward.fused_roles import consume, consume_finished, produce, produce_finished
from pallas_kernels.ops.attention.backward.tiles import Inputs, KeyGradients
from pallas_kernels.ops.attention.launch import block_kernel, run_roles
from pallas_kernels.ops.attention.problem import Problem
from pallas_kernels.primitives.row_tiles import TileForm

Gradients = tuple[jax.Array, jax.Array, jax.Array]


def by_batch(launch: Callable[[Problem, Inputs], Gradients], problem: Problem, inputs: Inputs) -> Gradients:
    """launch(problem, inputs), as one launch with a larger batch under `jax.vmap`.

    JAX's own copies of the kernel would share its semaphores, and none would know whose turn it is.
    """

    @jax.custom_batching.custom_vmap
    def compute(inputs):
        return launch(problem, inputs)

    @compute.def_vmap
    def _mapped(count, is_mapped, inputs):
        def flat(array, mapped):
            whole = array if mapped else jnp.broadcast_to(array, (count, *array.shape))
            return whole.reshape(-1, *whole.shape[2:])

        batch = problem.batch
        results = by_batch(launch, replace(problem, batch=count * batch), jax.tree.map(flat, inputs, is_mapped[0]))
        return tuple(array.reshape(count, batch, *array.shape[1:]) for array in results), (True, True, True)

    return compute(inputs)


def fused_gradients(inputs: Inputs, *, problem: Problem, form: TileForm, parts: int) -> Gradients:
    """Returns (dquery, dkey, dvalue), like query, key and value.

    A launch needs memory for a float32 array like query with whole query tiles, and for `parts` copies of dkey and
    dvalue if there are several.

    Args:
        inputs: without extras.
        problem: with whole key tiles.
        form: the layout of query, key, value and dout tiles in shared memory.
        parts: blocks that share a group's heads.
    """
    return by_batch(partial(_run, form=form, parts=parts), problem, inputs)


def _run(problem: Problem, inputs: Inputs, *, form: TileForm, parts: int) -> Gradients:
    launch = Launch(problem=problem, form=form, parts=parts)

    def attention_backward_fused(inputs, *others):
        dquery, *gradients, sums, scratch = others
        outputs = Outputs(dquery, KeyGradients.of(gradients), sums)
        warpgroup, number = lax.axis_index("warpgroup"), lax.axis_index("block")
        block = Block.of(launch, inputs, outputs, scratch, number)

        def either(add: Callable[[], None], finish: Callable[[jax.Array], None]) -> None:
            """The role in a block that adds shares, or in the n-th finisher."""
            if not launch.has_finishers:
                add()
                return
            pl.when(number < launch.adders)(add)
            pl.when(number >= launch.adders)(lambda: finish(number - launch.adders))

        run_roles(
            warpgroup,
            WARPGROUPS,
            lambda: either(lambda: produce(block), lambda n: produce_finished(block, n)),
            lambda: either(lambda: consume(block, warpgroup), lambda n: consume_finished(block, n, warpgroup)),
            launch.registers,
            consumers_first=launch.warps_apart,
        )

    kernel = block_kernel(
        attention_backward_fused,
        out_type=launch.results(inputs),
        blocks=launch.adders + launch.finishers,
        consumers=WARPGROUPS,
        scratch=(launch.scratch_types(),),
        products=problem.product and problem.product.times(5),
        automatic_barriers=launch.automatic_barriers,
    )
    dquery, *gradients, _ = kernel(inputs)
    return dquery, *KeyGradients.summed(gradients)
