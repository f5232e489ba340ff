"""Prices a missed fusion: bytes, the time that launches wait for them, and the record of both."""

from __future__ import annotations

from collections.abc import Sequence

from hlo_analysis.program.facts import LaunchRow
from hlo_analysis.records import Device, Intermediate, MissedFusion, Value
from hlo_analysis.remedies import Remedy


def written(value: Intermediate, producer: LaunchRow) -> int:
    """Bytes of a value that its launch writes: not all of them where it updates a buffer in place."""
    return min(value.bytes, producer.bytes_written) * producer.repeat


def read_by_each(value: Intermediate, launches: Sequence[LaunchRow]) -> dict[int, int]:
    """Bytes of a value by its readers: of what all of them read, by how much each of them can have read at most."""
    total = max(value.bytes_moved - written(value, launches[value.producer]), 0)
    readers = [launches[index] for index in value.consumers]
    most = {reader.index: min(value.bytes, reader.bytes_read) * reader.repeat for reader in readers}
    together = sum(most.values())
    return {index: bound * min(total, together) // max(together, 1) for index, bound in most.items()}


def updates_in_place(reader: LaunchRow, value: Intermediate) -> bool:
    """Whether a launch writes a part of a buffer of this shape and leaves the rest as it was."""
    return reader.bytes_written < value.bytes and any(made.shape == value.shape for made in reader.outputs)


def missed(
    value: Intermediate | Value,
    *,
    producer: int,
    consumers: tuple[int, ...],
    stake: int,
    time: float,
    ends: Sequence[LaunchRow],
    reason: str,
    category: str,
    remedy: Remedy,
) -> MissedFusion:
    """The record, not yet ranked; `ends` are the launches whose traffic the bytes are a share of, the maker first."""
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
        scope=next((end.scope for end in ends if end.scope), ""),  # what XLA put in has none
    )


def waits(launch: LaunchRow, byte_count: int, device: Device) -> float:
    """Microseconds that a launch would wait less for so many bytes; none where arithmetic bounds it."""
    if launch.limiter == "compute" or not device.memory_bandwidth:
        return 0.0
    return byte_count / device.memory_bandwidth * 1e6
