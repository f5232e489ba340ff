"""Finds the edits of a user's files that put operations at sites of `xlafuse.fuse`, and checks them by tracing."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax

from xlafuse.cli.edits import Edit, Finder, edited
from xlafuse.cli.fingerprints import Numbering
from xlafuse.cli.probes import Source, marking
from xlafuse.cli.rerun import rerun
from xlafuse.fusion.evaluate import evaluate
from xlafuse.fusion.plan import Plan
from xlafuse.fusion.site import Site


@dataclass(frozen=True, kw_only=True)
class Program:
    """A function that was traced. trace: imports its files again, and traces it in the same way."""

    closed: Any
    structs: Sequence[Any]
    plan: Plan
    trace: Callable[[], Any]


def checked_edits(program: Program, files: Collection[str]) -> tuple[dict[Site, Edit], dict[str, str]]:
    """Finds edits of the files that give the fused program, and none besides its calls.

    Each edit is applied to the files in memory, and the function is traced again from them.

    Returns:
        The sites that have one, and a unified diff of each file that all of them together change.
    """
    sources = {source.file: source for file in files if (source := Source.of(file)) is not None}
    numbering = Numbering()
    original = numbering.read(program.closed)
    with marking() as marked:
        trace = rerun({file: source.probed() for file, source in sources.items()}, program.trace)
    if trace is None or not sources:
        return {}, {}
    read = numbering.read(trace)
    if read.outputs != original.outputs:  # the program is another one each time
        return {}, {}
    finder = Finder(numbering=numbering, sources=sources, marked=marked, trace=read)
    edits = dict(finder.edits(program.plan, numbering.inputs(program.closed)))

    def is_right(tried: Mapping[Site, Edit]) -> bool:
        found = _traced_again(program, sources, set(tried.values()))
        return found is not None and numbering.read(found).is_edit(
            numbering.read(_fused(program, tried.keys())), original
        )

    taken = {site: own[0] for site, own in edits.items() if own}
    if taken and not is_right(taken):
        taken = {}
        for site, own in edits.items():
            if site not in taken:
                left = {other: each for other, each in edits.items() if other not in taken}
                tries = ({**taken, **{other: edit for other, each in left.items() if edit in each}} for edit in own)
                taken = next((tried for tried in tries if is_right(tried)), taken)
    return taken, {file: _diff(source, taken.values()) for file, source in sources.items()}


def _traced_again(program: Program, sources: Mapping[str, Source], edits: Collection[Edit]) -> Any:
    """Returns the jaxpr of the edited program; None where it is no program."""
    try:
        codes = {
            file: compile(edited(sources[file], [each for each in edits if each.file == file]), file, "exec")
            for file in {each.file for each in edits}
        }
    except (SyntaxError, ValueError):
        return None
    return rerun(codes, program.trace)


def _fused(program: Program, sites: Collection[Site]) -> Any:
    """Returns the jaxpr of the program with calls at these sites alone."""
    plan = _only(program.plan, sites)
    return jax.make_jaxpr(lambda *arrays: evaluate(plan, [*program.closed.consts, *arrays]))(*program.structs)


def _only(plan: Plan, sites: Collection[Site]) -> Plan:
    # In source the readers of a norm's input read that; the plan gives them the call's own copy.
    own = tuple(replace(site, stream=None) for site in plan.sites if site in sites)
    inner = {
        equation: {name: tuple(_only(each, sites) for each in plans) for name, plans in bodies.items()}
        for equation, bodies in plan.inner.items()
    }
    return replace(plan, sites=own, inner=inner)


def _diff(source: Source, edits: Iterable[Edit]) -> str:
    own = [each for each in dict.fromkeys(edits) if each.file == source.file]
    before, after = source.data.decode(), edited(source, own).decode()
    path = Path(source.file)
    name = path.relative_to(Path.cwd()).as_posix() if path.is_relative_to(Path.cwd()) else source.file
    lines = difflib.unified_diff(before.splitlines(), after.splitlines(), name, name, n=3, lineterm="")
    return "\n".join(lines)
