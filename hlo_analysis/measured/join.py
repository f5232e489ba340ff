"""Joins a profile to the launch table: finds, call by call, which kernel belongs to which launch.

The kernels of a call come in launch order. A launch with a known kernel name must be where the table has it. Kernels
between two such launches belong to the library calls between them, each of which may run several kernels. Copies that
the profile names and collectives may run beside the kernels: copies are found by name, collectives by their order.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from statistics import median

from hlo_analysis.errors import DumpError
from hlo_analysis.hotspots.times import timed
from hlo_analysis.measured.profile import UNNAMED_GPU, KernelEvent, Profile
from hlo_analysis.records import Analysis, Launch, LaunchKind, LaunchTime, Measured

_ALWAYS_RUN: frozenset[LaunchKind] = frozenset({"cublas", "cublaslt", "cudnn", "mosaic", "jax_triton"})
"""Kinds of launches without a known kernel name that run at least one kernel; a custom call may run none."""
_MOST_KERNELS = 8
"""The most kernels of one library call; more kernels with unknown names belong to another program."""
_COMPILERS = ("jaxlib", "jax-cuda12-plugin", "jax-cuda13-plugin", "jax-cuda12-pjrt", "jax-cuda13-pjrt")
"""Packages whose version decides what XLA compiles."""
_COPY = "MemcpyD2D"
_NCCL = "nccl"
_UNKNOWN_COLLECTIVES = (
    "The profile shows {} kernels of collectives in {} calls of {}: their times are not known, and not in the total."
)
_OF_THE_HOST = ("MemcpyH2D", "MemcpyD2H")


class ProfileMismatchError(DumpError):
    """The profile or an earlier measurement belongs to another program than the analysis."""


@dataclass(frozen=True, kw_only=True)
class _Slot:
    """A launch whose kernel name is known, or the consecutive library calls between two such launches."""

    launches: tuple[Launch, ...]
    is_named: bool

    def begins(self, event: KernelEvent, operations: frozenset[str]) -> bool:
        """Whether the event can be the first of this slot."""
        if event.operation in operations:
            return any(event.operation == launch.name for launch in self.launches)
        return not self.is_named or event.name == self.launches[0].kernel


_Failure = tuple[int, KernelEvent | None]
"""The slots that an attempt to read one call matched, and the event found in place of the next slot."""
_Call = list[tuple[Launch, tuple[KernelEvent, ...] | None]]
"""A call's launches with their events; None where they cannot be told from those of the neighbouring launch."""


def join(analysis: Analysis, *profiles: Profile, source: str = "profile") -> Measured:
    """Finds the calls of the program in the profiles, one a GPU, and returns the median time of each launch.

    Calls that a profile shows only in part are ignored, as are kernels of other programs between calls. Of several GPUs
    the times are those of the slowest, which has most work beside collectives. Collectives take their time on the GPU
    where they are shortest: on others they also wait for it.

    Raises:
      ProfileMismatchError: no profile shows a whole call of this program; says which launch differs first.
    """
    found: list[Measured] = []
    reasons: list[ProfileMismatchError] = []
    for profile in profiles:
        try:
            found.append(_join(analysis, profile, source))
        except ProfileMismatchError as error:
            reasons.append(error)
    if not found:
        raise reasons[0]
    collectives = {launch.index for launch in analysis.launches if launch.kind == "collective"}

    def worked_us(measured: Measured) -> float:
        own = (time for time in measured.launches if time.launch not in collectives)
        return sum((time.median_us or 0.0) * analysis.launches[time.launch].repeat for time in own)

    slowest = max(found, key=worked_us)
    launches = (
        min(times, key=lambda time: inf if time.median_us is None else time.median_us)
        if own.launch in collectives
        else own
        for own, *times in zip(slowest.launches, *(each.launches for each in found), strict=True)
    )
    return replace(slowest, launches=tuple(launches))


