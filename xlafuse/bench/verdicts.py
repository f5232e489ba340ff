"""Which measured shapes reach their bars (`xlafuse.bench.bars`), and which bars were not measured."""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product

from pallas_kernels import REGISTRY
from xlafuse.bench.bars import (
    ATTENTION_BARS,
    COPY_BARS,
    PRODUCT_BARS,
    SMALL_US,
    ChoiceBar,
    CopyBar,
    DropoutBar,
    SpeedBar,
)
from xlafuse.bench.ceiling import COPY
from xlafuse.bench.coverage import implementations
from xlafuse.bench.products import product_flops
from xlafuse.bench.results import ShapeResult
from xlafuse.bench.rows import RIVALS, Row, rival_names
from xlafuse.bench.small import small_row_calls

_Bar = SpeedBar | DropoutBar | ChoiceBar


@dataclass(frozen=True, kw_only=True)
class CopyVerdict:
    """A row beside its bar. Shares and ratios count as met where they round to the bar's two digits."""

    row: Row
    bar: CopyBar

    @property
    def share(self) -> float:
        """Of the copy ceiling."""
        return self.row.main.microseconds(COPY) / self.row.main.microseconds(self.row.ours)

    @property
    def over_xla(self) -> float:
        """Times as fast as XLA."""
        return self.row.speed_up("xla")

    @property
    def most_over_xla(self) -> float:
        """What a kernel as fast as the copy would have."""
        return self.row.main.microseconds("xla") / self.row.main.microseconds(COPY)

    @property
    def misses_share(self) -> bool:
        """Whether the share of the ceiling is too small."""
        return not round(self.share, 2) >= self.bar.share

    @property
    def asks_over_xla(self) -> bool:
        """Whether there is a bar on the ratio to XLA."""
        dtypes = self.bar.over_xla_dtypes
        return self.bar.over_xla is not None and any(dtype in self.row.main.spec for dtype in dtypes)

    @property
    def misses_over_xla(self) -> bool:
        """Whether the ratio to XLA is too small, where it is asked for."""
        return self.asks_over_xla and not round(self.over_xla, 2) >= (self.bar.over_xla or 0)

    @property
    def is_out_of_reach(self) -> bool:
        """Whether not even a kernel as fast as the copy would have the ratio to XLA."""
        return self.misses_over_xla and self.most_over_xla < (self.bar.over_xla or 0)

    @property
    def is_met(self) -> bool:
        """Both."""
        return not self.misses_share and not self.misses_over_xla


@dataclass(frozen=True, kw_only=True)
class SpeedVerdict:
    """A ratio of speeds beside its bar; it counts as met where it rounds to the bar's two digits.

    least: the bar, None where the ratio is only told.
    shapes: what was measured of ours, a phase each, all of one visit.
    ratio: times as fast as `than`, the fastest that counts; of another run than the shapes where `than` says so.
    absent: what the bar names and no run had beside ours, though it did not refuse the shape.
    is_choice: whether `than` is another choice of ours, whose own counters tell nothing about the miss.
    """

    bar: _Bar
    shapes: tuple[ShapeResult, ...]
    ours: str
    ratio: float
    than: str
    absent: tuple[str, ...] = ()

    @property
    def least(self) -> float | None:
        """What the bar asks for."""
        return self.bar.least

    @property
    def is_choice(self) -> bool:
        """Whether another implementation or configuration of ours is what was faster."""
        return isinstance(self.bar, ChoiceBar)

    @property
    def phase(self) -> str:
        """The phase, or both."""
        return " + ".join(shape.phase for shape in self.shapes)

    @property
    def teraflops(self) -> float:
        """Ours, of the matrix products of all phases; NaN where there are none."""
        flops = sum(product_flops(shape) or 0 for shape in self.shapes)
        return flops / sum(shape.microseconds(self.ours) for shape in self.shapes) / 1e6 if flops else math.nan

    @property
    def is_met(self) -> bool:
        """Whether the ratio is large enough."""
        return self.least is None or round(self.ratio, 2) >= self.least


@dataclass(frozen=True, kw_only=True)
class Unmeasured:
    """A bar on a shape that no run measured, or not beside any rival that counts. asked: the bar in words."""

    op: str
    phase: str
    spec: str
    asked: str


Table = Mapping[tuple[str, str, str], Row]
"""Rows by operation, spec and phase."""


def _table(rows: Iterable[Row]) -> Table:
    return {row.main.key: row for row in rows if row.ours}


def copy_verdicts(rows: Iterable[Row]) -> list[CopyVerdict]:
    """Of every row that a bar on the copy is about and that was measured."""
    return [
        CopyVerdict(row=row, bar=bar)
        for row in rows
        for bar in COPY_BARS
        if row.ours and row.main.phase in bar.phases and bar.covers(row.main.op, row.main.spec)
    ]


def speed_verdicts(rows: Iterable[Row]) -> list[SpeedVerdict]:
    """Of every bar on a ratio of speeds that was measured; what is only told comes with it."""
    table = _table(rows)
    return [found for _, judge in _speed_calls(table) if (found := judge())]


def unmeasured(rows: Iterable[Row]) -> list[Unmeasured]:
    """The bars on shapes of the registry that no verdict is about, and small calls that were not timed."""
    table = _table(rows)
    found = [
        Unmeasured(op=op, phase=phase, spec=spec, asked=bar.asked)
        for bar in COPY_BARS
        for op, spec in bar.calls()
        for phase in bar.phases
        if (op, spec, phase) not in table
    ]
    found += [absent for absent, judge in _speed_calls(table) if absent and not judge()]
    asked = f"at most {SMALL_US:.0f} µs longer than XLA's"
    found += [
        Unmeasured(op=op, phase=phase, spec=spec, asked=asked)
        for op, spec, phase in small_row_calls()
        if (op, spec, phase) not in table
    ]
    return found


