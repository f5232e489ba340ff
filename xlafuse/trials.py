"""Tries remedies: compiles the program again with a remedy's change and counts what it saves."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from hlo_analysis.records import Analysis, Hotspot, MissedFusion, Trial
from xlafuse.compilation import compilation_pool, compiled, one_at_a_time

LEAST_SAVED_US = 0.5
"""Least saving in estimated time for a remedy to help; the estimate of a launch is no finer."""
LEAST_SAVED_SHARE = 0.001
"""Least saving as a share of the estimated time.

Launches that stay the same have the same estimate in both programs, so that the difference has no noise. 1 % would hide
real gains: RMSNorm in one kernel saves 0.5 % of a Llama-size gradient, three launches and 128 MB.
"""

State = Literal["compiling", "done", "failed", "not applicable"]
Progress = Callable[[str, State], None]
"""Called with a change and its new state, from several threads but one call at a time."""


def try_remedies(
    analysis: Analysis,
    fn: Callable[..., Any],
    *shapes: Any,
    count: int = 5,
    target: str | None = None,
    mode: Literal["forward", "grad"] | None = None,
    progress: Progress | None = None,
    **capture_options: Any,
) -> Analysis:
    """Compiles `fn` again with each of the first remedies that can be tried, and records what they save.

    Two kinds of remedy can be tried: XLA compiler options, set in addition to those of the analysis, and operations
    that `xlafuse.fuse` can put in. A change that several missed fusions ask for is compiled once and serves all of
    them. It helps if it saves more than 0.1 % of the program's estimated time and more than half a microsecond.

    Args:
      analysis: of `fn`, made by `hlo_analysis.analyze` with the catalogue `xlafuse.catalogue.KERNELS`.
      fn: the function that was captured.
      *shapes: its arguments, as for the capture.
      count: most changes to compile, in the order of the hotspots, then of the missed fusions.
      target: name or path of the GPU to compile for; None: the target that the analysis names.
      mode: "forward" or "grad"; None: the mode of the analysis. `fuse` comes before the gradient.
      progress: called with a change and its state as work goes on; see `Progress`.
      **capture_options: passed to `hlo_analysis.capture` (`autotune`, `timeout`, ...).

    Returns the analysis with `Hotspot.trial` and `MissedFusion.trial` filled. `Trial.error` has the reason if a change
    failed to compile or if `fuse` found no site for an operation.

    Raises:
      ValueError: `count` is negative, or the analysis is of a dump, which cannot be compiled again.
      UnknownTargetError: there is no such target.
    """
    from hlo_analysis.targets import load_target

    if count < 0:
        raise ValueError(f"count is how many changes to compile: expected 0 or more, got {count}.")
    origin = analysis.provenance
    mode, target = mode or origin.mode, target or origin.target  # pyright: ignore[reportAssignmentType]
    if mode not in ("forward", "grad"):
        raise ValueError(
            f"expected the analysis of a captured function, got one of mode {mode!r}, as of a dump. Capture the "
            "function with hlo_analysis.capture, or say mode='forward' or 'grad'."
        )
    described = load_target(target)
    changes = (_change(each) for each in (*analysis.hotspots, *analysis.missed))
    wanted = [*dict.fromkeys(each for each in changes if each is not None)][:count]
    program = _Program(
        analysis=analysis, fn=fn, shapes=shapes, options={**capture_options, "target": target, "mode": mode}
    )
    report = one_at_a_time(progress)
    with compilation_pool(described.kind) as pool:
        trials = dict(zip(wanted, pool.map(lambda change: _trial(program, change, report), wanted), strict=True))

    def tried[T: (MissedFusion, Hotspot)](item: T) -> T:
        change = _change(item)
        return dataclasses.replace(item, trial=trials[change]) if change in trials else item

    missed, hotspots = tuple(map(tried, analysis.missed)), tuple(map(tried, analysis.hotspots))
    return dataclasses.replace(analysis, missed=missed, hotspots=hotspots)


@dataclass(frozen=True)
class _Change:
    """A change to try: XLA compiler options to set, or an operation for `fuse` to put in."""

    options: tuple[tuple[str, str], ...] = ()
    operation: str = ""

    def __str__(self) -> str:
        if self.operation:
            return f"{self.operation} by xlafuse.fuse"
        listed = " and ".join(f"{name}={value}" for name, value in self.options)
        return f"compiler option{'s' if len(self.options) > 1 else ''} {listed}"


def _change(missed: MissedFusion | Hotspot) -> _Change | None:
    """Returns the change that a missed fusion or a hotspot asks for; None if only the program's author can make it."""
    from xlafuse.fusion.spellings import operations

    if missed.options:
        return _Change(options=missed.options)
    if missed.kernel in operations():
        return _Change(operation=missed.kernel)
    return None


@dataclass(frozen=True, kw_only=True)
class _Program:
    """The program to compile again. options: arguments of `hlo_analysis.capture`."""

    analysis: Analysis
    fn: Callable[..., Any]
    shapes: tuple[Any, ...]
    options: dict[str, Any]

    def compiled(self, fn: Callable[..., Any], more: Sequence[tuple[str, str]] = ()) -> Analysis:
        """Returns the analysis of a function in the program's place, with more compiler options."""
        options = dict((*self.analysis.provenance.compiler_options, *more))
        return compiled(fn, *self.shapes, compiler_options=options, **self.options)


def _trial(program: _Program, change: _Change, report: Progress) -> Trial:
    from xlafuse.fusion.program import NothingFusedError

    report(str(change), "compiling")
    try:
        trial = _effect(program, change)
    # One change that fails must not lose the others.
    except Exception as error:
        is_refused = isinstance(error.__cause__, NothingFusedError)
        report(str(change), "not applicable" if is_refused else "failed")
        reason = f"{type(error).__name__}: {str(error).splitlines()[0]}"
        return Trial(change=str(change), error=str(error.__cause__) if is_refused else reason)
    report(str(change), "done")
    return trial


def _effect(program: _Program, change: _Change) -> Trial:
    before, words = program.analysis, str(change)
    if change.operation:
        after, allowed = _with_operation(program, change.operation)
        words += f", allow={{{', '.join(map(repr, allowed))}}}" if allowed else ""
    else:
        after = program.compiled(program.fn, change.options)
    saved_us = before.estimated_us - after.estimated_us
    return Trial(
        change=words,
        saved_launches=before.launch_count - after.launch_count,
        saved_bytes=before.traffic.bytes - after.traffic.bytes,
        saved_us=saved_us,
        helps=saved_us > max(LEAST_SAVED_US, LEAST_SAVED_SHARE * before.estimated_us),
    )


def _with_operation(program: _Program, operation: str) -> tuple[Analysis, list[str]]:
    """Returns the analysis of the program with an operation put in, and the differences that `fuse` had to allow."""
    from xlafuse.fusion.program import FusedProgram, NothingFusedError
    from xlafuse.fusion.spellings import ALLOWANCES

    try:
        return program.compiled(FusedProgram(program.fn, ops=[operation]).function), []
    except Exception as error:
        if not isinstance(nothing := error.__cause__, NothingFusedError):
            raise
        reasons = [site.reason for site in nothing.report.refused]
        allowed = [name for name in ALLOWANCES if any(f"allow={{{name!r}}}" in reason for reason in reasons)]
        if not allowed:
            raise
    return program.compiled(FusedProgram(program.fn, ops=[operation], allow=allowed).function), allowed
