"""Finds arguments that are transposed because a part is updated in another layout than readers use: caches."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from hlo_analysis.decisions import categories
from hlo_analysis.missed.cost import Candidate, missed, updates_in_place, wait
from hlo_analysis.patterns.launch_patterns import has, is_product, only_moves
from hlo_analysis.program.facts import LaunchRow
from hlo_analysis.records import Device, Intermediate
from hlo_analysis.remedies.texts import TURNED, TURNED_KEPT


@dataclass(kw_only=True)
class Turned:
    """An argument in another order of axes, and what is done to it in that order."""

    value: Intermediate
    argument: str
    moves: list[LaunchRow]
    """The launch that turns it, copies of what it writes, and those that turn it back: none would be needed."""
    updates: list[LaunchRow] = field(default_factory=list)


def find_turned(launches: Sequence[LaunchRow], intermediates: Sequence[Intermediate]) -> list[Turned]:
    """Arguments that are transposed whole, updated in part, in place, and mostly transposed back."""
    made: dict[int, list[Intermediate]] = {}
    for value in intermediates:
        made.setdefault(value.producer, []).append(value)
    found = [_followed(launches, made, value) for value in intermediates if _turns(launches[value.producer], value)]
    return [turned for turned in found if turned.updates]


def turned_for_updates(turned: Sequence[Turned], device: Device, donated: Collection[str]) -> Iterator[Candidate]:
    """One missed fusion for each."""
    for found in turned:
        turn, *later = found.moves
        update = found.updates[0]
        back = ", and it is transposed back" if any(has(move, "transpose") for move in later) else ""
        yield missed(
            found.value,
            producer=turn.index,
            consumers=tuple(sorted({launch.index for launch in (*found.updates, *later)})),
            stake=sum(map(_moved, found.moves)),
            waits={move.index: wait(move, _moved(move), device) for move in found.moves},
            gone=found.moves,
            device=device,
            ends=[*found.moves, *(update for update in found.updates if update not in found.moves)],
            reason=f"[all of {found.argument} is transposed, {update.name} updates a part of it{back}]",
            category=categories.IN_PLACE,
            remedy=TURNED if found.argument in donated else TURNED_KEPT,
        )


def _turns(launch: LaunchRow, value: Intermediate) -> bool:
    """Whether a launch transposes a whole argument."""
    given = launch.inputs[0] if launch.inputs else None
    is_whole = given is not None and given.producer is None and given.bytes == value.bytes == launch.bytes_written
    return is_whole and only_moves(launch) and has(launch, "transpose")


def _followed(launches: Sequence[LaunchRow], made: Mapping[int, Sequence[Intermediate]], value: Intermediate) -> Turned:
    """What becomes of it: copies and updates are followed, into a loop and out of it; others only read it."""
    turn = launches[value.producer]
    turned = Turned(value=value, argument=turn.inputs[0].name, moves=[turn])
    queue, seen = [value], {turn.index}
    while queue:
        current = queue.pop()
        for reader in (launches[index] for index in current.consumers if index not in seen):
            seen.add(reader.index)
            if is_product(reader):
                continue
            is_near = (reader.computation, reader.repeat) == (turn.computation, turn.repeat)
            is_back = has(reader, "transpose") and reader.bytes_written == value.bytes
            if is_near and (is_back or {opcode for opcode, _ in reader.opcodes} == {"copy"}):
                turned.moves.append(reader)
            if updates_in_place(reader, current) or (is_back and has(reader, "dynamic-update-slice")):
                turned.updates.append(reader)
            if not is_back:
                queue += [made_by for made_by in made.get(reader.index, ()) if made_by.bytes == value.bytes]
    return turned


def _moved(launch: LaunchRow) -> int:
    return (launch.bytes_read + launch.bytes_written) * launch.repeat
