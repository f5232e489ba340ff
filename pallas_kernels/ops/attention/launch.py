"""How the attention kernels run: a grid of blocks, each with consumer warpgroups and one producer that loads by TMA."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu

from pallas_kernels.primitives import settings
from pallas_kernels.primitives.flop_metadata import Products

REGISTERS = (24, 240)
"""Of a thread of the producer, and of a consumer, in a block with two consumers: at most 504 together, three times the
168 that a thread begins with. A warpgroup that asks for more than are left waits for ever."""
MORE_FOR_PRODUCER = (40, 232)
"""Likewise, for a producer that has to load panels or several heads' rows."""


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
    """A kernel of so many blocks with so many consumer warpgroups and a producer, see `run_roles`.

    automatic_barriers: of a warpgroup's threads around each store, by Pallas. params: of `plgpu.CompilerParams`.
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
    registers: tuple[int, int] = REGISTERS,
    *,
    consumers_first: bool = False,
) -> None:
    """In a kernel: the last warpgroup produces, the others consume.

    warpgroup: the number of the one that runs.
    consumers_first: the order of the two in the program, on which ptxas's registers may depend.
    """
    of_producer, of_consumer = registers

    def producer():
        plgpu.set_max_registers(of_producer, action="decrease")
        produce()

    def consumer():
        plgpu.set_max_registers(of_consumer, action="increase")
        consume()

    roles = [(warpgroup == consumers, producer), (warpgroup < consumers, consumer)]
    for is_own, role in reversed(roles) if consumers_first else roles:
        pl.when(is_own)(role)
