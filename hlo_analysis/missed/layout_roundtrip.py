"""Finds arrays that are transposed whole for a part of them: caches that are updated, stacks that a loop goes along."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from hlo_analysis.decisions import categories
from hlo_analysis.hlo.attributes import integers
from hlo_analysis.missed.cost import Candidate, memory_us, missed, updates_in_place
from hlo_analysis.missed.program import Program
from hlo_analysis.patterns.launch_patterns import has, is_product, only_moves
from hlo_analysis.program.facts import LaunchRow
from hlo_analysis.records import Device, Intermediate
from hlo_analysis.remedies.loop_texts import STACKED_FIRST, TRANSPOSED_IN_BODY
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


def transposed_for_loops(program: Program) -> Iterator[Candidate]:
    """Yields arguments transposed for a loop to read in slices, and arrays that it wrote so and are transposed back."""
    launches, device = program.launches, program.device
    of_caches = {move.index for found in _find_transposed(launches, program.intermediates) for move in found.moves}
    for value in program.intermediates:
        producer, readers = launches[value.producer], [launches[index] for index in value.consumers]
        steps = [reader for reader in readers if _slices(reader, producer)]
        if steps and _transposes_argument(producer, value) and producer.index not in of_caches:
            yield _transposed(value, producer, [producer], steps, device)
        if producer.repeat > 1 and has(producer, "dynamic-update-slice"):
            back = [reader for reader in readers if _transposes_back(reader, value) and reader.index not in of_caches]
            if back:
                yield _transposed(value, producer, back, [producer], device)


def _transposed(
    value: Intermediate, producer: LaunchRow, moves: Sequence[LaunchRow], steps: Sequence[LaunchRow], device: Device
) -> Candidate:
    orders = [integers(found, "dimensions") for move in moves for found in move.facts.of("transpose")]
    keeps_stack = bool(orders) and all(order[0] == 0 for order in orders)
    does = "read" if producer in moves else "write"
    return missed(
        value,
        producer=producer.index,
        consumers=value.consumers,
        stake=sum(map(_moved, moves)),
        saved_us={move.index: memory_us(move, _moved(move), device) for move in moves},
        removed=moves,
        device=device,
        ends=[*moves, *steps],
        reason=f"[all of it is transposed in each call, and the steps of a loop {does} it slice by slice]",
        category=categories.BOUNDARY,
        remedy=TRANSPOSED_IN_BODY if keeps_stack else STACKED_FIRST,
    )


def _slices(reader: LaunchRow, stack: LaunchRow) -> bool:
    """Whether a loop's launch takes a slice of what another launch wrote before the loop."""
    taken = [reader.facts.operand_origins(found)[0] for found in reader.facts.of("dynamic-slice")]
    return reader.repeat > stack.repeat and any(stack.name in origins for origins in taken)


def _transposes_back(launch: LaunchRow, value: Intermediate) -> bool:
    """Whether a launch transposes all of a value, and does nothing else."""
    return launch.bytes_read >= launch.bytes_written == value.bytes and only_moves(launch) and has(launch, "transpose")


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
