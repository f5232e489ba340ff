"""Checks limits on a program's launches, HBM traffic and memory, and finds the launches responsible for an excess.

A lock stores the numbers of a known state, to be kept beside the program and compared with later.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Literal

from pydantic import TypeAdapter, ValidationError

from hlo_analysis.errors import DumpError
from hlo_analysis.explain import apart_because, edges_of
from hlo_analysis.records import Analysis, Intermediate, Launch

LOCK_VERSION = 1
_KEY = "xlafuse_lock"


@dataclass(frozen=True, kw_only=True)
class Lock:
    """The counted numbers of a known state of a program."""

    label: str
    target: str
    mode: str
    launches: int
    hbm_bytes: int
    peak_bytes: int | None = None
    """None in locks that do not know it."""
    versions: dict[str, str] = field(default_factory=dict)
    options: dict[str, str] = field(default_factory=dict)
    """XLA's compiler options."""
    function: str = ""
    arguments: tuple[str, ...] = ()
    """Their types. Empty, as `function`, in locks that do not know them."""


Quantity = Literal[
    "launches", "HBM bytes", "peak bytes", "bytes between launches", "bytes to other GPUs", "all-gathers"
]


@dataclass(frozen=True, kw_only=True)
class Excess:
    """A limit that a program exceeds."""

    quantity: Quantity
    found: int
    limit: int
    origin: str
    """Where the limit comes from, e.g. '--max-launches' or the name of a baseline."""
    value: Intermediate | None = None
    """The value that is too large, of "bytes between launches"."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The most that a program may take; None is no limit."""

    max_launches: int | None = None
    """In one run."""
    max_hbm_bytes: int | None = None
    """Read and written in one run."""
    max_peak_bytes: int | None = None
    """Of memory in use at once, arguments and results included."""
    max_value_bytes: int | None = None
    """Of an array that one launch writes for others to read."""
    max_collective_bytes: int | None = None
    """That one GPU sends to others in one run."""
    no_all_gather: bool = False
    """Whether no array may be gathered from several GPUs."""

    @property
    def is_none(self) -> bool:
        """Whether nothing is limited."""
        return self == Limits()


def excesses(analysis: Analysis, limits: Limits, origin: str = "") -> tuple[Excess, ...]:
    """Returns the limits that the program exceeds.

    Args:
        analysis: the program.
        limits: what it may take.
        origin: where the limits come from; '' names each limit.
    """
    sent = sum(launch.link_bytes * launch.repeat for launch in analysis.launches)
    gathers = sum(launch.repeat for launch in analysis.launches if _gathers(launch))
    known: tuple[tuple[Quantity, int, int | None, str], ...] = (
        ("launches", analysis.launch_count, limits.max_launches, "max_launches"),
        ("HBM bytes", analysis.traffic.bytes, limits.max_hbm_bytes, "max_hbm_bytes"),
        ("peak bytes", analysis.memory.peak_bytes, limits.max_peak_bytes, "max_peak_bytes"),
        ("bytes to other GPUs", sent, limits.max_collective_bytes, "max_collective_bytes"),
        ("all-gathers", gathers, 0 if limits.no_all_gather else None, "no_all_gather"),
    )
    found = [
        Excess(quantity=quantity, found=number, limit=limit, origin=origin or name)
        for quantity, number, limit, name in known
        if limit is not None and number > limit
    ]
    if (largest := limits.max_value_bytes) is not None:
        found += [
            Excess(
                quantity="bytes between launches",
                found=value.bytes,
                limit=largest,
                origin=origin or "max_value_bytes",
                value=value,
            )
            for value in sorted(analysis.intermediates, key=lambda value: -value.bytes)
            if value.bytes > largest and value.consumers
        ]
    return tuple(found)


def _gathers(launch: Launch) -> bool:
    return launch.kind == "collective" and any(name.startswith("all-gather") for name, _ in launch.opcodes)


