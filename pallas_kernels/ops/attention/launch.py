"""Launches attention kernels: a grid of blocks, each of some consumer warpgroups and a producer that loads by TMA."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.primitives import settings
from pallas_kernels.primitives.flop_metadata import Products

REGISTERS = (24, 240)
"""Registers of a thread of the producer and of each of two consumers: at most 504 = 3 * 168 in all, as a thread begins
with 168. A warpgroup that asks for more than are left waits for ever."""
MORE_FOR_PRODUCER = (40, 232)
"""For a producer that loads panels or several heads' rows."""


def block_kernel(
    body: Callable[..., None],
    *,
    out_type: Any,
    blocks: int,
    consumers: int,
    scratch: Any,
    products: Products | None,
    automatic_barriers: bool = True,
    **params: Any,
) -> Callable[..., Any]:
    """A kernel of so many blocks, each with some consumer warpgroups and a producer; see `run_roles`.

    automatic_barriers: whether Pallas puts barriers of a warpgroup's threads around each store. params: further ones of
    `plgpu.CompilerParams`.
    """
    return settings.kernel(
        body,
        out_type=out_type,
        grid=(blocks,),
        grid_names=("block",),
        num_threads=consumers + 1,
        thread_name="warpgroup",
        scratch_types=scratch,
        compiler_params=plgpu.CompilerParams(
            approx_math=True, unsafe_no_auto_barriers=not automatic_barriers, **params
        ),
        products=products,
    )


def run_roles(
    warpgroup: Any,
    consumers: int,
    produce: Callable[[], None],
    consume: Callable[[], None],
    registers: tuple[int, int] | None = REGISTERS,
    *,
    consumers_first: bool = False,
) -> None:
    """Runs the role of a warpgroup: the last one produces, the others consume.

    warpgroup: its number. registers: of a thread of the producer and of a consumer; None: as many as it has.
    consumers_first: the order of the roles in the program, which may change ptxas's choice of registers.
    """

    def producer():
        if registers is not None:
            plgpu.set_max_registers(registers[0], action="decrease")
        produce()

    def consumer():
        if registers is not None:
            plgpu.set_max_registers(registers[1], action="increase")
        consume()

    roles = [(warpgroup == consumers, producer), (warpgroup < consumers, consumer)]
    for is_own, role in reversed(roles) if consumers_first else roles:
        pl.when(is_own)(role)


class Lane(NamedTuple):
    """A head of a batch entry. Its blocks read the same arrays."""

    batch: Any
    head: Any

    @classmethod
    def of(cls, number: jax.Array, heads: int) -> Lane:
        """The lane with this number, of batch entries with so many heads."""
        return cls(lax.div(number, heads), lax.rem(number, heads))

    def rows(self, first: Any, count: int) -> tuple[Any, ...]:
        """The place of some of the head's rows in an array."""
        return self.batch, pl.ds(first, count), self.head


def not_invariant(step: Any) -> jax.Array:
    """Zero (there are fewer than 2**30 steps), which the compiler takes for a value that changes in each step.

    Added to the place of an operand that does not move, it keeps the compiler from computing all its descriptors, two
    registers for each 16 columns, before the loop and holding them: 25 too many with a head size of 256.
    """
    return lax.shift_right_logical(step, 30)


def hidden(count: Any) -> jax.Array:
    """The same integer, which LLVM cannot know: a loop of few steps that it unrolls may take too many registers."""
    return lax.optimization_barrier(jnp.asarray(count, jnp.int32))
