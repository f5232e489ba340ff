"""Implements `xlafuse tune`: fills a tuned table from measurements on the attached GPU.

It times every bench shape of each operation whose dispatch reads the table (`OpSpec.tuned_key`), with all
configurations in turns, as the kernel benchmark does. Configurations that do not compile or give wrong results are
dropped before. The table is written after every shape, so that an interrupted run keeps its results and the next run
continues there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from pallas_kernels import REGISTRY, OpSpec, tuning
from pallas_kernels.specs import plain
from pallas_kernels.tuning import Choice
from xlafuse.bench import supervisor
from xlafuse.bench.kernels import is_wanted
from xlafuse.bench.results import Results, ShapeResult, merge
from xlafuse.bench.settings import PHASES, Settings
from xlafuse.errors import XlafuseError

_GAIN = 0.01
"""Least gain for taking a kernel over XLA, or a configuration over the untuned one; runs differ by less."""
_VARIANT = "variant: "


class NothingToTuneError(XlafuseError, ValueError):
    """No shape is left to time, or an operation has no tuned table."""


def tunable() -> tuple[str, ...]:
    """Lists the operations whose dispatch reads the table."""
    return tuple(name for name, op in REGISTRY.items() if op.tuned_key is not None)


def keys(op: OpSpec, phase: str = "forward") -> dict[str, str]:
    """Returns the table's key of each bench shape; of shapes with the same key, only the first."""
    assert op.tuned_key is not None
    found: dict[str, str] = {}
    for spec in op.tagged("bench"):
        found.setdefault(tuning.key_of(op.name, phase, op.tuned_key(plain(spec.structs()))), spec.name)
    return {spec: key for key, spec in found.items()}


def entries(results: Results, operations: Sequence[str] | None = None) -> dict[str, Choice]:
    """Returns the fastest choice of each measured shape, by the table's keys; `operations` selects some."""
    found = {}
    for shape in results.shapes:
        op = REGISTRY.get(shape.op)
        if op is None or op.tuned_key is None or (operations is not None and op.name not in operations):
            continue
        if shape.phase not in op.tuned_phases or shape.spec not in (known := keys(op, shape.phase)):
            continue
        if (chosen := choice(shape)) is not None:
            found[known[shape.spec]] = chosen
    return found


def choice(shape: ShapeResult) -> Choice | None:
    """Chooses for one shape: XLA unless a kernel is clearly faster, the untuned configuration unless another is.

    Returns None if XLA, or every kernel, was not timed.
    """
    times = {
        c.name.removeprefix(_VARIANT): round(c.timing.median_us, 3)
        for c in (*shape.of_kind("implementation"), *shape.of_kind("variant"))
    }
    kernels = {name: us for name, us in times.items() if name != "xla"}
    if "xla" not in times or not kernels:
        return None
    fastest = min(kernels, key=lambda name: kernels[name])
    names = [c.name for c in shape.of_kind("implementation") if c.name != "xla"]
    untuned = min((n for n in names if n in kernels), key=lambda name: kernels[name], default=None)
    if untuned is not None and kernels[untuned] <= (1 + _GAIN) * kernels[fastest]:
        fastest = untuned
    if kernels[fastest] > (1 - _GAIN) * times["xla"]:
        return Choice(implementation="xla", variant=None, microseconds=times)
    if fastest in names:
        return Choice(implementation=fastest, variant=None, microseconds=times)
    return Choice(implementation="mosaic", variant=fastest, microseconds=times)


def run(
    operations: Sequence[str], settings: Settings, table: Path, log: Path, *, device_kind: str, anew: bool
) -> Results:
    """Times the shapes that the table lacks (all with `anew`), phase by phase, and adds them to the table.

    Args:
        operations: names from `tunable`.
        settings: `run` sets the phases and variants itself.
        table: file of the tuned table for the device `device_kind`.
        log: file of results, as `xlafuse bench kernels` writes it; a backward phase has its own file.

    Raises:
        NothingToTuneError: nothing is left to time.
        BenchError: nothing was measured.
    """
    known = {} if anew else tuning.read(table, device_kind)
    wanted: dict[str, dict[str, list[str]]] = {}
    for phase in PHASES:
        for name in operations:
            op = REGISTRY[name]
            named = keys(op, phase).items() if phase in op.tuned_phases else ()
            if left := [spec for spec, key in named if key not in known and is_wanted(spec, settings.match)]:
                wanted.setdefault(phase, {})[name] = left
    if not wanted:
        raise NothingToTuneError(f"{table} already has every such shape; `--anew` times them again.")

    def keep(results: Results) -> None:
        if found := entries(results):
            tuning.add(table, device_kind, found)

    parts = []
    for phase, left in wanted.items():
        specs = tuple(f"{name} {spec}" for name, names in left.items() for spec in names)
        own = replace(settings, phases=(phase,), variants=True, only=specs)
        written = log if phase == "forward" else log.with_name(f"{phase}-{log.name}")
        parts.append(supervisor.run(tuple(left), own, written, kept=keep))
    return merge(parts)


def lines(found: Mapping[str, Choice]) -> list[str]:
    """Formats one entry a line: the choice and its speed-up over XLA."""
    text = []
    for key, each in found.items():
        taken = each.microseconds[each.variant or each.implementation]
        name = each.implementation if each.variant is None else f"{each.implementation}, {each.variant}"
        text.append(f"{key}: {name}, {taken:.1f} µs, {each.microseconds['xla'] / taken:.3f} × XLA")
    return text
