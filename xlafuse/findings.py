"""Finds what `fuse` takes of a function and what it does not, by source lines, for the analyzer's remedies."""

from __future__ import annotations

import contextlib
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

    outcome: "left" where the operation itself runs by XLA. text: the call if it is taken, else the reason why not.
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
    from xlafuse.fusion.spellings import spellings

    leaves, structure = jax.tree.flatten(tuple(shapes))
    is_array = [hasattr(leaf, "shape") and hasattr(leaf, "dtype") for leaf in leaves]
    if any(getattr(leaf, "sharding", None) and leaf.sharding.num_devices > 1 for leaf in leaves):
        return None

    def flat(*arrays: Any) -> list[Any]:
        given = iter(arrays)
        whole = [next(given) if dynamic else leaf for leaf, dynamic in zip(leaves, is_array, strict=True)]
        results = jax.tree.leaves(fn(*jax.tree.unflatten(structure, whole)))
        return [each for each in results if hasattr(each, "dtype")]

    arrays = [leaf for leaf, dynamic in zip(leaves, is_array, strict=True) if dynamic]
    structs = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in arrays]
    with traced_for(target):
        try:
            closed = jax.make_jaxpr(flat)(*structs)
        except Exception:  # whatever the function raises: the capture has traced it in its own way
            return None
        if is_differentiated(closed.jaxpr):
            return None
        plan = make_plan(closed.jaxpr, spellings())
        return tuple(_findings(plan))


def traced_for(target: Target) -> contextlib.ExitStack:
    """Returns a context in which operations choose implementations for a target."""
    from hlo_analysis.capture.cudnn import answer_cudnn_checks
    from hlo_analysis.capture.meshes import mesh_of_one, name_target_in_meshes

    stack = contextlib.ExitStack()
    if target.kind == "cuda":
        stack.enter_context(answer_cudnn_checks(target))
        stack.enter_context(name_target_in_meshes(target))
        stack.enter_context(jax.sharding.use_abstract_mesh(mesh_of_one(target)))
    return stack


def _findings(plan: Plan) -> Iterator[Finding]:
    from xlafuse.fusion.spellings import OF_GRADIENTS

    for each in plan.walk():
        for site in each.sites:
            if site.operation in OF_GRADIENTS:  # a finding is of launches of the forward pass, too
                continue
            yield Finding(operation=site.operation, outcome="taken", text=_call(site), lines=_lines(site.covered))
        for site in each.written:
            yield Finding(operation=site.operation, outcome="left", text=_why_left(site), lines=_lines(site.covered))
        for refusal in each.refusals:
            own = {refusal.value.equation} - {None}
            lines = _lines(refusal.covered | own)
            yield Finding(operation=refusal.operation, outcome="refused", text=refusal.reason, lines=lines)


def _lines(equations: Collection[Any]) -> frozenset[str]:
    from xlafuse.fusion.sources import stack_of

    stacks = (stack_of(equation, outside=__file__) for equation in equations)
    return frozenset(f"{PurePath(stack[0].file).name}:{stack[0].line}" for stack in stacks if stack)


def _call(site: Site) -> str:
    if site.note:
        return f"{site.operation}, {site.note}"
    arrays = [
        f"{name}={each.value.dtype}[{','.join(map(str, each.shape))}]" for name, each in sorted(site.arrays.items())
    ]
    options = [f"{name}={value!r}" for name, value in site.options.items()]
    return f"{site.operation}({', '.join([*arrays, *options])})"


def _why_left(site: Site) -> str:
    """Says why an operation runs by XLA."""
    from xlafuse.fusion.site import choice_of

    found = choice_of(site)
    reason = None if found is None else found.reasons.get("mosaic")
    return reason or "XLA was measured to be as fast, or faster"
