"""Reports what `fuse` did with a program: sites taken, left to XLA and refused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pallas_kernels.dispatch import Choice
from xlafuse.fusion.plan import Plan
from xlafuse.fusion.site import Refusal, Site, choice_of, structs_of
from xlafuse.fusion.sources import line_of
from xlafuse.fusion.spellings import OF_GRADIENTS


@dataclass(frozen=True, kw_only=True)
class SiteTaken:
    """A call of an operation in place of equations of the program.

    where: file and line of the last of these, as the user wrote it. arrays: the dtypes and shapes, by name.
    options: the other arguments. implementation: what the operation took. equations: how many it replaces. note: what
    is done in place of a call of an operation. parts: where explicit mesh axes cut the arrays, one device's parts and
    the axes, in words; the implementation is the one of these.
    """

    operation: str
    where: str
    arrays: Mapping[str, str]
    options: Mapping[str, Any]
    implementation: str
    equations: int
    note: str = ""
    parts: str = ""

    def __str__(self) -> str:
        if self.note:
            factors = " by ".join(self.arrays.values())
            return f"{self.where}: {self.operation} of {factors}: {self.note}"
        given = [*(f"{name}={array}" for name, array in self.arrays.items())]
        given += [f"{name}={value!r}" for name, value in self.options.items()]
        replaced = f"{self.equations} equation{'' if self.equations == 1 else 's'}"
        by = "its definition, as this device has no kernels" if self.implementation == "xla" else self.implementation
        on = f" on {self.parts}" if self.parts else ""
        return f"{self.where}: {self.operation}({', '.join(given)}) for {replaced}; {by}{on}"


@dataclass(frozen=True, kw_only=True)
class SiteLeft:
    """A site that stays as it is written, since the operation itself would run by XLA, for `reason`."""

    operation: str
    where: str
    reason: str = ""

    def __str__(self) -> str:
        return f"{self.where}: {self.operation} left to XLA{self.reason and f': {self.reason}'}"


@dataclass(frozen=True, kw_only=True)
class SiteRefused(SiteLeft):
    """A line of the program that looks like an operation, and the difference."""

    def __str__(self) -> str:
        return f"{self.where}: no {self.operation}: {self.reason}"


@dataclass(frozen=True, kw_only=True)
class Report:
    """What one trace of a function found.

    notes: the reasons why `fuse` did not search it. undifferentiated: of a trace that takes no derivative, the calls of
    which only the gradient is another program than XLA's.
    """

    function: str
    taken: tuple[SiteTaken, ...] = ()
    left: tuple[SiteLeft, ...] = ()
    refused: tuple[SiteRefused, ...] = ()
    notes: tuple[str, ...] = ()
    undifferentiated: tuple[SiteTaken, ...] = ()

    def __str__(self) -> str:
        left = f"{len(self.left)} left to XLA, " if self.left else ""
        counts = f"{len(self.taken)} site{'' if len(self.taken) == 1 else 's'} taken, {left}{len(self.refused)} refused"
        signs = (("+", self.taken), ("=", self.left), ("-", self.refused))
        sites = [f"{sign} {each}" for sign, own in signs for each in own]
        return "\n".join([f"{self.function}: {counts}", *self.notes, *sites])


def make_report(
    function: str, plan: Plan, choices: Mapping[Site, Choice], *, outside: str, in_gradient: bool
) -> Report:
    """Makes the report of a plan that has been evaluated.

    outside: the file that traced the function. in_gradient: whether the trace takes a derivative.
    """
    plans = list(plan.walk())
    called = [_taken(site, choices.get(site), outside) for each in plans for site in each.sites]
    undifferentiated = () if in_gradient else tuple(each for each in called if each.operation in OF_GRADIENTS)
    left = [
        SiteLeft(operation=site.operation, where=line_of(site.root, outside=outside), reason=why_left(site))
        for each in plans
        for site in each.written
    ]
    refused = [_refused(refusal, outside) for each in plans for refusal in each.refusals]
    return Report(
        function=function,
        taken=tuple(each for each in called if each not in undifferentiated),
        left=tuple(left),
        refused=tuple(dict.fromkeys(refused)),
        undifferentiated=undifferentiated,
    )


def why_left(site: Site) -> str:
    """Returns why the operation would run by XLA: its kernel cannot run here, or XLA is as fast at this shape."""
    found = choice_of(site)
    reasons = {} if found is None else {name: why for name, why in found.reasons.items() if name != "xla"}
    if not reasons or None in reasons.values():
        return "the kernel can run, and XLA is at least as fast at these sizes"
    return "; ".join(f"{name}: {why}" for name, why in reasons.items() if why)


def _taken(site: Site, choice: Choice | None, outside: str) -> SiteTaken:
    shapes = {name: f"{each.dtype}[{','.join(map(str, each.shape))}]" for name, each in structs_of(site).items()}
    return SiteTaken(
        operation=site.operation,
        where=line_of(site.root, outside=outside),
        arrays=shapes,
        options=dict(site.options),
        implementation=("xla" if site.note else "not computed") if choice is None else choice.taken or "nothing",
        equations=len(site.covered),
        note=site.note,
        parts="" if choice is None else choice.parts,
    )


def _refused(refusal: Refusal, outside: str) -> SiteRefused:
    equation = refusal.value.equation
    where = line_of(equation, outside=outside) if equation else "an argument"
    return SiteRefused(operation=refusal.operation, where=where, reason=refusal.reason)
