"""Finds values that one launch writes and another reads: directly, through an in-place update, or into a loop."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from hlo_analysis.catalogue import Catalogue
from hlo_analysis.decisions import categories
from hlo_analysis.missed.cost import missed, read_by_each, updates_in_place, waits, written
from hlo_analysis.patterns.attention_scores import attention_products
from hlo_analysis.patterns.launch_patterns import calls_python, fills, has
from hlo_analysis.patterns.pair_patterns import scatters_rows
from hlo_analysis.program.facts import LaunchRow
from hlo_analysis.records import Decision, Device, Intermediate, MissedFusion
from hlo_analysis.remedies import Table, vertical_remedy
from hlo_analysis.remedies.loop_texts import APART
from hlo_analysis.remedies.texts import MASKED, PICKED

_ELEMENT_WISE = frozenset({"loop", "transpose", "triton", "reduction"})
# What is made of (almost) nothing, as zeros to add to, is no work that could wait for its reader.
_SMALLEST_INPUT = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class _Stake:
    value: Intermediate
    kept_for: str
    """Why the value must be written even if its readers did not read it; '' where nothing speaks for it."""
    written: int
    """Bytes, in one run of the program."""
    read: Mapping[int, int]
    """Bytes, by index of each reader, in one run."""


def between_launches(
    launches: Sequence[LaunchRow],
    intermediates: Sequence[Intermediate],
    decisions: Sequence[Decision],
    device: Device,
    scores: frozenset[str],
    outputs: frozenset[str],
    donated: frozenset[str],
    catalogue: Catalogue,
) -> Iterator[MissedFusion]:
    """Yields one missed fusion for all values that one launch writes for the same readers."""
    why = _Reasons(decisions, launches)
    table = Table(launches)
    products = attention_products(launches, intermediates, scores)
    for (index, indices), stakes in _handed(launches, intermediates, scores, outputs).items():
        producer, near = launches[index], [launches[reader] for reader in indices]
        at_stake, time = _cost(producer, near, stakes, device)
        reason, category = why.apart(index, indices, stakes)
        largest = max((stake.value for stake in stakes), key=lambda value: value.bytes)
        remedy = vertical_remedy(
            table,
            producer,
            near,
            category,
            is_score=largest.name in scores,
            feeds_attention=products.issuperset(indices),
            of_attention=index in products,
            donated=donated,
        )
        yield missed(
            largest,
            producer=index,
            consumers=indices,
            stake=at_stake,
            time=time + device.launch_overhead_us * producer.repeat,
            ends=[producer, *(reader for reader in near if reader is not producer)],
            reason=reason,
            category=category,
            remedy=remedy.named(catalogue, (producer, *near)),
        )


def _handed(
    launches: Sequence[LaunchRow],
    intermediates: Sequence[Intermediate],
    scores: frozenset[str],
    outputs: frozenset[str],
) -> Mapping[tuple[int, tuple[int, ...]], list[_Stake]]:
    """What is at stake, by the launch that writes it and those of its readers that could join that launch."""
    handed: dict[tuple[int, tuple[int, ...]], list[_Stake]] = defaultdict(list)
    for value in intermediates:
        producer = launches[value.producer]
        readers = [launches[index] for index in value.consumers if index != value.producer]
        near = [reader for reader in readers if could_join(producer, reader, value.name in scores)]
        if not near and _is_carried(value):
            near = readers = [producer]
        if near:
            most = written(value, producer)
            stake = _Stake(
                value=value,
                kept_for=_kept_for(value, producer, near, len(readers), outputs),
                written=most,
                # A reader of the whole buffer that was updated in place would read the rest of it anyway.
                read={index: min(read, most) for index, read in read_by_each(value, launches).items()},
            )
            handed[value.producer, tuple(reader.index for reader in near)].append(stake)
    return handed


def _cost(
    producer: LaunchRow, near: Sequence[LaunchRow], stakes: Sequence[_Stake], device: Device
) -> tuple[int, float]:
    """Bytes that need not move, and the microseconds that launches wait for them."""
    gone = sum(stake.written for stake in stakes if not stake.kept_for)
    if producer.kind == "copy" and gone:  # its readers read what was copied in its place
        at_stake = gone + producer.bytes_read * producer.repeat
        return at_stake, waits(producer, at_stake, device)
    read = {reader.index: sum(stake.read[reader.index] for stake in stakes) for reader in near}
    waited = sum(waits(reader, read[reader.index], device) for reader in near)
    return gone + sum(read.values()), waits(producer, gone, device) + waited


class _Reasons:
    """The compiler's words, by the instructions on both ends of an edge that was not fused.

    An instruction may take several launches, as a sort that first copies its input: its decisions name the last.
    """

    def __init__(self, decisions: Sequence[Decision], launches: Sequence[LaunchRow]) -> None:
        self._names = [launch.name for launch in launches]
        self._of: dict[tuple[str, str], Decision] = {}
        for decision in decisions:
            ends = (decision.producer_launch, decision.consumer_launch)
            if decision.verdict != "fused" and ends[0] is not None and ends[1] is not None:
                self._of.setdefault((self._names[ends[0]], self._names[ends[1]]), decision)

    def apart(self, producer: int, readers: tuple[int, ...], stakes: Sequence[_Stake]) -> tuple[str, str]:
        """Why a launch and its readers are apart, and the category of that."""
        edges = ((self._names[producer], self._names[reader]) for reader in readers)
        decision = next((self._of[edge] for edge in edges if edge in self._of), None)
        reason = decision.reason if decision else "[no pass left a word about this value]"
        category = decision.category if decision else categories.UNRECORDED
        if readers == (producer,):
            reason, category = "[a loop's launch hands it to its next run]", categories.BOUNDARY
        if kept := dict.fromkeys(stake.kept_for for stake in stakes if stake.kept_for):
            reason += f" [written in any case: {', '.join(kept)}]"
        return reason, category


def through_updates(
    launches: Sequence[LaunchRow], intermediates: Sequence[Intermediate], device: Device, outputs: frozenset[str]
) -> Iterator[MissedFusion]:
    """Arrays that a launch makes, that another updates in part, in place, and that a third reads whole."""
    updated = {(value.producer, value.bytes): value for value in intermediates}
    for value in intermediates:
        maker, after = launches[value.producer], updated.get((value.consumers[0], value.bytes))
        if len(value.consumers) > 1 or after is None or value.name in outputs or after.name in outputs:
            continue
        update, indices = launches[after.producer], [index for index in after.consumers if index != after.producer]
        readers = [launches[index] for index in indices]
        row = (maker.computation, maker.repeat)
        if (
            maker is not update
            and updates_in_place(update, value)
            and not scatters_rows(update)  # no comparison with indices makes these
            and maker.kind in _ELEMENT_WISE
            and maker.bytes_written >= value.bytes
            and (_SMALLEST_INPUT * maker.bytes_read >= maker.bytes_written or _is_one_a_row(maker, update))
            and readers
            and all(reader.kind in _ELEMENT_WISE and reader.bytes_read >= value.bytes for reader in readers)
            and all((found.computation, found.repeat) == row for found in (update, *readers))
            and all(could_join(maker, reader, False) for reader in readers)
        ):
            once = value.bytes * maker.repeat
            yield missed(
                value,
                producer=maker.index,
                consumers=tuple(indices),
                stake=once * (1 + len(readers)),
                time=sum(waits(end, once, device) for end in (maker, *readers)),
                ends=[maker, update, *readers],
                reason=f"[{update.name} updates {update.bytes_written} of its bytes in place before they are read]",
                category=categories.IN_PLACE,
                remedy=PICKED if fills(maker) and maker.phase == "backward" else MASKED,
            )


def filled_for_loops(
    launches: Sequence[LaunchRow], intermediates: Sequence[Intermediate], device: Device
) -> Iterator[MissedFusion]:
    """Arrays of one value that a loop then writes all of, a part in each of its runs, as what `lax.scan` stacks."""
    whole: dict[int, dict[Intermediate, list[LaunchRow]]] = defaultdict(dict)
    for value in intermediates:
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
        stake = sum(value.bytes for value in values) * filler.repeat
        writers = {writer.index: writer for found in values.values() for writer in found}
        yield missed(
            largest,
            producer=index,
            consumers=tuple(sorted(writers)),
            stake=stake,
            time=waits(filler, stake, device) + device.launch_overhead_us * filler.repeat,
            ends=[filler, *writers.values()],
            reason="[a loop writes over all of it, a part in each of its runs]",
            category=categories.BOUNDARY,
            remedy=APART,
        )


def _is_one_a_row(maker: LaunchRow, update: LaunchRow) -> bool:
    """Whether few elements are put into zeros, by indices that count the rows: so is the gradient of a row's pick."""
    few = _SMALLEST_INPUT * update.bytes_written <= maker.bytes_written
    return fills(maker) and few and has(update, "scatter") and has(update, "iota")


def _kept_for(
    value: Intermediate, producer: LaunchRow, near: Sequence[LaunchRow], readers: int, outputs: frozenset[str]
) -> str:
    if producer.repeat > 1 and producer.bytes_written >= value.bytes:  # only a loop's last run leaves it to others
        return ""
    if value.name in outputs:
        return "an output of the program"
    if producer.kind == "copy":  # what it copies is there already
        return ""
    if len(near) < readers:
        return "the backward pass or another loop reads it"
    return "its reader updates it in place" if any(updates_in_place(reader, value) for reader in near) else ""


def _is_carried(value: Intermediate) -> bool:
    """Whether a loop's launch reads in its next run what it wrote; a counter does not count."""
    return value.producer in value.consumers and not value.shape.endswith("[]")


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
