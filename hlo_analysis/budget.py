"""Checks limits on a program's launches and HBM traffic, and finds the launches responsible for an excess.

A lock stores the numbers of a known state, to be kept beside the program and compared with later.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Literal

from hlo_analysis.errors import DumpError
from hlo_analysis.explain import apart_because, edges_of
from hlo_analysis.records import Analysis, Launch

LOCK_VERSION = 1
_KEY = "xlafuse_lock"

Pairs = tuple[tuple[str, str], ...]


@dataclass(frozen=True, kw_only=True)
class Lock:
    """The counted numbers of a known state of a program."""

    label: str
    target: str
    mode: str
    launches: int
    hbm_bytes: int
    versions: Pairs = ()
    options: Pairs = ()
    """XLA's compiler options."""


@dataclass(frozen=True, kw_only=True)
class Excess:
    """A limit that a program exceeds."""

    quantity: Literal["launches", "HBM bytes"]
    found: int
    limit: int
    origin: str
    """Where the limit comes from, e.g. '--max-launches' or the name of a baseline."""


def excesses(
    analysis: Analysis,
    *,
    max_launches: int | None = None,
    max_hbm_bytes: int | None = None,
    origins: tuple[str, str] = ("max_launches", "max_hbm_bytes"),
) -> tuple[Excess, ...]:
    """Returns the limits that the program exceeds.

    Args:
        analysis: the program.
        max_launches: the most launches of one run; None for no limit.
        max_hbm_bytes: the most bytes read and written in one run; None for no limit.
        origins: where the two limits come from.
    """
    found: list[Excess] = []
    launches, moved = analysis.launch_count, analysis.traffic.bytes
    if max_launches is not None and launches > max_launches:
        found.append(Excess(quantity="launches", found=launches, limit=max_launches, origin=origins[0]))
    if max_hbm_bytes is not None and moved > max_hbm_bytes:
        found.append(Excess(quantity="HBM bytes", found=moved, limit=max_hbm_bytes, origin=origins[1]))
    return tuple(found)


def responsible(
    analysis: Analysis, excess: Excess, among: Sequence[int] | None = None
) -> tuple[tuple[Launch, str], ...]:
    """Returns the launches responsible for an excess, each with the reason why it is a separate launch.

    For launches they are in program order, for bytes the largest traffic comes first.

    Args:
        analysis: the program.
        excess: one of `excesses`.
        among: indices of the launches to consider; None for all.
    """
    reasons: dict[int, str] = {}
    for edge in edges_of(analysis):  # the costliest edge comes first
        reasons.setdefault(edge.consumer, f"apart from #{edge.producer}: {apart_because(edge)}")
    chosen = [analysis.launches[index] for index in sorted(set(among))] if among else list(analysis.launches)
    if excess.quantity == "HBM bytes":
        chosen.sort(key=lambda launch: -(launch.bytes_read + launch.bytes_written) * launch.repeat)
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
        versions=made.versions,
        options=made.compiler_options,
    )


def lock_to_json(lock: Lock) -> str:
    """Formats a lock as indented JSON."""
    data = {_KEY: LOCK_VERSION, **asdict(lock), "versions": dict(lock.versions), "options": dict(lock.options)}
    return json.dumps(data, indent=1) + "\n"


def is_lock(text: str) -> bool:
    """Whether the text is a lock, of any version."""
    try:
        data = json.loads(text)
    except ValueError:
        return False
    return isinstance(data, dict) and _KEY in data


def lock_from_json(text: str) -> Lock:
    """Reads a lock that `lock_to_json` wrote.

    Raises:
        DumpError: the text is not a lock, or one of another version.
    """
    data = json.loads(text) if is_lock(text) else {}
    if data.get(_KEY) != LOCK_VERSION:
        raise DumpError(f"expected a lock of version {LOCK_VERSION} ({_KEY!r}); write it again")
    try:
        lock = Lock(
            label=data["label"],
            target=data["target"],
            mode=data["mode"],
            launches=data["launches"],
            hbm_bytes=data["hbm_bytes"],
            versions=tuple(data["versions"].items()),
            options=tuple(data["options"].items()),
        )
    except (KeyError, AttributeError) as error:
        raise DumpError(f"not a lock, or one that was edited: {error!r}; write it again") from error
    if type(lock.launches) is not int or type(lock.hbm_bytes) is not int:
        raise DumpError(f"not a lock: expected whole numbers, got {lock.launches!r} and {lock.hbm_bytes!r}")
    return lock


def differences_in_making(before: Lock, after: Lock) -> list[str]:
    """Lists the differences in how two states were made, in sentences: target, mode, XLA's options, versions."""
    said = [
        f"{name}: {one} before, {other} now"
        for name, one, other in (("target", before.target, after.target), ("mode", before.mode, after.mode))
        if one != other
    ]
    said += _differing("option", before.options, after.options, "not set")
    if before.versions and after.versions:  # a dump states no versions
        said += _differing("version of", before.versions, after.versions, "not installed")
    return said


def _differing(kind: str, before: Pairs, after: Pairs, absent: str) -> list[str]:
    old, new = dict(before), dict(after)
    return [
        f"{kind} {name}: {old.get(name, absent)} before, {new.get(name, absent)} now"
        for name in dict.fromkeys((*old, *new))
        if old.get(name) != new.get(name)
    ]
