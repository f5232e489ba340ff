"""Prices missed fusions: bytes, the time that they take, and what remains of it when others are done."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heapreplace

from hlo_analysis.program.facts import LaunchRow
from hlo_analysis.records import Device, Intermediate, MissedFusion, Value
from hlo_analysis.remedies import Remedy


def written(value: Intermediate, producer: LaunchRow) -> int:
    """Returns the bytes of a value that its launch writes; fewer than its size if the launch updates it in place."""
    return min(value.bytes, producer.bytes_written) * producer.repeat


def read_by_each(value: Intermediate, launches: Sequence[LaunchRow]) -> dict[int, int]:
    """Splits the bytes that all readers read of a value among them, by the most that each can have read."""
    total = max(value.bytes_moved - written(value, launches[value.producer]), 0)
    readers = [launches[index] for index in value.consumers]
    most = {reader.index: min(value.bytes, reader.bytes_read) * reader.repeat for reader in readers}
    together = sum(most.values())
    return {index: bound * min(total, together) // max(together, 1) for index, bound in most.items()}


def updates_in_place(reader: LaunchRow, value: Intermediate) -> bool:
    """Whether a launch writes a part of a buffer of this shape and leaves the rest as it was."""
    return reader.bytes_written < value.bytes and any(made.shape == value.shape for made in reader.outputs)


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """A missed fusion before ranking, and the launches whose time it would save.

    saved_us: microseconds of memory traffic that each launch saves in one run of the program, by its index.
    removed: launches that the fusion removes, with their overhead.
    slow_us: microseconds beyond the roofline that it saves.
    portion: how much of their overhead it removes.
    """

    found: MissedFusion
    saved_us: Mapping[int, float]
    removed: tuple[int, ...]
    slow_us: float = 0.0
    portion: float = 1.0


def missed(
    device: Device,
    value: Intermediate | Value,
    *,
    producer: int,
    consumers: tuple[int, ...],
    saved: Mapping[int, float],
    removed: Sequence[LaunchRow],
    ends: Sequence[LaunchRow],
    reason: str,
    category: str,
    remedy: Remedy,
    is_hidden: bool = False,
    other_us: Mapping[int, float] | None = None,
    slow_us: float = 0.0,
) -> Candidate:
    """Makes the record with its times.

    Args:
        device: bandwidth and launch overhead.
        value: what goes through HBM.
        producer: index of the launch that writes it.
        consumers: indices of those that read it.
        saved: bytes that each launch no longer moves in one run of the program, by its index.
        removed: launches that the fusion removes.
        ends: the launches whose traffic `share` divides by, those of `saved` among them, the producer first.
        reason: why they are apart.
        category: of the reason.
        remedy: what helps.
        is_hidden: whether moving fewer bytes saves no time.
        other_us: microseconds that launches save beside those of `saved`, by index.
        slow_us: microseconds beyond the roofline that it saves.
    """
    by_index = {launch.index: launch for launch in ends}
    times = {index: 0.0 if is_hidden else memory_us(by_index[index], count, device) for index, count in saved.items()}
    saved_us = {index: time * remedy.portion for index, time in (times | dict(other_us or {})).items()}
    stake = int(round(sum(saved.values())) * remedy.portion)
    traffic = sum(launch.bytes_moved * launch.repeat for launch in ends)
    overhead = remedy.portion * sum(overhead_us(launch, device) for launch in removed)
    found = MissedFusion(
        rank=0,
        value=value.name,
        shape=value.shape,
        producer=producer,
        consumers=consumers,
        bytes_at_stake=stake,
        time_at_stake_us=sum(saved_us.values()) + overhead + slow_us,
        share=min(stake / traffic, 1.0) if traffic else 0.0,
        reason=reason,
        category=category,
        remedy_kind=remedy.kind,
        remedy=remedy.text,
        options=remedy.options,
        kernel=remedy.kernel,
        code=remedy.code,
        scope=next((end.scope for end in ends if end.scope), ""),  # what XLA put in has none
        source=next((end.source for end in ends if end.source), None),
    )
    gone = tuple(launch.index for launch in removed)
    return Candidate(found=found, saved_us=saved_us, removed=gone, slow_us=slow_us, portion=remedy.portion)


def overhead_us(launch: LaunchRow, device: Device) -> float:
    """Returns the microseconds that a launch costs besides its work; in a loop there is no gap to the next."""
    in_loop = device.efficiency.kernel_us or device.launch_overhead_us
    return (in_loop if launch.repeat > 1 else device.launch_overhead_us) * launch.repeat


def memory_us(launch: LaunchRow, byte_count: float, device: Device) -> float:
    """Returns the microseconds that a launch spends on moving so many bytes; 0 where arithmetic or a link bounds it."""
    if launch.limiter in ("compute", "link") or not device.memory_bandwidth:
        return 0.0
    return byte_count / device.memory_bandwidth * 1e6


def is_busy(launch: LaunchRow, device: Device) -> bool:
    """Whether a launch moves its bytes in less time than its instructions take, so that moving fewer saves none."""
    moved = launch.bytes_moved / (device.memory_bandwidth or 1) * 1e6
    return moved < 0.95 * device.efficiency.memory * (launch.estimated_us - device.efficiency.kernel_us)


def in_order(
    candidates: Sequence[Candidate], launches: Sequence[LaunchRow], device: Device
) -> Iterator[tuple[Candidate, float]]:
    """Yields the candidates by what remains of each when those before it are done, the most first, and that time.

    Of a launch no more can be saved than it takes, and its overhead goes once. What remains of a candidate only falls,
    so that the first of the heap that is still worth what it was is the next.
    """
    overhead = {launch.index: overhead_us(launch, device) for launch in launches}
    rest = {launch.index: (launch.roofline_us - device.launch_overhead_us) * launch.repeat for launch in launches}

    def remains(candidate: Candidate) -> float:
        memory = sum(min(time, max(rest[index], 0.0)) for index, time in candidate.saved_us.items())
        return memory + candidate.slow_us + candidate.portion * sum(overhead[index] for index in candidate.removed)

    def entry(number: int) -> tuple:
        candidate, found = candidates[number], candidates[number].found
        return (
            -remains(candidate),
            -found.time_at_stake_us,
            -found.bytes_at_stake,
            found.producer,
            found.value,
            number,
        )

    heap = [entry(number) for number in range(len(candidates))]
    heapify(heap)
    while heap:
        first, number = heap[0], heap[0][-1]
        if (now := entry(number)) > first:
            heapreplace(heap, now)
            continue
        heappop(heap)
        candidate = candidates[number]
        for index, time in candidate.saved_us.items():
            rest[index] -= time
        overhead |= {index: overhead[index] * (1 - candidate.portion) for index in candidate.removed}
        yield candidate, -first[0]
