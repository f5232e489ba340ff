"""Finds arguments that are transposed because a part is updated in another layout than readers use: caches."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from hlo_analysis.decisions import categories
from hlo_analysis.missed.cost import Candidate, memory_us, missed, updates_in_place
from hlo_analysis.missed.program import Program
from hlo_analysis.patterns.launch_patterns import has, is_product, only_moves
from hlo_analysis.program.facts import LaunchRow
from hlo_analysis.records import Intermediate
from hlo_analysis.remedies.texts import TRANSPOSED, TRANSPOSED_NOT_DONATED


@dataclass(kw_only=True)
class TransposedArgument:
    """An argument that is transposed as a whole, and the launches that move and update the transposed array."""

    value: Intermediate
    argument: str
    moves: list[LaunchRow]
    """The launch that transposes it, copies of the result, and those that transpose it back; the fusion removes all."""
    updates: list[LaunchRow] = field(default_factory=list)


def _find_transposed(launches: Sequence[LaunchRow], intermediates: Sequence[Intermediate]) -> list[TransposedArgument]:
    """Returns the arguments that are transposed whole and then updated in part, in place."""
    written: dict[int, list[Intermediate]] = {}
    for value in intermediates:
        written.setdefault(value.producer, []).append(value)
    found = [
        _follow(launches, written, value)
        for value in intermediates
        if _transposes_argument(launches[value.producer], value)
    ]
    return [each for each in found if each.updates]


def transposed_for_updates(program: Program) -> Iterator[Candidate]:
    """Yields a missed fusion for each argument that is transposed to be updated."""
    for each in _find_transposed(program.launches, program.intermediates):
        transpose, *later = each.moves
        update = each.updates[0]
        back = ", and it is transposed back" if any(has(move, "transpose") for move in later) else ""
        yield missed(
            each.value,
            producer=transpose.index,
            consumers=tuple(sorted({launch.index for launch in (*each.updates, *later)})),
            stake=sum(map(_moved, each.moves)),
            saved_us={move.index: memory_us(move, _moved(move), program.device) for move in each.moves},
            removed=each.moves,
            device=program.device,
            ends=[*each.moves, *(update for update in each.updates if update not in each.moves)],
            reason=f"[all of {each.argument} is transposed, {update.name} updates a part of it{back}]",
            category=categories.IN_PLACE,
            remedy=TRANSPOSED if each.argument in program.donated else TRANSPOSED_NOT_DONATED,
        )


def _transposes_argument(launch: LaunchRow, value: Intermediate) -> bool:
    """Whether a launch transposes a whole argument."""
    given = launch.inputs[0] if launch.inputs else None
    is_whole = given is not None and given.producer is None and given.bytes == value.bytes == launch.bytes_written
    return is_whole and only_moves(launch) and has(launch, "transpose")


def _follow(
    launches: Sequence[LaunchRow], written: Mapping[int, Sequence[Intermediate]], value: Intermediate
) -> TransposedArgument:
    """Collects the launches that copy a transposed argument, update it or transpose it back, also in loops."""
    transpose = launches[value.producer]
    found = TransposedArgument(value=value, argument=transpose.inputs[0].name, moves=[transpose])
    queue, seen = [value], {transpose.index}
    while queue:
        current = queue.pop()
        for reader in (launches[index] for index in current.consumers if index not in seen):
            seen.add(reader.index)
            if is_product(reader):
                continue
            is_near = (reader.computation, reader.repeat) == (transpose.computation, transpose.repeat)
            is_back = has(reader, "transpose") and reader.bytes_written == value.bytes
            if is_near and (is_back or {opcode for opcode, _ in reader.opcodes} == {"copy"}):
                found.moves.append(reader)
            if updates_in_place(reader, current) or (is_back and has(reader, "dynamic-update-slice")):
                found.updates.append(reader)
            if not is_back:
                queue += [result for result in written.get(reader.index, ()) if result.bytes == value.bytes]
    return found


def _moved(launch: LaunchRow) -> int:
    return (launch.bytes_read + launch.bytes_written) * launch.repeat
