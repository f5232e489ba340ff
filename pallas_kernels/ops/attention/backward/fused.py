"""dquery, dkey and dvalue in one kernel, which computes scores once: five products a tile instead of seven.

A block works as in `keys`, and multiplies its score gradients by its keys besides. That product is the block's
share of dquery, which the warpgroup that loads queries adds to a float32 array in device memory, by TMA. The blocks
that share queries do so in the order of their keys, each one waiting for the one before it: sums come out the same
whatever the order in which blocks run. The first one stores its share, so that nothing need be set to zero before; the
last one stores no sum, but dquery, or other blocks make it of the sums (`Finisher`). A block goes over queries
from the last one down, as do those that it waits for, which were all launched before it: so the first of the running
blocks never waits, and none waits for ever.

Sources: the backward pass of Shah et al., "FlashAttention-3", 2024, https://arxiv.org/abs/2407.08608; queries from the
last one down: Qiang et al., "DASH: Deterministic Attention Scheduling", 2026,
https://arxiv.org/abs/2601.21824
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.ops.attention.backward.config import FUSED_KEYS, WARPGROUPS
from pallas_kernels.ops.attention.backward.fused_consumer import Consumer
from pallas_kernels.ops.attention.backward.fused_launch import FINISHED_TILES, SHARES, Block, Launch, Outputs
from pallas_kernels.ops.attention.backward.fused_producer import Producer
from pallas_kernels.ops.attention.backward.tiles import Inputs, KeyGradients
from pallas_kernels.ops.attention.launch import block_kernel, run_roles
from pallas_kernels.ops.attention.problem import Problem
from pallas_kernels.ops.attention.row_tiles import TileForm
from pallas_kernels.primitives.gemm.pipeline import drain

Gradients = tuple[jax.Array, jax.Array, jax.Array]


def by_batch(launch: Callable[[Problem, Inputs], Gradients], problem: Problem, inputs: Inputs) -> Gradients:
    """launch(problem, inputs), of which copies under `jax.vmap` are one launch.

    The copies that JAX would make of the kernel share its semaphores, so that none knows whose turn it is.
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

    Copies under `jax.vmap` run as one launch, with which they share no turns. Beside its results a launch takes a
    float32 array like query with whole tiles of queries; and where blocks share a group's heads, as many dkeys and
    dvalues as there are parts.

    Args:
        inputs: with no extras.
        problem: with whole tiles of keys.
        form: of tiles of query, key, value and dout.
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

        def either(add, finish):
            if not launch.has_finishers:
                add()
                return
            pl.when(number < launch.adders)(add)
            pl.when(number >= launch.adders)(lambda: finish(Finisher(block, number - launch.adders)))

        def produce():
            either(Producer(block).run, lambda finisher: finisher.produce())

        def consume():
            consumer = Consumer(block=block, warpgroup=warpgroup)
            either(consumer.run, lambda finisher: finisher.consume(warpgroup))

        run_roles(warpgroup, WARPGROUPS, produce, consume, launch.registers, consumers_first=launch.warps_apart)

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


@dataclass(frozen=True)
class Finisher:
    """A block that makes dquery of what the other blocks of a launch summed, by its number among such blocks.

    They come last, so that they run where the last round of the others leaves multiprocessors free: of 1024 blocks of
    as much work each, 132 at a time, the last 100 leave 32 multiprocessors free for an eighth of the launch. A kernel
    of its own behind all of them takes its time in addition.
    """

    block: Block
    number: Any

    def places(self) -> tuple[Any, Callable[[Any], tuple[Any, Any, Any]]]:
        """How many tiles the block takes, and from n to the n-th one's (batch, head, tile).

        Blocks come in the order of heads, and tiles from a head's last one down, as they are ready.
        """
        tiles, heads = self.block.launch.query_tiles, self.block.launch.problem.heads
        of_a_head = pl.cdiv(tiles, FINISHED_TILES)
        place, i = lax.div(self.number, of_a_head), lax.rem(self.number, of_a_head)
        first = (of_a_head - 1 - i) * FINISHED_TILES
        count = jnp.minimum(tiles - first, FINISHED_TILES)
        b, head = lax.div(place, heads), lax.rem(place, heads)
        return count, lambda n: (b, head, first + count - 1 - n)

    def produce(self) -> None:
        """Loads sums to shared memory, once all blocks have added."""
        block, launch, scratch = self.block, self.block.launch, self.block.scratch
        count, at = self.places()

        def step(n, _):
            slot = lax.rem(n, SHARES)
            pl.when(n >= SHARES)(lambda: plgpu.barrier_wait(scratch.made.at[slot]))
            b, head, tile = at(n)
            adders = launch.masking.key_tiles(tile * launch.rows, launch.rows, FUSED_KEYS).last
            place = (b * launch.problem.heads + head) * launch.query_tiles + tile
            plgpu.semaphore_wait(block.turns.at[place], adders, decrement=False, memory_scope="gpu")
            for i in range(WARPGROUPS):
                part = launch.part_of(block.outputs.sums, b, head, tile, i)
                plgpu.copy_gmem_to_smem(part, scratch.share.at[slot, i], scratch.fetched.at[slot])

        lax.fori_loop(0, count, step, None)
        drain(scratch.made, SHARES, count)

    def consume(self, warpgroup: Any) -> None:
        """Scales, rounds and stores a warpgroup's parts."""
        launch, scratch, dquery = self.block.launch, self.block.scratch, self.block.outputs.dquery
        count, at = self.places()

        def step(n, _):
            slot = lax.rem(n, SHARES)
            plgpu.barrier_wait(scratch.fetched.at[slot])
            total = scratch.share.at[slot, warpgroup][...]
            made = (total * launch.problem.scale).astype(dquery.dtype)
            plgpu.commit_smem()  # all have read
            scratch.done.store(slot, warpgroup, made)
            plgpu.commit_smem()
            scratch.done.send(slot, warpgroup, launch.part_of(dquery, *at(n), warpgroup))
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            plgpu.barrier_arrive(scratch.made.at[slot])

        lax.fori_loop(0, count, step, None)
