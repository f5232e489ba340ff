"""What moved between two files of results: medians that differ by more than noise."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from xlafuse.bench.results import Measured, Results, ResultsError, ShapeResult, short_spec

LEAST = 0.02
"""A smaller change is none: medians of one kernel differ by as much between two visits."""
_OF_XLA = ("xla", "unfused")


@dataclass(frozen=True, kw_only=True)
class Move:
    """A candidate on a shape that takes another time than before."""

    shape: ShapeResult
    """As it is now."""
    old: Measured
    new: Measured
    xla: float | None
    """How XLA moved on the same shape: clocks, power and versions move it, too."""

    @property
    def change(self) -> float:
        """0.1: a tenth slower."""
        return self.new.timing.median_us / self.old.timing.median_us - 1

    @property
    def is_regression(self) -> bool:
        """Whether something of ours is slower."""
        return self.change > 0 and is_ours(self.new)


def is_ours(candidate: Measured) -> bool:
    """Whether it is one of our kernels or a strategy with them, not XLA or another library."""
    if candidate.kind == "strategy":
        return not candidate.name.startswith(_OF_XLA)
    return candidate.kind == "default" or (
        candidate.kind == "implementation" and candidate.name in ("mosaic", "triton")
    )


def moves(old: Results, new: Results) -> tuple[list[Move], int]:
    """All moves, the largest first, and how many candidates both files have; a search's variants do not count.

    Where a shape was measured more than once, the last in its file counts.

    Raises:
        ResultsError: of other kinds of GPU, or nothing was measured in both.
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
    """A table of the moves, and how many of ours are slower."""
    for move in found:
        name = f"{move.shape.op} {move.shape.phase} {short_spec(move.shape.spec)} {move.new.name}"
        xla = "" if move.xla is None else f"  (xla {move.xla:+.1%})"
        old, new = move.old.timing.median_us, move.new.timing.median_us
        mark = "  SLOWER" if move.is_regression else ""
        yield f"{name:<72} {old:10.2f} → {new:10.2f} µs  {move.change:+7.1%}{xla}{mark}"
    slower = sum(move.is_regression for move in found)
    yield f"{compared} compared, {len(found)} moved beyond noise, {slower} of ours slower"