def _join(analysis: Analysis, profile: Profile, source: str) -> Measured:
    events = _own_events(analysis, profile)
    copied = {event.operation for event in events if event.name == _COPY}
    copies = {each.name: each for each in analysis.launches if each.kind == "copy" and each.name in copied}
    order = run_order(analysis.launches)
    collectives = [launch for launch in order if launch.kind == "collective"]
    slots = _slots([launch for launch in order if launch.name not in copies and launch.kind != "collective"])
    if not slots:
        raise ProfileMismatchError(f"{analysis.label} launches nothing that a profile could show")
    operations = frozenset(launch.name for launch in analysis.launches)
    sent = [event for event in events if event.name.startswith(_NCCL)]
    events = [event for event in events if not event.name.startswith(_NCCL)]
    in_order = [event for event in events if event.name != _COPY or event.operation not in copies]
    calls = _with_copies(_calls(slots, in_order, operations), events, copies)
    calls = _with_collectives(calls, sent, collectives)
    is_known = len(sent) == len(collectives) * len(calls)
    samples: dict[int, list[float]] = {}
    kernels: dict[int, tuple[str, ...]] = {}
    totals: list[float] = []
    gaps: list[float] = []
    for call, events in calls:
        for launch, own in call:
            kernels[launch.index] = tuple(event.name for event in own or ())
            if own:
                samples.setdefault(launch.index, []).append(sum(event.duration_us for event in own))
        others = [event for event in events if not event.name.startswith(_NCCL)]
        alone = _busy_us(events) - _busy_us(others)  # collectives beside no other work
        totals.append(sum(event.duration_us for event in others) + alone)
        gaps.append(_idle_us(events))
    return Measured(
        device=profile.device,
        source=source,
        calls=len(calls),
        kernel_us=median(totals),
        gap_us=median(gaps),
        launches=tuple(
            LaunchTime(
                launch=index,
                name=analysis.launches[index].name,
                kernels=names,
                median_us=median(samples[index]) if index in samples else None,
                samples=len(samples.get(index, ())),
            )
            for index, names in sorted(kernels.items())
        ),
        notes=() if is_known else (_UNKNOWN_COLLECTIVES.format(len(sent), len(calls), len(collectives)),),
    )


def _with_collectives(
    calls: Sequence[tuple[_Call, Sequence[KernelEvent]]], sent: Sequence[KernelEvent], launches: Sequence[Launch]
) -> list[tuple[_Call, Sequence[KernelEvent]]]:
    """Returns the calls with their collectives, whose kernels run beside the others and come in launch order."""
    found: list[tuple[_Call, Sequence[KernelEvent]]] = []
    is_known = len(sent) == len(launches) * len(calls)
    for i, (call, events) in enumerate(calls):
        own = sent[i * len(launches) : (i + 1) * len(launches)] if is_known else ()
        timed = [(launch, (own[k],) if is_known else None) for k, launch in enumerate(launches)]
        found.append((call + timed, sorted((*events, *own), key=lambda event: event.start_us)))
    return found


def _with_copies(
    calls: Sequence[tuple[_Call, Sequence[KernelEvent]]], events: Sequence[KernelEvent], copies: Mapping[str, Launch]
) -> list[tuple[_Call, Sequence[KernelEvent]]]:
    """Returns the calls with the named copies among the events: those that begin before what follows the call."""
    named = [event for event in events if event.name == _COPY and event.operation in copies]
    starts = [event.start_us for event in events if event.name != _COPY or event.operation not in copies]
    found: list[tuple[_Call, Sequence[KernelEvent]]] = []
    for call, own in calls:
        after = bisect_right(starts, own[-1].start_us)
        end = starts[after] if after < len(starts) else inf
        beside = [event for event in named if own[0].start_us <= event.start_us < end]
        copied: _Call = [(copies[event.operation], (event,)) for event in beside]
        found.append((call + copied, sorted((*own, *beside), key=lambda event: event.start_us)))
    return found


def _busy_us(events: Sequence[KernelEvent]) -> float:
    """Returns the time with a running kernel."""
    return max(event.start_us + event.duration_us for event in events) - events[0].start_us - _idle_us(events)


def _idle_us(events: Sequence[KernelEvent]) -> float:
    """Returns the time without a running kernel between the first and the last; kernels may overlap."""
    idle, end = 0.0, events[0].start_us
    for event in events:
        idle += max(0.0, event.start_us - end)
        end = max(end, event.start_us + event.duration_us)
    return idle


