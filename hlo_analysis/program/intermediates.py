"""Finds the values that one launch writes to HBM and another reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from hlo_analysis.program.dataflow import Source
from hlo_analysis.records import Intermediate


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """One launch reading or writing one buffer of `size` bytes; `bytes` of it, each of `repeat` times.

    `usual` is False for a buffer that the launch reads only now and then (a loop's first iteration). `own` is True
    where a pass over an instruction's own result reads it. `updates` is True of a write into an argument of the
    program: the rest of its buffer no launch wrote.
    """

    launch: int
    source: Source
    shape: str
    size: int
    bytes: int
    repeat: int
    usual: bool = True
    own: bool = False
    updates: bool = False


@dataclass(slots=True)
class _Value:
    written: Access
    readers: dict[int, int] = field(default_factory=dict)


def find_intermediates(writes: Sequence[Access], reads: Sequence[Access]) -> tuple[Intermediate, ...]:
    """Pair what is written with who reads it, in the order of writing.

    A value that nobody reads (a result of the program) and one that nobody wrote (an argument) are left out, as is what
    the passes of one instruction hand each other. What a loop's launch hands its next run counts.
    """
    values = {access.source: _Value(access) for access in writes}
    for access in reads:
        value = values.get(access.source)
        if value is None or access.own:
            continue
        read = access.bytes * access.repeat
        if value.written.updates:
            read = min(read, value.written.bytes * max(value.written.repeat, access.repeat))
        if read or access.launch != value.written.launch:
            value.readers[access.launch] = value.readers.get(access.launch, 0) + read
    return tuple(
        Intermediate(
            name=source.name,
            shape=value.written.shape,
            bytes=value.written.size,
            producer=value.written.launch,
            consumers=tuple(sorted(value.readers)),
            bytes_moved=value.written.bytes * value.written.repeat + sum(value.readers.values()),
        )
        for source, value in values.items()
        if value.readers
    )
