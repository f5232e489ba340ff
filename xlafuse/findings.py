"""Finds what `fuse` takes of a function and what it does not, by source lines, for the analyzer's remedies."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, Literal

import jax

if TYPE_CHECKING:
    from hlo_analysis.targets import Target
    from xlafuse.fusion.plan import Plan
    from xlafuse.fusion.site import Site


@dataclass(frozen=True, kw_only=True)
class Finding:
    """A part of a program that is an operation, or nearly one.

    outcome: "left" where the operation itself runs by XLA. text: the call as code if it is taken, else the reason why
      not.
    lines: 'file.py:line' of each of its equations, innermost frames of the user.
    """

    operation: str
    outcome: Literal["taken", "left", "refused"]
    text: str
    lines: frozenset[str]

    @property
    def is_allowed(self) -> bool:
        """Returns whether `fuse` takes it with an allowance."""
        return self.outcome == "refused" and "; allow={" in self.text


def find(fn: Callable[..., Any], shapes: Sequence[Any], target: Target) -> tuple[Finding, ...] | None:
    """Traces a function for a target, and returns what `fuse` finds in it.

    Returns None where `fuse` does not search it: it is differentiated already, its arguments are sharded, or it cannot
    be traced without running it.
    """
    from xlafuse.fusion.api import is_differentiated
    from xlafuse.fusion.plan import make_plan

    if any(
        getattr(leaf, "sharding", None) and leaf.sharding.num_devices > 1 for leaf in jax.tree.leaves(tuple(shapes))
    ):
        return None
    flat, structs = over_arrays(fn, shapes)

    def search() -> tuple[Finding, ...] | None:
        try:
            closed = jax.make_jaxpr(flat)(*structs)
        except Exception:  # whatever the function raises: the capture has traced it in its own way
            return None
        if is_differentiated(closed.jaxpr):
            return None
        return tuple(_findings(make_plan(closed.jaxpr)))

    return traced_for(target, search)


def over_arrays(fn: Callable[..., Any], arguments: Sequence[Any]) -> tuple[Callable[..., list[Any]], list[Any]]:
    """Returns a function of the arrays among the arguments, and their shapes; it keeps the other leaves."""
    from hlo_analysis.capture.lowering import abstract

    leaves, structure = jax.tree.flatten(tuple(arguments))

    def flat(*arrays: Any) -> list[Any]:
        given = iter(arrays)
        whole = [next(given) if _is_array(leaf) else leaf for leaf in leaves]
        return [each for each in jax.tree.leaves(fn(*jax.tree.unflatten(structure, whole))) if _is_array(each)]

    return flat, [abstract(leaf, None) for leaf in leaves if _is_array(leaf)]


def _is_array(leaf: Any) -> bool:
    return hasattr(leaf, "shape") and hasattr(leaf, "dtype")


def traced_for[T](target: Target, call: Callable[[], T]) -> T:
    """Traces a program as if on the target GPU, whose implementations its operations then choose."""
    from hlo_analysis.capture.answers import answer_cudnn_checks
    from hlo_analysis.capture.meshes import mesh_of_one, name_target_in_meshes, under_mesh_of_one

    if target.kind != "cuda":
        return call()
    with answer_cudnn_checks(target), name_target_in_meshes(target):
        return under_mesh_of_one(mesh_of_one(target), call)


def _findings(plan: Plan) -> Iterator[Finding]:
    from xlafuse.fusion.report import why_left
    from xlafuse.fusion.spellings import OF_GRADIENTS

    for each in plan.walk():
        for site in each.sites:
            if site.operation in OF_GRADIENTS:  # a finding is of launches of the forward pass, too
                continue
            yield Finding(operation=site.operation, outcome="taken", text=_call(site), lines=_lines(site.covered))
        for site in each.written:
            yield Finding(operation=site.operation, outcome="left", text=why_left(site), lines=_lines(site.covered))
        for refusal in each.refusals:
            own = {refusal.value.equation} - {None}
            lines = _lines(refusal.covered | own)
            yield Finding(operation=refusal.operation, outcome="refused", text=refusal.reason, lines=lines)


def _lines(equations: Collection[Any]) -> frozenset[str]:
    from xlafuse.fusion.sources import frame_of

    frames = (frame_of(equation, outside=__file__) for equation in equations)
    return frozenset(f"{PurePath(frame.file_name).name}:{frame.start_line}" for frame in frames if frame)


def _call(site: Site) -> str:
    """Returns the call that takes a site's place, with the shapes of its arrays in comments."""
    import pallas_kernels

    function = getattr(pallas_kernels, site.operation, None)
    if function is None:  # a rewrite
        return f"# {site.operation}: {site.note}"
    parameters = inspect.signature(function).parameters
    order = [*parameters]
    named = sorted(site.arrays.items(), key=lambda item: order.index(item[0]) if item[0] in order else len(order))
    by_place = [name for name, each in parameters.items() if each.kind is not each.KEYWORD_ONLY]
    leading = [name for place, (name, _) in enumerate(named) if by_place[place : place + 1] == [name]]
    arguments = [name if name in leading else f"{name}={name}" for name, _ in named]
    arguments += [f"{name}={value!r}" for name, value in site.options.items()]
    shapes: dict[str, list[str]] = {}
    for name, each in named:
        shapes.setdefault(f"{each.value.dtype}[{','.join(map(str, each.shape))}]", []).append(name)
    comments = [f"# {', '.join(names)}: {shape}" for shape, names in shapes.items()]
    return "\n".join(
        [f"{site.operation}({', '.join(arguments)})", *comments, *([f"# {site.note}"] if site.note else [])]
    )