def with_measured(analysis: Analysis, measured: Measured) -> Analysis:
    """Returns the analysis with the measured times added, to itself and to its launches.

    Of a run on another GPU or of another version only the totals are added, with `Measured.differs` and a note.

    Raises:
      ProfileMismatchError: another program was measured; says which launch differs first.
    """
    if measured.launches:
        _check(analysis, measured)
    measured = _on_equal_terms(analysis, measured)
    times = {time.launch: time.median_us for time in measured.launches}
    launches = tuple(replace(launch, measured_us=times.get(launch.index)) for launch in analysis.launches)
    hotspots = timed(analysis.hotspots, launches, analysis.missed)
    return replace(analysis, launches=launches, hotspots=hotspots, measured=measured)


def _on_equal_terms(analysis: Analysis, measured: Measured) -> Measured:
    """Returns the measurement with `differs`, and without times of launches, if another GPU or version was measured."""
    if measured.differs:
        return measured
    gpu, ran = analysis.device.description, dict(measured.environment)
    is_known = gpu.startswith("NVIDIA") and measured.device != UNNAMED_GPU
    if is_known and not gpu.startswith(measured.device):
        note = f"Measured on an {measured.device}; this program is compiled for an {gpu}."
        return replace(measured, differs="another GPU", launches=(), notes=(*measured.notes, note))
    for name, version in analysis.provenance.versions:
        if name in _COMPILERS and ran.get(name, version) != version:
            note = f"Measured with {name} {ran[name]}; this program is compiled with {version}."
            return replace(measured, differs="another version", launches=(), notes=(*measured.notes, note))
    return measured


def _check(analysis: Analysis, measured: Measured) -> None:
    ran = [launch for launch in analysis.launches if launch.repeat]
    for launch, time in zip(ran, measured.launches, strict=False):
        if launch.index != time.launch or not _is_same(launch, time):
            there = f"{time.name} ({', '.join(time.kernels) or 'no kernel'})"
            raise ProfileMismatchError(
                f"measured of another program than {analysis.label}: launch {launch.index} is {launch.name} "
                f"({launch.kernel or launch.kind}) here, and there {there}"
            )
    if len(ran) != len(measured.launches):
        raise ProfileMismatchError(
            f"measured of another program than {analysis.label}: it has {len(ran)} launches, and the measured one "
            f"{len(measured.launches)}"
        )


def _is_same(launch: Launch, time: LaunchTime) -> bool:
    return launch.name == time.name if launch.kernel is None else time.kernels == (launch.kernel,)


