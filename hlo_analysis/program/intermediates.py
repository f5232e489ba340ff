"""Finds the values that one launch writes to HBM and another reads."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from hlo_analysis.program.dataflow import Source
from hlo_analysis.records import Intermediate


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """One launch that reads or writes a buffer of `size` bytes: `bytes` of it, each of `repeat` times.

    `usual` is False for a buffer that the launch reads only sometimes (in a loop's first iteration). `own` is True for
    the instruction's own result where that is no value from another launch or run: a later pass over the instruction
    reads it, or the next run updates it in place and reads nothing of it. `updates` is True for a write into a program
    argument: no launch wrote the rest of that buffer.
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


def find_intermediates(
    writes: Sequence[Access], reads: Sequence[Access], outputs: Collection[str] = ()
) -> tuple[Intermediate, ...]:
    """Pairs each written value with its readers, in the order of writing.

    Values without a reader (results of the program) or without a writer (arguments) are left out, as are `own` reads.
    Values that a launch in a loop passes to its next iteration count. So a launch is among the readers of each of its
    inputs that a launch writes.

    Args:
        writes: of all launches.
        reads: of all launches.
        outputs: names of the values that the program returns, which are written even if nothing reads them.
    """
    values = {access.source: _Value(access) for access in writes}
    for access in reads:
        value = values.get(access.source)
        if value is None or access.own:
            continue
        read = access.bytes * access.repeat
        if value.written.updates:
            read = min(read, value.written.bytes * max(value.written.repeat, access.repeat))
        value.readers[access.launch] = value.readers.get(access.launch, 0) + read
    return tuple(
        Intermediate(
            name=source.name,
            shape=value.written.shape,
            bytes=value.written.size,
            producer=value.written.launch,
            consumers=tuple(sorted(value.readers)),
            bytes_moved=value.written.bytes * value.written.repeat + sum(value.readers.values()),
            required_bytes=min(value.written.bytes * value.written.repeat, value.written.size)
            * (source.name in outputs),
        )
        for source, value in values.items()
        if value.readers
    )
