"""Counts the bytes that a collective sends over the links between GPUs."""

from __future__ import annotations

import re
from fractions import Fraction
from math import prod

from hlo_analysis.hlo import Instruction, Module

_NUMBERS = re.compile(r"\d+")
_IOTA = re.compile(r"\[([0-9,]+)\]<=")
_MESH = re.compile(r"mesh\[([^\]]*)\]\s*\{([^}]*)\}")
_SIZE = re.compile(r"'([^']*)'=(\d+)")
_PART = re.compile(r"\.\d+$")
_AXIS = re.compile(r"'([^']*)'(?::\(\d+\)(\d+))?")


def link_bytes(module: Module, instruction: Instruction, operand_bytes: int) -> int:
    """Returns the bytes that one GPU sends to others; it receives as many. Returns 0 for other instructions.

    Assumes the algorithms that send the least without help from a switch (a ring). For n GPUs and operands of S bytes:
    all-gather (n − 1) S, reduce-scatter and all-to-all (n − 1) / n S, all-reduce twice that, a permutation or broadcast
    S. Source: NVIDIA nccl-tests, doc/PERFORMANCE.md, whose factors refer to the larger side.

    Args:
        module: states the number of all GPUs.
        instruction: the collective.
        operand_bytes: size of its operands on one GPU.
    """
    opcode = instruction.opcode.removesuffix("-start")
    if opcode in ("collective-permute", "collective-broadcast"):
        return operand_bytes
    devices = group_size(module, instruction)
    factors = {
        "all-gather": Fraction(devices - 1),
        "reduce-scatter": Fraction(devices - 1, devices),
        "all-to-all": Fraction(devices - 1, devices),
        "ragged-all-to-all": Fraction(devices - 1, devices),
        "all-reduce": Fraction(2 * (devices - 1), devices),
    }
    return int(operand_bytes * factors.get(opcode, Fraction(0)))


def group_axes(instruction: Instruction) -> tuple[tuple[str, int], ...]:
    """Returns the mesh axes of a collective's groups, each with its size, or () where `replica_groups` names none."""
    if mesh := _MESH.search(instruction.attributes.get("replica_groups", "")):
        # mesh['a'=2,'b'=4] {'b'}, where 'b':(1)2 is part of an axis; so is 'b.4', in calls of pallas_kernels.
        sizes = {name: int(size) for name, size in _SIZE.findall(mesh[1])}
        found: dict[str, int] = {}
        for name, part in _AXIS.findall(mesh[2]):
            whole = _PART.sub("", name)
            found[whole] = found.get(whole, 1) * (int(part) if part else sizes.get(name, 1))
        return tuple(found.items())
    return ()


def group_size(module: Module, instruction: Instruction) -> int:
    """Returns the number of GPUs in one group of a collective, from any of XLA's forms of `replica_groups`."""
    if axes := group_axes(instruction):
        return prod(size for _, size in axes)
    text = instruction.attributes.get("replica_groups", "")
    if iota := _IOTA.search(text):  # [groups,devices]<=[8]
        return int(iota[1].rpartition(",")[2])
    groups = [_NUMBERS.findall(group) for group in text.strip("{} ").split("}") if _NUMBERS.search(group)]
    if groups:  # {{0,1,2,3},{4,5,6,7}}
        return max(len(group) for group in groups)
    counts = (int(module.attributes.get(name, "1")) for name in ("num_partitions", "replica_count"))
    return max(1, prod(counts))
