"""Writes the notes that a report shows beside a program's numbers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

from hlo_analysis.patterns.launch_patterns import calls_python, has, only_moves, shape_of
from hlo_analysis.program.facts import LaunchRow
from hlo_analysis.records import OPAQUE_KINDS, Device, Value
from hlo_analysis.rules import gather

_OPAQUE_NAMES = {"mosaic": "Mosaic GPU", "jax_triton": "Triton", "custom_call": "custom-call"}

_NAMED = 5
"""The most spilling kernels that a note names."""


def notes_of(launches: Sequence[LaunchRow], device: Device) -> Iterator[str]:
    """Yields the notes in order.

    Args:
        launches: the launch table.
        device: what it was compiled for.
    """
    if device.is_cpu:
        yield "The program was compiled for a CPU: missed fusions and remedies are known for GPUs, and none is listed."
        yield from gather(_callbacks, launches)
        return
    yield from gather(_opaque_kernels, launches)
    yield from gather(_spills, launches)
    yield from gather(_offloading, launches)
    yield from gather(_links, launches)
    yield from gather(_gathered, launches)


def _opaque_kernels(launches: Sequence[LaunchRow]) -> Iterator[str]:
    """Notes kernels that are not XLA's, of which only operands and results are visible."""
    unknown = [launch for launch in launches if launch.kind in OPAQUE_KINDS and not launch.flops]
    opaque = {launch.kind for launch in unknown if not calls_python(launch)}
    if opaque:
        names = sorted(_OPAQUE_NAMES.get(kind, kind) for kind in opaque)
        yield (
            f"What happens inside {' and '.join(names)} kernels is not known. Their FLOPs count only if the program "
            "states them, and their unfused traffic is that of the kernel."
        )


def _spills(launches: Sequence[LaunchRow]) -> Iterator[str]:
    """Notes the kernels that spill registers, those that spill most first."""
    spilling = {launch.kernel or launch.name: launch.spill_bytes for launch in launches if launch.spill_bytes}
    if spilling:
        ranked = sorted(spilling.items(), key=lambda entry: -entry[1])
        named = ", ".join(f"{name} ({size} bytes a thread)" for name, size in ranked[:_NAMED])
        rest = f" and {len(ranked) - _NAMED} more" if len(ranked) > _NAMED else ""
        yield f"Kernels that spill registers to memory: {named}{rest}."


def _offloading(launches: Sequence[LaunchRow]) -> Iterator[str]:
    """Notes transfers over the host's bus, which is ten times slower than HBM and mostly overlaps other work."""
    moves = [launch for launch in launches if launch.host_bytes]
    if moves:
        count = sum(launch.repeat for launch in moves)
        moved = sum(launch.host_bytes * launch.repeat for launch in moves)
        yield (
            f"{count} launches move {moved / 1e6:.3g} MB between the GPU's memory and the host's: counted apart from "
            "HBM traffic, and the roofline has no time for the bus between them."
        )


def _callbacks(launches: Sequence[LaunchRow]) -> Iterator[str]:
    """Notes calls back to Python, which all following work waits for."""
    if calls := [launch for launch in launches if calls_python(launch)]:
        count = sum(launch.repeat for launch in calls)
        times = "once" if count == 1 else f"{count} times"
        where = ", ".join(dict.fromkeys(launch.source or launch.name for launch in calls))
        yield (
            f"The program calls back to Python on the host, {times} in a run ({where}), and waits for it. The "
            "roofline does not count the wait, and values passed to Python and back cannot be fused."
        )


def _links(launches: Sequence[LaunchRow]) -> Iterator[str]:
    """Notes what collectives send over each of the mesh's axes, and the time that nothing hides."""
    by_axes: dict[str, list[LaunchRow]] = defaultdict(list)
    for launch in launches:
        if launch.kind == "collective":
            by_axes[" and ".join(repr(name) for name, _ in launch.axes)].append(launch)
    for axes, found in by_axes.items():
        count = sum(launch.repeat for launch in found)
        sent = sum(launch.link_bytes * launch.repeat for launch in found)
        taken = sum(launch.estimated_us * launch.repeat for launch in found)
        left = sum((launch.exposed_us or 0.0) * launch.repeat for launch in found)
        over = f" over the mesh axis {axes}" if axes else ""
        yield (
            f"{count} collective{'s' * (count != 1)}{over}: {sent / 1e6:.3g} MB sent by each GPU in {taken:.0f} µs, "
            f"{left:.0f} of them beside no other work; estimated, as XLA schedules them."
        )


def _gathered(launches: Sequence[LaunchRow]) -> Iterator[str]:
    """Notes kernels around which XLA gathers whole arrays: all that they read comes from other GPUs' parts."""
    for launch in launches:
        if launch.kind not in OPAQUE_KINDS:
            continue
        # Vectors, such as a norm's scale, say nothing of how a kernel is cut.
        matrices = [value for value in launch.inputs if sum(size > 1 for size in shape_of(value.shape).dimensions) > 1]
        gathers = [_gather_of(launches, value) for value in matrices]
        if gathers and all(gathers):
            axes = " and ".join(dict.fromkeys(repr(name) for each in gathers if each for name, _ in each.axes))
            where = f" over the mesh axis {axes}" if axes else ""
            yield (
                f"{launch.name}{launch.scope and f' ({launch.scope})'} reads nothing but whole arrays, which XLA "
                f"gathers{where}: its GPUs all do the same work. Call the kernel inside jax.shard_map, or cut what it "
                "allows to be cut."
            )


def _gather_of(launches: Sequence[LaunchRow], value: Value) -> LaunchRow | None:
    """Returns the all-gather that a value comes from, itself or moved once."""
    for _ in range(2):
        if value.producer is None:
            return None
        made = launches[value.producer]
        if has(made, "all-gather"):
            return made
        if not only_moves(made) or not made.inputs:
            return None
        value = made.inputs[0]
    return None
