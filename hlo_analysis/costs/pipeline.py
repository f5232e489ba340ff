"""Times a Triton product whose blocks wait for their loads: few blocks, short sums, few stages.

A block of a product walks along the sum in steps. With stages, the loads of a step are issued that many steps ahead,
less one; so a step takes at least the latency of a load divided by the steps ahead. Without, it waits for the load and
then for shared memory. Where registers or shared memory leave room for few blocks on a multiprocessor, nobody else
works meanwhile.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from hlo_analysis.hlo import Instruction
from hlo_analysis.hlo.attributes import integers, tile_sizes, triton_config
from hlo_analysis.records import Device

_SHARED_BYTES, _REGISTERS, _THREADS, _MOST_BLOCKS = 227 * 1024, 65536, 2048, 32
"""Of a multiprocessor (compute capability 9.0)."""
_OTHER_REGISTERS = 40
"""Registers of a thread beside its part of the accumulator: 30 to 60 in kernels with known registers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """How a Triton product walks along its sum.

    count: steps of a block. stages: loads in flight, 1 without a pipeline. resident: blocks that a multiprocessor has
    room for. flops: of one step of one block. element_type: of the operands.
    """

    count: int
    stages: int
    resident: int
    flops: int
    element_type: str


def steps_of(fusion: Instruction, body: Mapping[str, Instruction], threads: int) -> Steps | None:
    """Returns the steps of a fused product by Triton, None where XLA states no tiles."""
    tiles, stages = tile_sizes(fusion), max(1, int(triton_config(fusion).get("num_stages", 1)))
    product = next((each for each in body.values() if each.opcode == "dot"), None)
    if product is None or len(tiles) < 2 or not threads or product.operands[0] not in body:
        return None
    depth = int((product.backend_config.get("sizes") or [0])[0])
    if not depth:
        return None
    operand, (rows, columns) = body[product.operands[0]].shape, tiles[-2:]
    summed = math.prod(operand.dimensions[axis] for axis in integers(product, "lhs_contracting_dims"))
    shared = stages * (rows + columns) * depth * max(1, operand.element_bytes)
    registers = threads * min(255, rows * columns // threads + _OTHER_REGISTERS)
    room = min(_MOST_BLOCKS, _THREADS // threads, _SHARED_BYTES // shared, _REGISTERS // registers)
    return Steps(
        count=math.ceil(summed / depth),
        stages=stages,
        resident=max(1, room),
        flops=2 * rows * columns * depth,
        element_type=operand.element_type,
    )


def steps_us(steps: Steps, blocks: int, device: Device) -> float:
    """Estimates the time of all blocks in µs, beside that of a kernel that does nothing."""
    reached, peaks = device.efficiency, dict(device.matrix_flops)
    if not reached.load_us or not device.core_count:
        return 0.0
    resident = min(steps.resident, math.ceil(blocks / device.core_count))
    waves = math.ceil(blocks / (device.core_count * resident))
    peak = peaks.get(steps.element_type, device.vector_flops) * reached.power * reached.matrix / device.core_count
    wait = 2 * reached.load_us if steps.stages == 1 else reached.load_us / (steps.stages - 1)
    step = max(wait, resident * steps.flops / peak * 1e6 if peak else 0.0)
    return (waves * steps.count - 1) * step + (waves - 1) * reached.load_us
