"""`xlafuse tune`: fills a tuned table from measurements on the attached GPU.

Every bench shape of an operation whose table dispatch reads (`OpSpec.problem`) is timed as the kernel benchmark does
it, with all configurations in turns; what does not compile, spills registers, has its products serialized by ptxas or
is wrong has dropped out before. The table is written after every shape, so that a run cut short keeps what it has, and
the next one goes on from there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from pallas_kernels import REGISTRY, OpSpec, tuning
from pallas_kernels.specs import plain
from pallas_kernels.tuning import Choice
from xlafuse.bench import supervisor
from xlafuse.bench.kernels import Settings, is_wanted
from xlafuse.bench.results import PHASES, Results, ShapeResult, merge
from xlafuse.errors import XlafuseError

_GAIN = 0.01
"""By which a kernel must be ahead of XLA, and a configuration of the untuned one, to be taken: runs differ by less."""
_VARIANT = "variant: "


class NothingToTuneError(XlafuseError, ValueError):
    """No shape is left to time, or an operation has no tuned table."""


def tunable() -> tuple[str, ...]:
    """The operations whose table dispatch reads."""
    return tuple(name for name, op in REGISTRY.items() if op.problem is not None)


def keys(op: OpSpec, phase: str = "forward") -> dict[str, str]:
    """The table's key of each bench shape; of shapes with one key, the first."""
    assert op.problem is not None
    found: dict[str, str] = {}
    for spec in op.tagged("bench"):
        found.setdefault(tuning.key_of(op.name, phase, op.problem(plain(spec.structs()))), spec.name)
    return {spec: key for key, spec in found.items()}


def entries(results: Results, operations: Sequence[str] | None = None) -> dict[str, Choice]:
    """The fastest choice of each measured shape (of some operations), by the table's keys."""
    found = {}
    for shape in results.shapes:
        op = REGISTRY.get(shape.op)
        if op is None or op.problem is None or (operations is not None and op.name not in operations):
            continue
        if shape.phase not in op.tuned_phases or shape.spec not in (known := keys(op, shape.phase)):
            continue
        if (chosen := choice(shape)) is not None:
            found[known[shape.spec]] = chosen
    return found


def choice(shape: ShapeResult) -> Choice | None:
    """The choice for one shape: XLA, unless a kernel is clearly faster; the untuned configuration, unless another is.

    None where XLA, or the untuned kernel and all others, were not timed.
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
    """Times the shapes that the table does not have yet (all with `anew`), phase by phase, and adds them.

    Args:
        operations: of `tunable`.
        settings: phases and variants are set here.
        table: the file of the tuned table; `device_kind` is the device's it is of.
        log: the file of results, as of `xlafuse bench kernels`; that of a backward phase is named so.

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
    """An entry a line: what is taken, and how many times as fast as XLA it is."""
    text = []
    for key, each in found.items():
        taken = each.microseconds[each.variant or each.implementation]
        name = each.implementation if each.variant is None else f"{each.implementation}, {each.variant}"
        text.append(f"{key}: {name}, {taken:.1f} µs, {each.microseconds['xla'] / taken:.3f} × XLA")
    return text
