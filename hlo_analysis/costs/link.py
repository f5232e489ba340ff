"""Counts the bytes that a collective sends over the links between GPUs."""

from __future__ import annotations

import re
from collections.abc import Mapping
from fractions import Fraction
from math import prod

from hlo_analysis.hlo import Instruction, Module

_NUMBERS = re.compile(r"\d+")
_MESH = re.compile(r"mesh\[([^\]]*)\](?:\s*\{([^}]*)\})?")
_SIZE = re.compile(r"'([^']*)'=(\d+)")
_DEVICES = re.compile(r"\[\d+,(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_PART = re.compile(r"\.\d+$")
_AXIS = re.compile(r"'([^']*)'(?::\((\d+)\)(\d+))?")
_NAMELESS = re.compile(r"'axis_\d+'")
"""XLA's names where it does not know those of the program's mesh."""


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


def mesh_of(module: Module, unoptimized: str | None = None) -> dict[str, int]:
    """Returns the mesh's axes with their sizes; {} where nothing names them.

    unoptimized: HLO text of the program before XLA partitions it, whose shardings have the names of the program. The
    collectives of the final module may have names of XLA's.
    """
    groups = (instruction.attributes.get("replica_groups", "") for instruction in module.instructions.values())
    named = filter(None, map(_MESH.search, (unoptimized or "", *groups)))
    return next((_sizes_of(mesh) for mesh in named), {})


def _sizes_of(mesh: re.Match[str]) -> dict[str, int]:
    return {name: int(size) for name, size in _SIZE.findall(mesh[1])}


def group_axes(instruction: Instruction, mesh: Mapping[str, int]) -> tuple[tuple[str, int], ...]:
    """Returns the mesh axes of a collective's groups, each with its size; () where they are not known.

    Args:
        instruction: the collective.
        mesh: sizes of the axes, for groups that list devices, whose numbers count along the last axis first.
    """
    text = instruction.attributes.get("replica_groups", "")
    named = _MESH.search(text)  # mesh['a'=2,'b'=4] {'b'}, where 'b':(1)2 is part of an axis
    if named and not (mesh and _NAMELESS.search(text)):
        sizes = _sizes_of(named)
        parts = [(name, int(part) if part else sizes.get(name, 1)) for name, _, part in _AXIS.findall(named[2])]
    else:
        group = _first_group(text)
        if not group or max(group) >= prod(mesh.values()):
            return ()
        import numpy as np  # commands that analyze nothing must not load it

        places = np.unravel_index(group, tuple(mesh.values()))
        parts = [(name, mesh[name]) for name, along in zip(mesh, places, strict=True) if len(set(along.tolist())) > 1]
        if prod(size for _, size in parts) != len(group):
            return ()
    found: dict[str, int] = {}
    for name, size in parts:
        whole = _PART.sub("", name)  # 'b.4' is part of 'b' in calls of pallas_kernels
        found[whole] = found.get(whole, 1) * size
    return tuple(found.items())


def _first_group(text: str) -> list[int]:
    """Returns the devices of the first group: of a mesh, of {{0,1},{2,3}} or of [groups,devices]<=[2,2]T(1,0)."""
    if named := _MESH.search(text):
        devices, sizes = [0], _sizes_of(named)
        for name, before, part in _AXIS.findall(named[2]):
            size = int(part or sizes[name])
            behind = prod(list(sizes.values())[list(sizes).index(name) :])
            stride = behind // (int(before or 1) * size)
            devices = [device + place * stride for device in devices for place in range(size)]
        return devices
    if iota := _DEVICES.search(text):
        shape, order = ([int(each) for each in part.split(",")] if part else [] for part in iota.group(2, 3))
        import numpy as np

        devices = np.arange(prod(shape)).reshape(shape).transpose(order or None)
        return devices.reshape(-1, int(iota[1]))[0].tolist()
    return [int(each) for each in _NUMBERS.findall(text.partition("}")[0])]


def group_size(module: Module, instruction: Instruction) -> int:
    """Returns the number of GPUs in one group of a collective, from any of XLA's forms of `replica_groups`."""
    text = instruction.attributes.get("replica_groups", "")
    if _MESH.search(text):
        return prod(size for _, size in group_axes(instruction, {}))
    if group := _first_group(text):
        return len(group)
    counts = (int(module.attributes.get(name, "1")) for name in ("num_partitions", "replica_count"))
    return max(1, prod(counts))
