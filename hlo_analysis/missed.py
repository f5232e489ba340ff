"""Missed fusions: values that need not reach HBM, ranked by the time that they cost.

*The fusion test*: a fusion pays when the intermediate is large against the work around it. So the bytes at stake are
set against the traffic of the launches on both ends (`share`), and time counts only where a launch waits for memory: a
matrix product that is bound by arithmetic runs no faster for reading less.

Four kinds are found. *Vertical*: a launch writes what another reads. *Through an update*: what it writes is read when
a third has updated a part of it in place. *Horizontal*: several launches read one input that a single launch could read
once. *Read again*: an argument is read for a sum over its rows, and again with the sum.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from hlo_analysis.decisions import categories
from hlo_analysis.records import Decision, Device, Intermediate, Launch, MissedFusion, Value
from hlo_analysis.remedies import Remedy, Table, rows_remedy, shared_input_remedy, vertical_remedy
from hlo_analysis.remedy_texts import MASKED
from hlo_analysis.rereads import find_ancestors, find_rereads
from hlo_analysis.scores import attention_scores
from hlo_analysis.traits import PRODUCTS

# A launch that does any work of the backward pass runs in that pass, though it be named after the rest of its work.
_BACKWARD = re.compile(r'op_name="[^"]*\btranspose\(')

# Below this share of the bytes and of the time around it, a value fails the fusion test.
_SMALLEST_SHARE = 0.05


def rank(
    launches: Sequence[Launch],
    intermediates: Sequence[Intermediate],
    decisions: Sequence[Decision],
    device: Device,
    *,
    outputs: Collection[str] = (),
    donated: Collection[str] = (),
) -> tuple[MissedFusion, ...]:
    """The missed fusions, costliest first.

    A value that must exist anyway is at stake only as far as it is read again: an output of the program, or what the
    forward pass keeps for the backward pass. Attention scores are never such a value: a fused kernel recomputes them.
    So is a buffer that its reader updates in place: what it does not replace is in the result.

    Args:
        launches: the launch table.
        intermediates: values that one launch hands another.
        decisions: from `decisions.decide`, for the reasons.
        device: bandwidth and launch overhead.
        outputs: names of values (as in `Intermediate.name`) that the program returns.
        donated: names of the arguments whose buffers the program may overwrite.
    """
    missed = [
        *_vertical(launches, intermediates, decisions, device, frozenset(outputs), frozenset(donated)),
        *_through_updates(launches, intermediates, device, frozenset(outputs)),
        *_horizontal(launches, intermediates, device),
        *_read_again(launches, device),
    ]
    missed = [found for found in missed if _passes(found, launches)]
    missed.sort(key=lambda found: (-found.time_at_stake_us, -found.bytes_at_stake, found.producer, found.value))
    return tuple(replace(found, rank=position) for position, found in enumerate(missed, start=1))


def _passes(found: MissedFusion, launches: Sequence[Launch]) -> bool:
    """The fusion test, on bytes or, for a pair of small launches, on time."""
    ends = [launches[index] for index in {found.producer, *found.consumers}]
    around = sum(launch.roofline_us * launch.repeat for launch in ends)
    saves_time = found.category != categories.SHARED_INPUT and found.time_at_stake_us >= _SMALLEST_SHARE * around
    return found.bytes_at_stake > 0 and (found.share >= _SMALLEST_SHARE or saves_time)


def _vertical(
    launches: Sequence[Launch],
    intermediates: Sequence[Intermediate],
    decisions: Sequence[Decision],
    device: Device,
    outputs: frozenset[str],
    donated: frozenset[str],
) -> Iterator[MissedFusion]:
    """One missed fusion for all that a launch hands the same readers."""
    reasons: dict[tuple[int | None, int | None], Decision] = {}
    for decision in decisions:
        if decision.verdict != "fused":
            reasons.setdefault((decision.producer_launch, decision.consumer_launch), decision)
    table, scores = Table(launches), attention_scores(launches, intermediates)
    handed: dict[tuple[int, tuple[int, ...]], list[_Stake]] = defaultdict(list)
    for value in intermediates:
        producer = launches[value.producer]
        readers = [launches[index] for index in value.consumers if index != value.producer]
        near = [reader for reader in readers if _could_join(producer, reader, value.name in scores)]
        if not near and _is_carried(value):
            near = readers = [producer]
        if near:
            stake = _Stake(
                value=value,
                kept_for=_kept_for(value, producer, near, len(readers), outputs),
                written=_written(value, producer),
                # A reader of the whole buffer that was updated in place would read the rest of it anyway.
                read=min(_read_by_each(value, producer), _written(value, producer)),
            )
            handed[value.producer, tuple(reader.index for reader in near)].append(stake)
    for (index, indices), stakes in handed.items():
        producer, near = launches[index], [launches[reader] for reader in indices]
        gone = sum(stake.written for stake in stakes if not stake.kept_for)
        read = sum(stake.read for stake in stakes)
        at_stake = gone + len(near) * read
        time = _waits(producer, gone, device) + sum(_waits(reader, read, device) for reader in near)
        if producer.kind == "copy" and gone:  # its readers read what was copied in its place
            at_stake = gone + producer.bytes_read * producer.repeat
            time = _waits(producer, at_stake, device)
        decision = next((reasons[index, reader] for reader in indices if (index, reader) in reasons), None)
        reason = decision.reason if decision else "[no pass left a word about this value]"
        category = decision.category if decision else categories.UNRECORDED
        if indices == (index,):
            reason, category = "[a loop's launch hands it to its next run]", categories.BOUNDARY
        if kept := dict.fromkeys(stake.kept_for for stake in stakes if stake.kept_for):
            reason += f" [written in any case: {', '.join(kept)}]"
        largest = max((stake.value for stake in stakes), key=lambda value: value.bytes)
        is_score = largest.name in scores
        yield _missed(
            largest,
            producer=index,
            consumers=indices,
            stake=at_stake,
            time=time + device.launch_overhead_us * producer.repeat,
            ends=[producer, *(reader for reader in near if reader is not producer)],
            reason=reason,
            category=category,
            remedy=vertical_remedy(table, producer, near, category, is_score=is_score, donated=donated),
        )


def _through_updates(
    launches: Sequence[Launch], intermediates: Sequence[Intermediate], device: Device, outputs: frozenset[str]
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
            and _updates_in_place(update, value)
            and maker.kind in _ELEMENT_WISE
            and _SMALLEST_INPUT * maker.bytes_read >= maker.bytes_written >= value.bytes
            and readers
            and all(reader.kind in _ELEMENT_WISE and reader.bytes_read >= value.bytes for reader in readers)
            and all((found.computation, found.repeat) == row for found in (update, *readers))
            and all(_could_join(maker, reader, False) for reader in readers)
        ):
            once = value.bytes * maker.repeat
            yield _missed(
                value,
                producer=maker.index,
                consumers=tuple(indices),
                stake=once * (1 + len(readers)),
                time=sum(_waits(end, once, device) for end in (maker, *readers)),
                ends=[maker, update, *readers],
                reason=f"[{update.name} updates {update.bytes_written} of its bytes in place before they are read]",
                category=categories.IN_PLACE,
                remedy=MASKED,
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Stake:
    value: Intermediate
    kept_for: str
    """Why the value must be written even if its readers did not read it; '' where nothing speaks for it."""
    written: int
    """Bytes, in one run of the program."""
    read: int
    """Bytes, by each reader, in one run."""


def _kept_for(
    value: Intermediate, producer: Launch, near: Sequence[Launch], readers: int, outputs: frozenset[str]
) -> str:
    if producer.repeat > 1 and producer.bytes_written >= value.bytes:  # only a loop's last run leaves it to others
        return ""
    if value.name in outputs:
        return "an output of the program"
    if producer.kind == "copy":  # what it copies is there already
        return ""
    if len(near) < readers:
        return "the backward pass or another loop reads it"
    return "its reader updates it in place" if any(_updates_in_place(reader, value) for reader in near) else ""


def _is_carried(value: Intermediate) -> bool:
    """Whether a loop's launch reads in its next run what it wrote; a counter does not count."""
    return value.producer in value.consumers and not value.shape.endswith("[]")


