"""Finds the operations by which `xlafuse.fuse` makes a program worse: compiles it again without each kind in turn."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from xlafuse.compilation import compilation_pool, compiled

if TYPE_CHECKING:
    from hlo_analysis.records import Analysis

NOISE = 0.005
"""The share of a program's bytes or estimated time below which a difference is none."""
NOISE_BYTES, NOISE_US = 1 << 20, 0.5
"""Differences that are none in a small program. An estimate of a launch is no finer than half a microsecond."""


_US_PER_MEGABYTE = 1.0
"""The estimated time that must fall for each megabyte more; three times what it takes an H100 to move one."""


def is_worse(after: Analysis, before: Analysis) -> bool:
    """Returns whether a program takes more bytes or estimated time than another; see `costs_more`."""
    first, second = ((each.traffic.bytes, each.estimated_us) for each in (after, before))
    return costs_more(first, second)


def costs_more(after: tuple[float, float], before: tuple[float, float]) -> bool:
    """Returns whether one of (bytes, microseconds) is larger by over 0.5 %, and by more than 1 MiB or half a µs.

    Bytes that make a program much faster, as those of a padded weight do, are no cost.
    """
    limits = zip(after, before, (NOISE_BYTES, NOISE_US), strict=True)
    moves_more, is_slower = (own - other > max(least, NOISE * other) for own, other, least in limits)
    is_bought = before[1] - after[1] > _US_PER_MEGABYTE * (after[0] - before[0]) / 1e6
    return is_slower or (moves_more and not is_bought)


@dataclass(frozen=True, kw_only=True)
class Regression:
    """A program that `fuse` makes worse.

    worse: the fused program compared with the plain one, in words. skip: the operations to leave out; empty where no
    kind alone is responsible. without: the program without them compared with the fused one.
    """

    worse: str
    skip: frozenset[str] = frozenset()
    without: str = ""

    def __str__(self) -> str:
        worse = f"fuse makes this program worse: {self.worse}."
        if not self.skip:
            return f"{worse} It is no better without any one kind of operation."
        return f"{worse} skip={{{', '.join(map(repr, sorted(self.skip)))}}} makes that {self.without}."


def difference(before: Analysis, after: Analysis) -> str:
    """Returns what a program moves and takes more or less than another, in words."""
    megabytes, us = (after.traffic.bytes - before.traffic.bytes) / 1e6, after.estimated_us - before.estimated_us
    return f"{_more(megabytes, 'MB', 0)} and an estimated {_more(us, 'µs', 1)}"


def _more(amount: float, unit: str, digits: int) -> str:
    return f"{abs(amount):,.{digits}f} {unit} {'more' if amount > 0 else 'less'}"


def regression_of(
    fn: Callable[..., Any],
    *arguments: Any,
    choices: Mapping[str, Any] | None = None,
    target: str = "h200",
    **capture_options: Any,
) -> Regression | None:
    """Compiles a function with and without `fuse`; returns how `fuse` makes it worse, and the operations to skip.

    Returns None where it does not. Where it does, compiles it once more for each kind of operation, and once without
    all that are responsible.

    choices: further arguments of `fuse`. capture_options: those of `hlo_analysis.capture`, such as `mode`.
    """
    from hlo_analysis.targets import load_target

    programs = _Programs(fn, arguments, choices or {}, {**capture_options, "target": target})
    fused, operations = programs.fused(frozenset())
    if fused is None or not is_worse(fused, plain := programs.plain()):
        return None
    kinds = [frozenset((operation,)) for operation in sorted(set(operations))]
    with compilation_pool(load_target(target).kind) as pool:
        tried = dict(zip(kinds, pool.map(lambda skip: programs.fused(skip)[0] or plain, kinds), strict=True))
    better = {skip: found for skip, found in tried.items() if is_worse(fused, found) and not is_worse(found, fused)}
    if len(better) > 1:
        together = frozenset().union(*better)
        better[together] = programs.fused(together)[0] or plain
    if not better:
        return Regression(worse=difference(plain, fused))
    skip, best = min(better.items(), key=lambda item: (item[1].estimated_us, item[1].traffic.bytes))
    return Regression(worse=difference(plain, fused), skip=skip, without=difference(fused, best))


@dataclass(frozen=True)
class _Programs:
    """A function to compile with and without `fuse`."""

    fn: Callable[..., Any]
    arguments: tuple[Any, ...]
    choices: Mapping[str, Any]
    options: dict[str, Any]

    def plain(self) -> Analysis:
        return compiled(self.fn, *self.arguments, **self.options)

    def fused(self, skip: frozenset[str]) -> tuple[Analysis | None, tuple[str, ...]]:
        """Returns the analysis with some operations skipped, and the operations called; None and () where none is."""
        from xlafuse.fusion.program import FusedProgram, NothingFusedError

        skipped = skip | {*self.choices.get("skip", ())}
        program = FusedProgram(self.fn, **{**self.choices, "skip": skipped})
        try:
            analysis = compiled(program.function, *self.arguments, **self.options)
        except Exception as error:
            if isinstance(error.__cause__, NothingFusedError):
                return None, ()
            raise
        return analysis, tuple(site.operation for site in program.sites if site.outcome == "taken")
