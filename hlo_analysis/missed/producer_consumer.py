"""Finds values that one launch writes and another reads: directly, through an in-place update, or into a loop."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from hlo_analysis.decisions import categories
from hlo_analysis.missed.cost import Candidate, missed, read_by_each, updates_in_place, written
from hlo_analysis.missed.program import Program
from hlo_analysis.patterns.attention_scores import attention_products
from hlo_analysis.patterns.launch_patterns import (
    calls_python,
    elementwise_inputs,
    factors,
    fills,
    has,
    is_library_kernel,
    is_product,
    is_residual_sum,
    only_moves,
    takes_sixteen_bits,
)
from hlo_analysis.patterns.pair_patterns import scatters_rows
from hlo_analysis.patterns.redundant_reads import find_ancestors
from hlo_analysis.program.facts import LaunchRow
from hlo_analysis.records import Decision, Intermediate
from hlo_analysis.remedies import Remedy, Table, of_filled, takes_part, vertical_remedy
from hlo_analysis.remedies.grouped import is_grouped, wasted_us
from hlo_analysis.remedies.loop_texts import INVARIANT
from hlo_analysis.remedies.texts import (
    ATTENTION_CAST,
    EPILOGUE,
    LINEAR_EPILOGUE,
    LINEAR_PROLOGUE,
    OVERLAP,
    PICKED,
    ROWS_UPDATED,
    WHOLE_SUM,
)

_ELEMENT_WISE = frozenset({"loop", "transpose", "triton", "reduction"})
_SMALLEST_INPUT = 8
"""A launch that writes more than this many times what it reads, as zeros to add to, has no work to fuse."""

_ELSEWHERE = "the backward pass, another loop or a library reads it"


@dataclass(frozen=True, kw_only=True, slots=True)
class _Stake:
    value: Intermediate
    also_needed_by: str
    """Who else needs the value in memory, so that it must be written all the same; '' if nobody does."""
    written: int
    """Bytes, in one run of the program."""
    read: Mapping[int, int]
    """Bytes, by index of each reader, in one run."""


def between_launches(program: Program) -> Iterator[Candidate]:
    """Yields one missed fusion for all values that one launch writes for the same readers."""
    launches, table, device, scores = program.launches, program.table, program.device, program.scores
    reasons = _Reasons(program.decisions, launches)
    products = attention_products(launches, program.intermediates, scores)
    of_attention = [launches[index] for index in sorted(products)]
    transposed = {launch.index for launch in launches if _transposes_for_attention(table, launch, products)}
    ancestors = find_ancestors(launches)
    known = [product for product in of_attention if factors(product)]
    is_wide = bool(known) and not any(map(takes_sixteen_bits, known))
    for (index, indices), stakes in _stakes(program).items():
        producer, near = launches[index], [launches[reader] for reader in indices]
        if _is_copied_again(producer, near):
            continue
        reason, category = reasons.of_edge(index, indices, stakes)
        largest = max((stake.value for stake in stakes), key=lambda value: value.bytes)
        remedy = vertical_remedy(
            table,
            producer,
            near,
            category,
            is_score=largest.name in scores,
            is_projected=(has(producer, "transpose") and products.issuperset(indices))
            or index in transposed
            or transposed.issuperset(indices),
            of_attention=index in products,
            donated=program.donated,
        )
        ends = of_attention if remedy.pattern == "attention" else (producer, *near)
        if remedy.pattern == "attention" and is_wide:
            remedy = ATTENTION_CAST
        named = remedy.named(program.catalogue, ends)
        saved, removed = _saved(remedy, table, ancestors, producer, near, stakes, keeps_input=named.keeps_input)
        yield missed(
            device,
            largest,
            producer=index,
            consumers=indices,
            saved=saved,
            removed=removed,
            # What a collective sends is written in any case: the link's time is at stake, a hotspot's.
            is_hidden=remedy is OVERLAP,
            other_us=wasted_us(table, near, device.launch_overhead_us) if is_grouped(remedy) else None,
            ends=[producer, *(reader for reader in near if reader is not producer)],
            reason=reason,
            category=category,
            remedy=named,
        )


def _stakes(program: Program) -> Mapping[tuple[int, tuple[int, ...]], list[_Stake]]:
    """Returns the values at stake, by their producer and those of its readers that could be one kernel with it."""
    launches = program.launches
    stakes: dict[tuple[int, tuple[int, ...]], list[_Stake]] = defaultdict(list)
    for value in program.intermediates:
        producer = launches[value.producer]
        readers = [launches[index] for index in value.consumers if index != value.producer]
        near = _without_libraries(
            producer, [reader for reader in readers if could_join(producer, reader, value.name in program.scores)]
        )
        if not near and _is_carried(value):
            near = readers = [producer]
        if near:
            most = written(value, producer)
            stake = _Stake(
                value=value,
                also_needed_by=_also_needed_by(value, producer, near, len(readers), program.outputs),
                written=most,
                # A reader of the whole buffer that was updated in place would read the rest of it anyway.
                read={index: min(read, most) for index, read in read_by_each(value, launches).items()},
            )
            stakes[value.producer, tuple(reader.index for reader in near)].append(stake)
    return stakes


def _transposes_for_attention(table: Table, launch: LaunchRow, products: frozenset[int]) -> bool:
    """Whether a launch only transposes what attention's products read, or what they write."""
    readers = {reader.index for reader in table.readers.get(launch.index, ())}
    producers = {value.producer for value in launch.inputs}
    near = any(ends and products.issuperset(ends) for ends in (readers, producers))
    return near and only_moves(launch) and has(launch, "transpose")


