"""Compares two files of results and finds medians that differ by more than noise."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from xlafuse.bench.results import Measured, Results, ResultsError, ShapeResult, short_spec

LEAST = 0.02
"""Smallest relative change that counts; a kernel's median varies by this much between two visits."""
_OF_XLA = ("xla", "unfused")


@dataclass(frozen=True, kw_only=True)
class Move:
    """A candidate whose time changed between the two files."""

    shape: ShapeResult
    """The new measurement."""
    old: Measured
    new: Measured
    xla: float | None
    """XLA's relative change on the same shape, which shows the effect of clocks, power and versions."""

    @property
    def change(self) -> float:
        """Relative change of the median: 0.1 is a tenth slower."""
        return self.new.timing.median_us / self.old.timing.median_us - 1

    @property
    def is_regression(self) -> bool:
        """Whether one of our kernels or strategies became slower."""
        return self.change > 0 and is_ours(self.new)


def is_ours(candidate: Measured) -> bool:
    """Tells whether the candidate is one of our kernels or a strategy with them, not XLA or another library."""
    if candidate.kind == "strategy":
        return not candidate.name.startswith(_OF_XLA)
    return candidate.kind == "default" or (
        candidate.kind == "implementation" and candidate.name in ("mosaic", "triton")
    )


def moves(old: Results, new: Results) -> tuple[list[Move], int]:
    """Returns all moves, largest first, and the number of candidates that both files have; variants do not count.

    If a file has several measurements of a shape, the last one counts.

    Raises:
        ResultsError: the files are from different kinds of GPU or share no measurement.
    """
    kinds = [{run.environment.device_kind for run in each.runs} for each in (old, new)]
    if kinds[0] != kinds[1]:
        raise ResultsError(f"measured on {', '.join(kinds[0])} and on {', '.join(kinds[1])}: expected one kind of GPU")
    before = {(*shape.key, each.name): each for shape in old.shapes for each in shape.candidates}
    after = {(*shape.key, each.name): (shape, each) for shape in new.shapes for each in shape.candidates}
    common = [
        (shape, before[key], each) for key, (shape, each) in after.items() if key in before and each.kind != "variant"
    ]
    if not common:
        raise ResultsError("no operation, shape and candidate was measured in both files")
    found = []
    for shape, was, each in common:
        xla_key = (*shape.key, "xla")
        xla = None
        if each.name != "xla" and xla_key in before and xla_key in after:
            xla = after[xla_key][1].timing.median_us / before[xla_key].timing.median_us - 1
        move = Move(shape=shape, old=was, new=each, xla=xla)
        if abs(move.change) > LEAST and _is_beyond_noise(was, each):
            found.append(move)
    return sorted(found, key=lambda move: -abs(move.change)), len(common)


def _is_beyond_noise(one: Measured, other: Measured) -> bool:
    pairs = ((one.timing, other.timing), (other.timing, one.timing))
    return all(not a.p20_us <= b.median_us <= a.p80_us for a, b in pairs)


def lines(found: list[Move], compared: int) -> Iterator[str]:
    """Formats a table of the moves and the number of our candidates that became slower."""
    for move in found:
        name = f"{move.shape.op} {move.shape.phase} {short_spec(move.shape.spec)} {move.new.name}"
        xla = "" if move.xla is None else f"  (xla {move.xla:+.1%})"
        old, new = move.old.timing.median_us, move.new.timing.median_us
        mark = "  SLOWER" if move.is_regression else ""
        yield f"{name:<72} {old:10.2f} → {new:10.2f} µs  {move.change:+7.1%}{xla}{mark}"
    slower = sum(move.is_regression for move in found)
    yield f"{compared} compared, {len(found)} moved beyond noise, {slower} of ours slower"
