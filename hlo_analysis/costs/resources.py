"""Joins PTX, registers, spills and launch dimensions, as XLA, ptxas and Mosaic printed them, to launches."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hlo_analysis.errors import DumpError
from hlo_analysis.hlo import Instruction
from hlo_analysis.hlo.attributes import custom_call_target, stated_kernel
from hlo_analysis.program.launch_sites import Site

_MOSAIC_ENDING = "_mosaic_gpu_kernel"
_ENTRY = re.compile(r"\.entry\s+([\w$.]+)")
_INSTRUCTION = re.compile(r"^\s+(?:@!?%\w+\s+)?[a-z]", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Resources:
    """What one kernel takes: registers of a thread, bytes that it spills (stores and loads), bytes of shared memory.

    `instructions` are those of its PTX, each once, which is what a thread executes where nothing loops.

    Not of XLA's kernels: grid, block and the dynamic part of the shared memory, which the thunk list has.
    """

    registers: int | None = None
    spill_bytes: int | None = None
    shared_memory_bytes: int | None = None
    instructions: int | None = None
    grid: tuple[int, int, int] | None = None
    block: tuple[int, int, int] | None = None
    ptx: str | None = None


def read_resources(text: str | None) -> dict[str, tuple[Resources, ...]]:
    """Kernels of an artefact "mosaic_resources" or "ptx_resources" by name, in the order of compilation.

    Raises:
      DumpError: the text is not such an artefact.
    """
    if text is None:
        return {}
    found: dict[str, tuple[Resources, ...]] = {}
    try:
        for kernel in json.loads(text):
            made = Resources(
                registers=kernel.get("registers"),
                spill_bytes=_sum(kernel, "spill_store_bytes", "spill_load_bytes"),
                shared_memory_bytes=_sum(kernel, "static_shared_bytes", "dynamic_shared_bytes"),
                instructions=kernel.get("instructions"),
                grid=_triple(kernel.get("grid")),
                block=_triple(kernel.get("block")),
                ptx=kernel.get("ptx"),
            )
            found[kernel["kernel"]] = (*found.get(kernel["kernel"], ()), made)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DumpError(
            f"kernel resources: expected a JSON list of kernels with their registers, got {error!r}"
        ) from error
    return found


def ptx_by_kernel(texts: Iterable[str]) -> dict[str, str]:
    """The PTX of each kernel that XLA compiled, by the name of its entry."""
    return {name: text for text in texts for name in _ENTRY.findall(text)}


def count_instructions(ptx: str, kernel: str) -> int:
    """Counts the instructions of one kernel in PTX, without directives and labels."""
    starts = [(match[1], match.start()) for match in _ENTRY.finditer(ptx)]
    ends = [start for _, start in starts[1:]] + [len(ptx)]
    return sum(
        len(_INSTRUCTION.findall(ptx, start, end))
        for (name, start), end in zip(starts, ends, strict=True)
        if name == kernel
    )


def _sum(kernel: Mapping[str, Any], *names: str) -> int | None:
    values = [kernel.get(name) for name in names]
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def _triple(values: Sequence[int] | None) -> tuple[int, int, int] | None:
    if values is None or len(values) != 3:
        return None
    return values[0], values[1], values[2]


def resources_of(
    sites: Sequence[Site],
    mosaic: Mapping[str, Sequence[Resources]],
    ptx: Mapping[str, Sequence[Resources]],
    sources: Mapping[str, str],
) -> dict[int, Resources]:
    """Resources by position in `sites`; kernels that nothing is known of are left out.

    A kernel of XLA's is found by its name in the thunk list. A Mosaic kernel is found by the name that Pallas gave it,
    and where several have that name (two shapes of one kernel) by the number that Mosaic gave each.

    Args:
      sites: the launches.
      mosaic: Mosaic's kernels by name.
      ptx: registers and spills of XLA's kernels by name.
      sources: PTX of XLA's kernels by name.
    """
    numbers: dict[str, set[int]] = {}
    named: dict[int, tuple[str, int]] = {}
    for index, site in enumerate(sites):
        if site.instruction is not None and (key := _mosaic_key(site.instruction)):
            named[index] = key
            numbers.setdefault(key[0], set()).add(key[1])
    found: dict[int, Resources] = {}
    for index, site in enumerate(sites):
        if index in named:
            name, number = named[index]
            kernels = mosaic.get(name + _MOSAIC_ENDING, ())
            # One Mosaic kernel that the program calls twice is compiled once.
            order = sorted(numbers[name])
            if len(kernels) == len(order):
                found[index] = kernels[order.index(number)]
        elif name := site.thunk.kernel:
            kernels = ptx.get(name, ())
            known = kernels[0] if len(kernels) == 1 else Resources()
            if text := sources.get(name):
                known = replace(known, ptx=text, instructions=count_instructions(text, name))
            found[index] = known
    return found


def kernel_name(site: Site) -> str | None:
    """The name under which a profile shows the launch: the thunk's, or what Mosaic makes of the name Pallas has."""
    if site.thunk.kernel or site.instruction is None:
        return site.thunk.kernel
    key = _mosaic_key(site.instruction) if site.thunk.kind else None
    return key[0] + _MOSAIC_ENDING if key else None


def _mosaic_key(instruction: Instruction) -> tuple[str, int] | None:
    """Returns a Mosaic kernel's name and its number among kernels of that name; None for other calls.

    XLA renames kernels that devices share, so the capture states their names; see `capture/partitions.py`.
    """
    if not custom_call_target(instruction).startswith("mosaic_gpu"):
        return None
    scope, _, _ = instruction.op_name.rpartition("/")
    name = stated_kernel(instruction) or scope.rpartition("/")[2]
    if not name:
        return None
    module = instruction.attributes.get("backend_config", "")
    match = re.search(rf"\\00{re.escape(name)}_(\d+)\\00", module)
    return name, int(match[1]) if match else 0