def responsible(
    analysis: Analysis, excess: Excess, among: Sequence[int] | None = None
) -> tuple[tuple[Launch, str], ...]:
    """Returns the launches responsible for an excess, each with the reason why it is a separate launch.

    For launches they are in program order; for bytes the largest traffic comes first, for peak memory the largest
    result; for a value they are those that write and read it. Of collectives the reason is what they send.

    Args:
        analysis: the program.
        excess: one of `excesses`.
        among: indices of the launches to consider; None for all.
    """
    reasons: dict[int, str] = {}
    for edge in edges_of(analysis):  # the costliest edge comes first
        reasons.setdefault(edge.consumer, f"apart from #{edge.producer}: {apart_because(edge)}")
    if excess.value is not None:
        among = (excess.value.producer, *excess.value.consumers)
    chosen = [analysis.launches[index] for index in sorted(set(among))] if among else list(analysis.launches)
    if excess.quantity == "peak bytes":
        chosen.sort(key=lambda launch: -sum(value.bytes for value in launch.outputs))
    if excess.quantity == "HBM bytes":
        chosen.sort(key=lambda launch: -launch.bytes_moved * launch.repeat)
    if excess.quantity in ("bytes to other GPUs", "all-gathers"):
        is_one = _gathers if excess.quantity == "all-gathers" else lambda launch: launch.link_bytes > 0
        chosen = sorted(filter(is_one, chosen), key=lambda launch: -launch.link_bytes * launch.repeat)
        return tuple((launch, f"sends {launch.link_bytes * launch.repeat:,} bytes to other GPUs") for launch in chosen)
    return tuple((launch, reasons.get(launch.index, "reads what no launch wrote")) for launch in chosen)


def lock_of(analysis: Analysis) -> Lock:
    """Returns the program's numbers, for later comparison."""
    made = analysis.provenance
    return Lock(
        label=analysis.label,
        target=made.target,
        mode=made.mode,
        launches=analysis.launch_count,
        hbm_bytes=analysis.traffic.bytes,
        peak_bytes=analysis.memory.peak_bytes or None,
        versions=dict(made.versions),
        options=dict(made.compiler_options),
        function=made.function,
        arguments=made.arguments,
    )


def lock_to_json(lock: Lock) -> str:
    """Formats a lock as indented JSON."""
    return json.dumps({_KEY: LOCK_VERSION, **asdict(lock)}, indent=1) + "\n"


def read_lock(text: str) -> Lock | None:
    """Reads a lock that `lock_to_json` wrote; None if the text is none.

    Raises:
        DumpError: the lock is of another version, or was edited.
    """
    try:
        data = json.loads(text)
    except ValueError:
        return None
    if not isinstance(data, dict) or _KEY not in data:
        return None
    if data[_KEY] != LOCK_VERSION:
        raise DumpError(f"expected a lock of version {LOCK_VERSION} ({_KEY!r}); write it again")
    try:
        return TypeAdapter(Lock).validate_json(text, strict=True)
    except ValidationError as error:
        found = error.errors()[0]
        where = ".".join(map(str, found["loc"]))
        raise DumpError(f"not a lock, or one that was edited: {where}: {found['msg']}; write it again") from error


def differences_in_making(before: Lock, after: Lock) -> list[str]:
    """Lists the differences in how two states were made, in sentences: program, XLA's options, versions."""
    said = other_program(before, after)
    said += _differing("option", before.options, after.options, "not set")
    if before.versions and after.versions:  # a dump states no versions
        said += _differing("version of", before.versions, after.versions, "not installed")
    return said


def other_program(before: Lock, after: Lock) -> list[str]:
    """Lists in what two states are of different programs, in sentences: function, arguments, target, mode."""
    pairs = (
        ("function", before.function, after.function),
        ("arguments", *_apart(before.arguments, after.arguments)),
        ("target", before.target, after.target),
        ("mode", before.mode, after.mode),
    )
    return [f"{name}: {one} before, {other} now" for name, one, other in pairs if one and other and one != other]


def _apart(before: Sequence[str], after: Sequence[str]) -> tuple[str, str]:
    """Returns the arguments that only one of two programs has, the first few."""
    if not before or not after:
        return "", ""
    sides = [each for each in before if each not in after], [each for each in after if each not in before]
    old, new = (", ".join([*only[:3], *(["…"] if len(only) > 3 else [])]) or "none more" for only in sides)
    return old, new


def _differing(kind: str, before: Mapping[str, str], after: Mapping[str, str], absent: str) -> list[str]:
    return [
        f"{kind} {name}: {before.get(name, absent)} before, {after.get(name, absent)} now"
        for name in dict.fromkeys((*before, *after))
        if before.get(name) != after.get(name)
    ]
