"""The launches of a program: its thunk list joined to the final HLO, one site a launch.

The list is read as XLA made it, before it wraps runs of launches into command buffers: a command buffer saves the host
work, not the launches. Where there is no list (a capture without ptxas, XLA:CPU), sites are read off the HLO itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby

from hlo_analysis.errors import DumpError
from hlo_analysis.hlo import Computation, Instruction, Module
from hlo_analysis.program.dataflow import CONTROL_FLOW, trip_count
from hlo_analysis.program.thunks import Thunk, parse_thunk_metadata, parse_thunk_sequence

_SILENT_OPCODES: dict[str, str] = {
    "parameter": "an argument of the program",
    "constant": "a constant, in memory from the start",
    "bitcast": "the same bytes under another shape",
    "tuple": "names values together",
    "get-tuple-element": "names one value of a tuple",
    "optimization-barrier": "orders, and moves nothing",
    "add-dependency": "orders, and moves nothing",
    "domain": "annotates a value",
    "after-all": "orders, and moves nothing",
    "async-done": "waits for an asynchronous launch",
    **{
        f"{name}-done": "waits for an asynchronous launch"
        for name in ("copy", "all-gather", "all-reduce", "collective-permute")
    },
}

_EVERY_BRANCH = "A conditional runs one of its branches: every branch is counted as if it ran."


@dataclass(frozen=True, kw_only=True)
class Site:
    """One launch: where it stands in the program and how often a run comes by.

    `instruction` is None where the dump does not say which instruction a thunk came from. `step` and `steps` number the
    launches that one instruction needs (a sort has several passes).
    """

    thunk: Thunk
    computation: Computation
    instruction: Instruction | None
    repeat: int
    step: int = 0
    steps: int = 1


@dataclass(frozen=True, kw_only=True)
class LaunchTable:
    """All launch sites in order, and what counting them had to assume, in sentences."""

    sites: tuple[Site, ...]
    notes: tuple[str, ...] = ()
    waits: Mapping[int, int] = field(default_factory=dict)
    """Index of each asynchronous launch → how many launches precede the wait for it."""


def find_launches(module: Module, sequence: str | None, metadata: str | None) -> LaunchTable:
    """Launch sites of a program, in launch order.

    Args:
      module: the final module.
      sequence: text of `*.thunk_sequence.txt`, or None.
      metadata: text of `*.thunk_metadata.txt`, or None.

    Raises:
      DumpError: `sequence` is not a thunk list, or was cut off.
    """
    if sequence is None or metadata is None:
        return _from_module(module)
    names = parse_thunk_metadata(metadata)
    forest = parse_thunk_sequence(sequence)
    absent = sorted(names.keys() - {thunk.id for root in forest for thunk in root.walk()})
    if absent:
        raise DumpError(
            f"the thunk list lacks thunks {absent[:5]} of {len(names)} that its metadata names; was the dump cut off?"
        )
    homes = {
        name: (computation, instruction)
        for computation in module.computations.values()
        for name, instruction in computation.instructions.items()
    }
    notes: dict[str, None] = {}
    sites = [
        Site(
            thunk=thunk,
            computation=homes[name][0] if name in homes else module.entry,
            instruction=homes[name][1] if name in homes else None,
            repeat=repeat,
        )
        for thunk, name, repeat in _walk(forest, names, homes, notes)
    ]
    unknown = [site.thunk.id for site in sites if site.instruction is None]
    if unknown:
        notes[f"No HLO instruction is known for thunks {unknown}: their traffic is not counted."] = None
    places = {site.thunk.id: index for index, site in enumerate(sites)}
    return LaunchTable(sites=_number_steps(sites), notes=tuple(notes), waits=_waits(forest, places))


def _waits(forest: Sequence[Thunk], places: Mapping[int, int]) -> dict[int, int]:
    """Maps the index of each asynchronous launch to the index of the launch that follows the wait for it."""
    begun: dict[int, list[int]] = {}
    found: dict[int, int] = {}
    count = 0
    for thunk in (each for root in forest for each in root.walk()):
        count = places.get(thunk.id, count - 1) + 1
        if thunk.kind == "kAsyncStart" and thunk.async_id is not None:
            begun[thunk.async_id] = [places[each.id] for each in thunk.walk() if each.id in places]
        elif thunk.kind == "kAsyncDone" and thunk.async_id in begun:
            found |= dict.fromkeys(begun.pop(thunk.async_id), count)
    return found


def _walk(
    thunks: Sequence[Thunk],
    names: Mapping[int, str],
    homes: Mapping[str, tuple[Computation, Instruction]],
    notes: dict[str, None],
    name: str = "",
    repeat: int = 1,
) -> Iterator[tuple[Thunk, str, int]]:
    """Launching thunks with the instruction and the number of times that each runs."""
    for thunk in thunks:
        own = names.get(thunk.id, name)
        if thunk.launches:
            yield thunk, own, repeat
            continue
        if thunk.kind == "kConditional":
            notes[_EVERY_BRANCH] = None
        for child in thunk.children:
            times = repeat
            if thunk.kind == "kWhile":
                instruction = homes[own][1] if own in homes else None
                times *= _times(instruction, child.region, notes)
            yield from _walk([child], names, homes, notes, own, times)


def _times(loop: Instruction | None, region: str, notes: dict[str, None]) -> int:
    """How often a region of a loop runs. With a known trip count XLA:GPU never evaluates the condition."""
    trips = trip_count(loop) if loop else None
    if trips is not None:
        return 0 if region == "condition" else trips
    notes["A loop's trip count is not known before it runs: its body and condition are counted once."] = None
    return 1


def _number_steps(sites: list[Site]) -> tuple[Site, ...]:
    """Number the launches of an instruction that needs several in a row."""
    numbered: list[Site] = []
    for _, found in groupby(sites, key=lambda site: site.instruction or site.thunk.id):
        run = list(found)
        numbered += [replace(site, step=step, steps=len(run)) for step, site in enumerate(run)]
    return tuple(numbered)


def _from_module(module: Module) -> LaunchTable:
    """Sites read off the HLO: each instruction that is neither an alias nor control flow counts as one launch."""
    notes: dict[str, None] = {
        "There is no thunk list: launches are read off the HLO, one an instruction, without launch dimensions.": None
    }

    def visit(computation: Computation, repeat: int) -> Iterator[Site]:
        for instruction in computation.instructions.values():
            if instruction.opcode in CONTROL_FLOW:
                for name in instruction.called:
                    times = repeat
                    if instruction.opcode == "while":
                        region = "body" if instruction.attributes["body"].lstrip("%") == name else "condition"
                        times *= _times(instruction, region, notes)
                    elif instruction.opcode == "conditional":
                        notes[_EVERY_BRANCH] = None
                    yield from visit(module.computations[name], times)
            elif instruction.opcode not in _SILENT_OPCODES:
                yield Site(thunk=Thunk(id=0, kind=""), computation=computation, instruction=instruction, repeat=repeat)

    return LaunchTable(sites=tuple(visit(module.entry, 1)), notes=tuple(notes))


def silent_instructions(module: Module, table: LaunchTable) -> tuple[tuple[str, str], ...]:
    """Entry instructions that launch nothing, with the reason. XLA's `name#index` abbreviations are left out."""
    launched = {site.instruction.name for site in table.sites if site.instruction is not None}
    silent: list[tuple[str, str]] = []
    for name, instruction in module.entry.instructions.items():
        if name in launched or "#" in name:
            continue
        if instruction.opcode in _SILENT_OPCODES:
            reason = _SILENT_OPCODES[instruction.opcode]
        elif instruction.opcode in CONTROL_FLOW:
            reason = f"runs {' and '.join(instruction.called)}, whose launches are listed"
        elif instruction.shape.byte_size == 0:
            reason = "has no data"
        else:
            reason = "not in the thunk list"
        silent.append((name, reason))
    return tuple(silent)
