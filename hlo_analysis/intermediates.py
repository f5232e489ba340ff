"""Values that one launch hands another through HBM."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from hlo_analysis.dataflow import Source
from hlo_analysis.records import Intermediate


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """One launch reading or writing one buffer of `size` bytes; `bytes` of it, each of `repeat` times.

    `usual` is False for a buffer that the launch reads only now and then (a loop's first iteration).
    """

    launch: int
    source: Source
    shape: str
    size: int
    bytes: int
    repeat: int
    usual: bool = True


@dataclass(slots=True)
class _Value:
    written: Access
    readers: dict[int, int] = field(default_factory=dict)


def find_intermediates(writes: Sequence[Access], reads: Sequence[Access]) -> tuple[Intermediate, ...]:
    """Pair what is written with who reads it, in the order of writing.

    A value that nobody reads (a result of the program) and one that nobody wrote (an argument) are left out, as is what
    the passes of one instruction hand each other.
    """
    values = {access.source: _Value(access) for access in writes}
    steps = {(access.source.computation, access.source.instruction, access.launch) for access in writes}
    for access in reads:
        value = values.get(access.source)
        own = (access.source.computation, access.source.instruction, access.launch) in steps
        if value is not None and not own:
            value.readers[access.launch] = value.readers.get(access.launch, 0) + access.bytes * access.repeat
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