def run_order(launches: Sequence[Launch], level: int = 1) -> list[Launch]:
    """Returns the launches of one run in execution order; those of a loop's body appear once per iteration."""
    launches = [launch for launch in launches if launch.repeat]
    order: list[Launch] = []
    at = 0
    while at < len(launches):
        if launches[at].repeat == level:
            order.append(launches[at])
            at += 1
            continue
        end, trips = _loop_end(launches, at, level)
        order += run_order(launches[at:end], trips) * (trips // level)
        at = end
    return order


def _loop_end(launches: Sequence[Launch], at: int, level: int) -> tuple[int, int]:
    """Returns where the loop body ends that begins at a launch, and how often one run executes that body."""
    end = next((i for i in range(at, len(launches)) if launches[i].repeat <= level), len(launches))
    trips = min(launch.repeat for launch in launches[at:end])
    if launches[at].repeat % trips:  # a launch with fewer trips belongs to another loop right after this one
        trips = launches[at].repeat
    home = None
    for i in range(at, end):
        launch = launches[i]
        if launch.repeat % trips or (launch.repeat == trips and home not in (None, launch.computation)):
            return i, trips
        if launch.repeat == trips:
            home = launch.computation
    return end, trips


def _slots(order: Sequence[Launch]) -> list[_Slot]:
    slots: list[_Slot] = []
    for launch in order:
        if launch.kernel is None and slots and not slots[-1].is_named:
            slots[-1] = replace(slots[-1], launches=(*slots[-1].launches, launch))
        else:
            slots.append(_Slot(launches=(launch,), is_named=launch.kernel is not None))
    return slots


def _own_events(analysis: Analysis, profile: Profile) -> list[KernelEvent]:
    """Returns the events of the program that matches the analysis best, and those without a known program."""
    known = {launch.kernel for launch in analysis.launches} | {launch.name for launch in analysis.launches}
    events = [event for event in profile.events if event.operation or event.name not in _OF_THE_HOST]
    alike = Counter(event.module for event in events if event.name in known or event.operation in known)
    modules = Counter(event.module for event in events)
    own = max((name for name in modules if name), key=lambda name: (alike[name], modules[name]), default="")
    return [event for event in events if event.module in ("", own)]


def _calls(
    slots: Sequence[_Slot], events: Sequence[KernelEvent], operations: frozenset[str]
) -> list[tuple[_Call, Sequence[KernelEvent]]]:
    """Returns each whole call with all its events; at least one."""
    furthest: _Failure = (-1, None)
    found: list[tuple[_Call, Sequence[KernelEvent]]] = []
    at = 0
    while at < len(events):
        call, end, failure = _read_call(slots, events, at, operations)
        if failure is None:
            found.append((call, events[at:end]))
            at = end
        else:
            furthest = max(furthest, failure, key=lambda each: each[0])
            at += 1
    if not found:
        raise ProfileMismatchError(_difference(slots, *furthest))
    return found


def _difference(slots: Sequence[_Slot], slot: int, event: KernelEvent | None) -> str:
    launch = slots[max(0, slot)].launches[0]
    expected = f"launch {launch.index}, {launch.name} ({launch.kernel or launch.kind})"
    if event is None:
        return f"the profile shows no whole call of the program: it ends before {expected}"
    shown = f"{event.name} ({event.operation})" if event.operation else event.name
    return f"the profile is of another program: where this one has {expected}, the profile shows {shown}"


def _read_call(
    slots: Sequence[_Slot], events: Sequence[KernelEvent], at: int, operations: frozenset[str]
) -> tuple[_Call, int, _Failure | None]:
    """Reads the call that begins at an event.

    Returns its launches and where it ends; or, if it is not a whole call, where the attempt failed.
    """
    call: _Call = []
    usual = at  # where the next slot begins if each library call ran one kernel
    for number, slot in enumerate(slots):
        if not slot.is_named:
            end = _library_end(slots, number, events, at, operations)
        else:
            end = at + (at < len(events) and slot.begins(events[at], operations))
        shared = _share(slot.launches, events[at:end])
        if shared is None:
            place = min(at, usual)
            return call, at, (number, events[place] if place < len(events) else None)
        call += shared
        usual = at + len(slot.launches)
        at = end
    return call, at, None


def _library_end(
    slots: Sequence[_Slot], number: int, events: Sequence[KernelEvent], at: int, operations: frozenset[str]
) -> int:
    """Returns where the library calls of a slot end: before the next known kernel, which may start the next call."""
    slot = slots[number]
    following = slots[(number + 1) % len(slots)]
    end = at
    while end < min(len(events), at + _MOST_KERNELS * len(slot.launches)) and slot.begins(events[end], operations):
        if following.is_named and following.begins(events[end], operations):
            break
        if not following.is_named and end - at == len(slot.launches):
            break  # only library calls, or library calls at both ends of the program: one kernel each
        end += 1
    return end


def _share(launches: Sequence[Launch], events: Sequence[KernelEvent]) -> _Call | None:
    """Assigns consecutive events to the launches that ran them; returns None if there are too few events."""
    running = [launch for launch in launches if launch.kernel is not None or launch.kind in _ALWAYS_RUN]
    if len(events) < len(running):
        return None
    if len(launches) == 1:
        return [(launches[0], tuple(events))]
    names = [launch.name for launch in launches]
    if len(set(names)) == len(names) and all(event.operation in names for event in events):
        return [(each, tuple(event for event in events if event.operation == each.name)) for each in launches]
    groups = _groups(events)
    timed = launches if len(groups) == len(launches) else running
    if len(groups) != len(timed):  # some ran several kernels, and the profile does not say which
        return [(launch, None) for launch in launches]
    own = {launch.index: group for launch, group in zip(timed, groups, strict=True)}
    return [(launch, own.get(launch.index, ())) for launch in launches]


def _groups(events: Sequence[KernelEvent]) -> list[tuple[KernelEvent, ...]]:
    """Splits consecutive events of library calls by call: in a command buffer each call first clears its workspace."""
    if not events[0].name.startswith("Memset"):
        return [(event,) for event in events]
    groups: list[tuple[KernelEvent, ...]] = []
    for event in events:
        if event.name.startswith("Memset"):
            groups.append((event,))
        else:
            groups[-1] = (*groups[-1], event)
    return groups