def _saved(
    remedy: Remedy,
    table: Table,
    ancestors: Sequence[int],
    producer: LaunchRow,
    near: Sequence[LaunchRow],
    stakes: Sequence[_Stake],
    *,
    keeps_input: bool,
) -> tuple[dict[int, float], Sequence[LaunchRow]]:
    """Returns the bytes that a remedy saves, by index of the launch, and the launches that it removes."""
    if remedy is ROWS_UPDATED:
        return {end.index: end.bytes_moved * end.repeat for end in (producer, *near)}, [producer]
    if is_grouped(remedy):
        is_inside = producer.index in table.expanded  # else the kernel reads it where a launch masks it
        return _moved(producer, near, stakes) if is_inside else _read(near, stakes), [producer] * is_inside
    if remedy is INVARIANT:
        return {producer.index: producer.bytes_moved * producer.repeat}, [producer]
    if remedy is LINEAR_PROLOGUE and producer.kind != "copy":
        moved = _moved(producer, near, stakes)
        # Each reader does the work itself, and reads what it is made of.
        again = producer.bytes_read * producer.repeat * (len(near) - 1)
        left = max(0.0, 1 - again / max(sum(moved.values()), 1))
        return {index: count * left for index, count in moved.items()}, [producer]
    if keeps_input and not is_residual_sum(producer):
        if not takes_part(table, producer):
            return _read(near[1:], stakes), []
        # The kernel's gradient computes again what is made of the rows' sums.
        stakes = [stake if elementwise_inputs(producer, stake.value.name) else _unkept(stake) for stake in stakes]
    if remedy in (EPILOGUE, LINEAR_EPILOGUE):
        first = [reader for reader in near if not any(ancestors[reader.index] >> other.index & 1 for other in near)]
        if len(first) < len(near):  # the others need what other launches make of the first, and read what is written
            return _read(first, stakes), []
    return _moved(producer, near, stakes), _removed(remedy, producer, near)


def _unkept(stake: _Stake) -> _Stake:
    return replace(stake, also_needed_by="") if stake.also_needed_by == _ELSEWHERE else stake


def _moved(producer: LaunchRow, near: Sequence[LaunchRow], stakes: Sequence[_Stake]) -> dict[int, float]:
    """Returns the bytes that each launch moves of the values and need not."""
    unwritten = sum(stake.written for stake in stakes if not stake.also_needed_by)
    if producer.kind == "copy" and unwritten:  # its readers read what was copied in its place
        return {producer.index: unwritten + producer.bytes_read * producer.repeat}
    moved = _read(near, stakes)
    return moved | {producer.index: moved.get(producer.index, 0) + unwritten}