def _written(value: Intermediate, producer: Launch) -> int:
    """Bytes of a value that its launch writes: not all of them where it updates a buffer in place."""
    return min(value.bytes, producer.bytes_written) * producer.repeat


def _read_by_each(value: Intermediate, producer: Launch) -> int:
    """The mean over the readers, some of which may read a slice."""
    return max(value.bytes_moved - _written(value, producer), 0) // max(len(value.consumers), 1)


def _updates_in_place(reader: Launch, value: Intermediate) -> bool:
    """Whether a launch writes a part of a buffer of this shape and leaves the rest as it was."""
    return reader.bytes_written < value.bytes and any(made.shape == value.shape for made in reader.outputs)


def _horizontal(
    launches: Sequence[Launch], intermediates: Sequence[Intermediate], device: Device
) -> Iterator[MissedFusion]:
    """Launches that depend on one another in no way and read the same values."""
    readers: dict[str, list[Launch]] = defaultdict(list)
    values: dict[str, Value] = {}
    for launch in launches:
        for value in launch.inputs:
            readers[value.name].append(launch)
            values[value.name] = value
    handed = {value.name: _read_by_each(value, launches[value.producer]) for value in intermediates}
    ancestors = find_ancestors(launches)
    groups: dict[tuple[int, ...], dict[str, int]] = defaultdict(dict)
    for name, found in readers.items():
        for group in _siblings(found, ancestors):
            once = values[name].bytes * group[0].repeat
            read = handed.get(name, min(once, *(launch.bytes_read * launch.repeat for launch in group)))
            again = len(group) * read - once  # nothing where each reads a slice of its own
            if again > 0:
                groups[tuple(launch.index for launch in group)][name] = again
    scores = attention_scores(launches, intermediates)
    for indices, shared in groups.items():
        group = [launches[index] for index in indices]
        _, name = max((count, name) for name, count in shared.items())
        remedy = shared_input_remedy(group, name)
        if remedy is None or name in scores:
            continue
        largest, stake = values[name], sum(shared.values())
        time = sum(_waits(launch, stake, device) for launch in group[1:]) / len(group[1:])
        what = f"{name} and {len(shared) - 1} more" if len(shared) > 1 else name
        yield _missed(
            largest,
            producer=indices[0] if largest.producer is None else largest.producer,
            consumers=indices,
            stake=stake,
            time=time + sum(device.launch_overhead_us * launch.repeat for launch in group[1:]),
            ends=group,
            reason=f"[{len(group)} launches each read {what} anew]",
            category=categories.SHARED_INPUT,
            remedy=remedy,
        )


