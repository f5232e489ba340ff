"""Finds stacks that are transposed whole before or after a loop that goes along them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hlo_analysis.decisions import categories
from hlo_analysis.hlo.attributes import integers
from hlo_analysis.missed.cost import Candidate, missed
from hlo_analysis.missed.program import Program
from hlo_analysis.patterns.launch_patterns import has, only_moves
from hlo_analysis.program.facts import LaunchRow
from hlo_analysis.records import Device, Intermediate
from hlo_analysis.remedies.loop_texts import STACKED_FIRST, TRANSPOSED_IN_BODY


def transposed_for_loops(program: Program) -> Iterator[Candidate]:
    """Yields arguments transposed for a loop to read in slices, and arrays that it wrote so and are transposed back."""
    launches, device = program.launches, program.device
    for value in program.intermediates:
        producer, readers = launches[value.producer], [launches[index] for index in value.consumers]
        steps = [reader for reader in readers if _slices(reader, producer)]
        if steps and _transposes_argument(producer, value):
            yield _transposed(value, producer, [producer], steps, device)
        if producer.repeat > 1 and has(producer, "dynamic-update-slice"):
            back = [reader for reader in readers if _transposes_back(reader, value)]
            if back:
                yield _transposed(value, producer, back, [producer], device)


def _transposed(
    value: Intermediate, producer: LaunchRow, moves: Sequence[LaunchRow], steps: Sequence[LaunchRow], device: Device
) -> Candidate:
    orders = [integers(found, "dimensions") for move in moves for found in move.facts.of("transpose")]
    keeps_stack = bool(orders) and all(order[0] == 0 for order in orders)
    does = "read" if producer in moves else "write"
    return missed(
        device,
        value,
        producer=producer.index,
        consumers=value.consumers,
        saved={move.index: move.bytes_moved * move.repeat for move in moves},
        removed=moves,
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