def _read(readers: Sequence[LaunchRow], stakes: Sequence[_Stake]) -> dict[int, float]:
    """Returns the bytes that each launch reads of the values."""
    return {reader.index: sum(stake.read[reader.index] for stake in stakes) for reader in readers}


def _removed(remedy: Remedy, producer: LaunchRow, readers: Sequence[LaunchRow]) -> Sequence[LaunchRow]:
    """Returns the launches that a remedy removes.

    A product that is no longer split-K stays, and so does a launch that adds its parts beside other work, and one that
    writes what a collective sends.
    """
    if remedy is OVERLAP:
        return []
    if remedy is not WHOLE_SUM:
        return [producer]
    return [reader for reader in readers if {opcode for opcode, _ in reader.opcodes} <= {"reduce", "convert"}]


class _Reasons:
    """The compiler's reasons, by the producer and consumer of each unfused edge.

    An instruction may have several launches, as a sort that first copies its input; decisions name the last.
    """

    def __init__(self, decisions: Sequence[Decision], launches: Sequence[LaunchRow]) -> None:
        self._names = [launch.name for launch in launches]
        self._of: dict[tuple[str, str], Decision] = {}
        for decision in decisions:
            ends = (decision.producer_launch, decision.consumer_launch)
            if decision.verdict != "fused" and ends[0] is not None and ends[1] is not None:
                self._of.setdefault((self._names[ends[0]], self._names[ends[1]]), decision)

    def of_edge(self, producer: int, readers: tuple[int, ...], stakes: Sequence[_Stake]) -> tuple[str, str]:
        """Returns why a launch and its readers were not fused, and the category of the reason."""
        edges = ((self._names[producer], self._names[reader]) for reader in readers)
        decision = next((self._of[edge] for edge in edges if edge in self._of), None)
        reason = decision.reason if decision else "[no pass left a word about this value]"
        category = decision.category if decision else categories.UNRECORDED
        if readers == (producer,):
            reason, category = "[a loop's launch hands it to its next run]", categories.BOUNDARY
        if kept := dict.fromkeys(stake.also_needed_by for stake in stakes if stake.also_needed_by):
            reason += f" [written in any case: {', '.join(kept)}]"
        return reason, category


def through_updates(program: Program) -> Iterator[Candidate]:
    """Yields gradients of picks by index: arrays that one launch writes, a scatter updates and a third reads whole."""
    launches, outputs = program.launches, program.outputs
    updated = {(value.producer, value.bytes): value for value in program.intermediates}
    for value in program.intermediates:
        producer, after = launches[value.producer], updated.get((value.consumers[0], value.bytes))
        if len(value.consumers) > 1 or after is None or value.name in outputs or after.name in outputs:
            continue
        update, indices = launches[after.producer], [index for index in after.consumers if index != after.producer]
        readers = [launches[index] for index in indices]
        row = (producer.computation, producer.repeat)
        if (
            producer is not update
            and producer.phase == "backward"
            and has(update, "iota")
            and updates_in_place(update, value)
            and not scatters_rows(update)  # no comparison with indices makes these
            and producer.kind in _ELEMENT_WISE
            and producer.bytes_written >= value.bytes
            and (_SMALLEST_INPUT * producer.bytes_read >= producer.bytes_written or _is_one_a_row(producer, update))
            and readers
            and all(reader.kind in _ELEMENT_WISE and reader.bytes_read >= value.bytes for reader in readers)
            and all((found.computation, found.repeat) == row for found in (update, *readers))
            and all(could_join(producer, reader, False) for reader in readers)
        ):
            once = value.bytes * producer.repeat
            yield missed(
                program.device,
                value,
                producer=producer.index,
                consumers=tuple(indices),
                saved={end.index: once for end in (producer, *readers)},
                removed=(),
                ends=[producer, update, *readers],
                reason=f"[{update.name} updates {update.bytes_written} of its bytes in place before they are read]",
                category=categories.IN_PLACE,
                remedy=PICKED,
            )


