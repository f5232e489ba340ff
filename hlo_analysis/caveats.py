"""What a report should say of a program beside its numbers, in sentences."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence

from hlo_analysis.catalogue import Catalogue
from hlo_analysis.patterns.launch_patterns import calls_python
from hlo_analysis.program.facts import LaunchRow
from hlo_analysis.program.launch_kinds import EMITTERS
from hlo_analysis.records import OPAQUE_KINDS, MissedFusion

_LARGE_PRODUCT = 10**9
"""FLOPs from which a product belongs on the matrix units: below, XLA's loops may well be the better choice."""

_OPAQUE_NAMES = {"mosaic": "Mosaic GPU", "jax_triton": "Triton", "custom_call": "custom-call"}

# From so many launches alike, and from such a part of the program's time, arrays are better kept as one.
_MANY = 8
_PART = 0.05


def notes_of(launches: Sequence[LaunchRow], outputs: Collection[str]) -> Iterator[str]:
    """The sentences, in order.

    Args:
        launches: the launch table.
        outputs: names of the values that the program returns.
    """
    yield from _slow_products(launches)
    yield from _opaque_kernels(launches)
    yield from _small_updates(launches, outputs)
    yield from _offloading(launches)
    yield from _callbacks(launches)


def kernels_elsewhere(
    missed: Sequence[MissedFusion], compute_capability: tuple[int, int], catalogue: Catalogue
) -> Iterator[str]:
    """Yields a note on remedies that name kernels for another GPU; a capability of 0 is not known."""
    named = {found.remedy.partition(":")[0] for found in missed}
    major = compute_capability[0]
    others = [kernel for kernel in catalogue if kernel.name in named and kernel.compute_capabilities]
    others = [kernel for kernel in others if major not in (0, *kernel.compute_capabilities)]
    if others:
        made_for = sorted({f"{capability}.x" for kernel in others for capability in kernel.compute_capabilities})
        yield (
            f"The remedies {', '.join(sorted({kernel.name for kernel in others}))} name kernels for GPUs of compute "
            f"capability {' and '.join(made_for)}; this one has {major}.{compute_capability[1]}, where the same "
            "functions may fall back to XLA."
        )


def _slow_products(launches: Sequence[LaunchRow]) -> Iterator[str]:
    """A note on products that XLA left to its loop emitter, one thread an element.

    On an H200's peaks that is fifteen times slower: 66.9 against 989 TFLOP/s.
    """
    slow = [
        launch.name
        for launch in launches
        if launch.kind in EMITTERS
        and launch.flops >= _LARGE_PRODUCT
        and {"dot", "convolution"} & dict(launch.opcodes).keys()
    ]
    if slow:
        yield (
            f"Matrix products without matrix units: {', '.join(slow)}. XLA's default gives them to its loop emitter, "
            "one thread an element of the result; with autotuning (an attached GPU, or a recording of one) it times "
            "the alternatives first."
        )


def _opaque_kernels(launches: Sequence[LaunchRow]) -> Iterator[str]:
    """A note on kernels that are not XLA's and so show their operands and results alone."""
    unknown = [launch for launch in launches if launch.kind in OPAQUE_KINDS and not launch.flops]
    opaque = {launch.kind for launch in unknown if not calls_python(launch)}
    if opaque:
        names = sorted(_OPAQUE_NAMES.get(kind, kind) for kind in opaque)
        yield (
            f"What happens inside {' and '.join(names)} kernels is not known, but for products that a program states "
            "beside them: no other FLOPs are counted, and their traffic unfused is that of the kernel."
        )


def _small_updates(launches: Sequence[LaunchRow], outputs: Collection[str]) -> Iterator[str]:
    """A note on arrays that are updated apart, each in the time that a launch takes, as biases by an optimizer."""
    alike: dict[tuple, list[LaunchRow]] = defaultdict(list)
    for launch in launches:
        arguments = [value for value in launch.inputs if value.producer is None]
        updates = bool(launch.outputs) and all(value.name in outputs for value in launch.outputs)
        if (
            launch.limiter == "overhead"
            and launch.kind == "loop"
            and updates
            and 2 * len(arguments) >= len(launch.inputs)
        ):
            alike[launch.opcodes].append(launch)
    total = sum(launch.roofline_us * launch.repeat for launch in launches)
    for found in alike.values():
        time = sum(launch.roofline_us * launch.repeat for launch in found)
        if len(found) >= _MANY and time >= _PART * total:
            yield (
                f"{len(found)} launches update small arrays alike, each in the time that a launch takes: {time:.0f} of "
                f"{total:.0f} µs, estimated. Kept as one flat array (as optax.flatten keeps an optimizer's), they "
                "are one launch."
            )


def _offloading(launches: Sequence[LaunchRow]) -> Iterator[str]:
    """A note on what goes over the host's bus, an order of magnitude slower than HBM and mostly beside other work."""
    moves = [launch for launch in launches if launch.host_bytes]
    if moves:
        count = sum(launch.repeat for launch in moves)
        moved = sum(launch.host_bytes * launch.repeat for launch in moves)
        yield (
            f"{count} launches move {moved / 1e6:.3g} MB between the GPU's memory and the host's: counted apart from "
            "HBM traffic, and the roofline has no time for the bus between them."
        )


def _callbacks(launches: Sequence[LaunchRow]) -> Iterator[str]:
    """A note on calls back to Python, for which all that follows waits."""
    if calls := [launch for launch in launches if calls_python(launch)]:
        count = sum(launch.repeat for launch in calls)
        where = ", ".join(dict.fromkeys(launch.source or launch.name for launch in calls))
        yield (
            f"The program calls back to Python on the host, {_times(count)} in a run ({where}), and waits for it: the "
            "roofline does not count that, and what is handed to Python and back is fused with nothing."
        )


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"
