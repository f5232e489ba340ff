"""Finds values that the forward pass keeps for the backward pass, which could compute them again."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from hlo_analysis.decisions import categories
from hlo_analysis.missed.cost import Candidate, is_busy, missed, read_by_each, written
from hlo_analysis.missed.program import Program
from hlo_analysis.patterns.launch_patterns import elementwise_inputs
from hlo_analysis.records import Intermediate
from hlo_analysis.remedies import Table, kept_value_remedy
from hlo_analysis.remedies.texts import CHECKPOINTED


def kept_for_gradients(program: Program) -> Iterator[Candidate]:
    """Yields one missed fusion for all values that a launch of the forward pass keeps for the same readers."""
    launches, table, device = program.launches, program.table, program.device
    kept: dict[tuple[int, tuple[int, ...]], list[Intermediate]] = defaultdict(list)
    for value in program.intermediates:
        if value.name not in program.outputs and _is_known_again(table, value):
            kept[value.producer, value.consumers].append(value)
    for (index, indices), values in kept.items():
        producer, readers = launches[index], [launches[reader] for reader in indices]
        made = sum(written(value, producer) for value in values)
        read = {reader: sum(read_by_each(value, launches)[reader] for value in values) for reader in indices}
        largest = max(values, key=lambda value: value.bytes)
        remedy = kept_value_remedy(table, producer, program.catalogue)
        yield missed(
            device,
            largest,
            producer=index,
            consumers=indices,
            saved={index: made, **read},
            is_hidden=remedy is CHECKPOINTED and is_busy(producer, device),
            removed=(),
            ends=[producer, *readers],
            reason="[kept for the backward pass, which could compute it from what it reads]",
            category=categories.KEPT,
            remedy=remedy,
        )


def _is_known_again(table: Table, value: Intermediate) -> bool:
    """Whether only launches of the backward pass read a value, and each also reads what it is computed from."""
    producer, readers = table.launches[value.producer], [table.launches[index] for index in value.consumers]
    if producer.phase != "forward" or producer.bytes_written < value.bytes:
        return False
    if any(reader.phase != "backward" or reader.computation != producer.computation for reader in readers):
        return False
    inputs = elementwise_inputs(producer, value.name)
    return bool(inputs) and all(inputs <= {given.name for given in reader.inputs} for reader in readers)