def _read_again(launches: Sequence[Launch], device: Device) -> Iterator[MissedFusion]:
    """Arguments of which one kernel could have read each row once, with its sum and with what needs the sum."""
    table = Table(launches)
    for found in find_rereads(launches):
        first, *later = found.readers
        again = found.value.bytes * first.repeat
        gone = [*later, *found.between]
        waited = sum(_waits(launch, again, device) for launch in later)
        yield _missed(
            found.value,
            producer=first.index,
            consumers=tuple(launch.index for launch in found.readers),
            stake=again * len(later),
            time=waited + sum(device.launch_overhead_us * launch.repeat for launch in gone),
            ends=[*found.readers, *found.between],
            reason=f"[{len(found.readers)} launches read {found.value.name}, the later ones after sums over its rows]",
            category=categories.SHARED_INPUT,
            remedy=rows_remedy(table, [*found.readers, *found.between]),
        )


def _missed(
    value: Intermediate | Value,
    *,
    producer: int,
    consumers: tuple[int, ...],
    stake: int,
    time: float,
    ends: Sequence[Launch],
    reason: str,
    category: str,
    remedy: Remedy,
) -> MissedFusion:
    traffic = sum((launch.bytes_read + launch.bytes_written) * launch.repeat for launch in ends)
    return MissedFusion(
        rank=0,
        value=value.name,
        shape=value.shape,
        producer=producer,
        consumers=consumers,
        bytes_at_stake=stake,
        time_at_stake_us=time,
        share=min(stake / traffic, 1.0) if traffic else 0.0,
        reason=reason,
        category=category,
        remedy_kind=remedy.kind,
        remedy=remedy.text,
        scope=ends[0].scope,
    )


def _waits(launch: Launch, byte_count: int, device: Device) -> float:
    """Microseconds that a launch would wait less for so many bytes; none where arithmetic bounds it."""
    if launch.limiter == "compute" or not device.memory_bandwidth:
        return 0.0
    return byte_count / device.memory_bandwidth * 1e6


def _could_join(producer: Launch, reader: Launch, is_score: bool) -> bool:
    """Whether one kernel could hold both at all: nothing spans two passes, or the boundary of a loop."""
    # What XLA put in itself bears no name, and so belongs to no pass.
    same_pass = producer.phase == reader.phase or is_score or not (producer.op_name and reader.op_name)
    same_pass = same_pass or (reader.phase == "backward" and bool(_BACKWARD.search(producer.hlo)))
    return same_pass and producer.computation == reader.computation


def _siblings(readers: Sequence[Launch], ancestors: Sequence[int]) -> list[list[Launch]]:
    """Groups of two and more readers that could be one launch: alike, in one pass, none needing another's result."""
    alike: Mapping[tuple, list[Launch]] = defaultdict(list)
    for launch in {reader.index: reader for reader in readers}.values():
        if launch.kind in _MERGEABLE:
            alike[launch.computation, launch.phase, launch.kind in PRODUCTS, launch.repeat].append(launch)
    groups: list[list[Launch]] = []
    for candidates in alike.values():
        group: list[Launch] = []
        for launch in candidates:
            if not any(ancestors[launch.index] >> member.index & 1 for member in group):
                group.append(launch)
        if len(group) > 1:
            groups.append(group)
    return groups


_ELEMENT_WISE = frozenset({"loop", "transpose", "triton", "reduction"})
# What is made of (almost) nothing, as zeros to add to, is no work that could wait for its reader.
_SMALLEST_INPUT = 8
_MERGEABLE = PRODUCTS | {"loop", "reduction", "transpose", "concatenate", "triton", "copy"}