_Judge = Callable[[], SpeedVerdict | None]


def _speed_calls(table: Table) -> Iterator[tuple[Unmeasured | None, _Judge]]:
    """Each bar on each of its shapes: what it is called where it was not measured, and what judges it."""
    for bar in (*PRODUCT_BARS, *ATTENTION_BARS):
        is_sum = isinstance(bar, SpeedBar) and bar.together
        for op, spec in bar.calls():
            for phases in (bar.phases,) if is_sum else ((phase,) for phase in bar.phases):
                yield _absent(bar, op, spec, " + ".join(phases)), partial(_judge, bar, table, op, spec, phases)


def _absent(bar: _Bar, op: str, spec: str, phase: str) -> Unmeasured | None:
    if bar.least is None:
        return None
    if isinstance(bar, DropoutBar):
        of = "its own speed without dropout"
    elif isinstance(bar, ChoiceBar):
        of = "the fastest implementation"
    else:
        of = "the fastest rival" if bar.against == "fastest" else " and ".join(map(rival_label, bar.rivals))
    return Unmeasured(op=op, phase=phase, spec=spec, asked=f"{bar.least:.2f} × {of}")


def _judge(bar: _Bar, table: Table, op: str, spec: str, phases: Sequence[str]) -> SpeedVerdict | None:
    rows = [table[op, spec, phase] for phase in phases if (op, spec, phase) in table]
    if len(rows) < len(phases):
        return None
    if isinstance(bar, DropoutBar):
        without = table.get((op, spec.removesuffix(bar.suffix), phases[0]))
        return _beside_itself(bar, rows[0], without) if without else None
    if isinstance(bar, ChoiceBar):
        return _choice(bar, rows[0])
    return _beside_rivals(bar, rows)


def rival_label(name: str) -> str:
    """What tables call a rival."""
    return RIVALS.get(name, name)


def _beside_rivals(bar: SpeedBar, rows: Sequence[Row]) -> SpeedVerdict | None:
    """The ratio of sums over the rows, for each rival of the last visit that has all of them beside ours."""
    names = bar.rivals if bar.against == "named" else dict.fromkeys(("xla", *bar.rivals, *rival_names(rows)))
    ours = rows[0].ours
    visits = sorted(set(rows[0].visits), reverse=True)

    def timed(name: str) -> tuple[tuple[int, ShapeResult], ...] | None:
        """Run and measurement of each row, all of one visit, in which ours and `name` took turns."""
        for visit in visits:
            found = [
                next(
                    (pair for pair in row.in_visit(visit).items() if math.isfinite(pair[1].speed_up(ours, name))), None
                )
                for row in rows
            ]
            if None not in found:
                return tuple(pair for pair in found if pair)
        return None

    own = timed(ours)
    sources = {name: source for name in names if name != ours and (source := timed(name))}
    if not sources or own is None:
        return None

    def ratio(name: str) -> float:
        shapes = [shape for _, shape in sources[name]]
        return sum(s.microseconds(name) for s in shapes) / sum(s.microseconds(ours) for s in shapes)

    best = min(sources, key=ratio)
    elsewhere = [run for (run, _), (last, _) in zip(sources[best], own, strict=True) if run != last]
    return SpeedVerdict(
        bar=bar,
        shapes=tuple(shape for _, shape in own),
        ours=ours,
        ratio=ratio(best),
        than=rival_label(best) + (f", run {elsewhere[0]}" if elsewhere else ""),
        absent=_absent_rivals(bar, sources, [shape for row in rows for shape in row.runs.values()]),
    )


def _absent_rivals(bar: SpeedBar | ChoiceBar, timed: Container[str], shapes: Iterable[ShapeResult]) -> tuple[str, ...]:
    """The bar's rivals that were not timed, without those that said that they cannot run these shapes."""
    problems = [problem for shape in shapes for problem in shape.problems]
    # A library that is not there is "unsupported" too.
    refused = {problem.candidate for problem in problems if problem.message.startswith(NotImplementedError.__name__)}
    return tuple(rival_label(name) for name in bar.rivals if name not in timed and name not in refused)


def _beside_itself(bar: DropoutBar, row: Row, without: Row) -> SpeedVerdict | None:
    for visit in sorted(set(row.visits), reverse=True):
        for shape, other in product(row.in_visit(visit).values(), without.in_visit(visit).values()):
            ratio = other.microseconds(row.ours) / shape.microseconds(row.ours)
            if math.isfinite(ratio):
                return SpeedVerdict(bar=bar, shapes=(shape,), ours=row.ours, ratio=ratio, than="itself without dropout")
    return None


def _choice(bar: ChoiceBar, row: Row) -> SpeedVerdict | None:
    """What a call without a name takes, of the dispatch rules as they are now, in the row's last run."""
    op, shape = REGISTRY[row.main.op], row.main
    spec = next(spec for spec in op.arg_specs if spec.name == shape.spec)
    taken = next((name for name in implementations(op, spec) if math.isfinite(shape.microseconds(name))), row.ours)
    kinds = ("implementation", "variant")
    others = [c.name for c in shape.candidates if c.name != taken and (c.kind in kinds or c.name in bar.rivals)]
    if not others:
        return None
    best = min(others, key=shape.microseconds)
    absent = _absent_rivals(bar, (*others, taken), [shape])
    return SpeedVerdict(
        bar=bar,
        shapes=(shape,),
        ours=taken,
        ratio=shape.speed_up(taken, best),
        than=best.removeprefix("variant: ") if best.startswith("variant: ") else rival_label(best),
        absent=absent,
    )