def filled_for_loops(program: Program) -> Iterator[Candidate]:
    """Yields arrays filled with one value before a loop overwrites all of them, as the stacks of `lax.scan`."""
    launches = program.launches
    whole: dict[int, dict[Intermediate, list[LaunchRow]]] = defaultdict(dict)
    for value in program.intermediates:
        filler = launches[value.producer]
        writers = [
            reader
            for reader in (launches[index] for index in value.consumers)
            if reader.computation != filler.computation and updates_in_place(reader, value)
        ]
        if fills(filler) and sum(writer.bytes_written * writer.repeat for writer in writers) >= value.bytes:
            whole[value.producer][value] = writers
    for index, values in whole.items():
        filler, largest = launches[index], max(values, key=lambda value: value.bytes)
        writers = {writer.index: writer for found in values.values() for writer in found}
        yield missed(
            program.device,
            largest,
            producer=index,
            consumers=tuple(sorted(writers)),
            saved={index: sum(value.bytes for value in values) * filler.repeat},
            removed=[filler],
            ends=[filler, *writers.values()],
            reason="[a loop writes over all of it, a part in each of its runs]",
            category=categories.BOUNDARY,
            remedy=of_filled(filler, list(writers.values())),
        )


def _is_one_a_row(producer: LaunchRow, update: LaunchRow) -> bool:
    """Whether few elements are put into zeros, by indices that count the rows: so is the gradient of a row's pick."""
    few = _SMALLEST_INPUT * update.bytes_written <= producer.bytes_written
    return fills(producer) and few and has(update, "scatter")


def _also_needed_by(
    value: Intermediate, producer: LaunchRow, near: Sequence[LaunchRow], readers: int, outputs: Collection[str]
) -> str:
    """Says who needs a value in memory besides the readers that could join its producer; '' if nobody does."""
    if producer.repeat > 1 and producer.bytes_written >= value.bytes:  # only a loop's last run leaves it to others
        return ""
    if value.name in outputs:
        return "an output of the program"
    if producer.kind == "copy":  # what it copies is there already
        return ""
    if len(near) < readers:
        return _ELSEWHERE
    return "its reader updates it in place" if any(updates_in_place(reader, value) for reader in near) else ""


def _is_carried(value: Intermediate) -> bool:
    """Whether a loop's launch reads in its next run what it wrote."""
    return value.producer in value.consumers


def _without_libraries(producer: LaunchRow, readers: Sequence[LaunchRow]) -> Sequence[LaunchRow]:
    """The readers that could hold the producer's work; a library's kernel counts only where none but such read it."""
    ours = [reader for reader in readers if is_product(reader) or not is_library_kernel(reader)]
    return readers if is_library_kernel(producer) or not ours else ours


def _is_copied_again(producer: LaunchRow, readers: Sequence[LaunchRow]) -> bool:
    """Whether both ends are copies that XLA put in, of which no line of the program could take one away."""
    return all(end.kind == "copy" and not end.op_name and has(end, "copy") for end in (producer, *readers))


def could_join(producer: LaunchRow, reader: LaunchRow, is_score: bool) -> bool:
    """Whether one kernel could hold both at all: nothing spans two passes, the boundary of a loop, or the host's bus.

    What follows the backward pass, as an optimizer's step, bears no sign of it, and could join its last launches.
    """
    if any(end.host_bytes or calls_python(end) for end in (producer, reader)):
        return False
    # What XLA put in itself bears no name, and so belongs to no pass. A launch with any work of the backward pass runs
    # in that pass, whatever it is named after.
    same_pass = producer.phase in (reader.phase, "backward") or is_score or not (producer.op_name and reader.op_name)
    same_pass = same_pass or (reader.phase == "backward" and "backward" in producer.facts.phases)
    return same_pass and producer.computation == reader.computation
