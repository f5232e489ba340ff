"""Finds the measured calls in which our kernel is behind a rival or far below the ceiling, and says what limits it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from pallas_kernels import REGISTRY
from xlafuse.bench.counters import Counters, case_name, limit, lowered_clock, own_clock
from xlafuse.bench.coverage import implementations
from xlafuse.bench.results import Results, markdown_table, short_spec
from xlafuse.bench.rows import RIVALS, Row, is_bound_by_products, rival_names, rows, teraflops_per_second
from xlafuse.bench.tables import clock_and_power

LEAST_RATIO = 0.98
LEAST_DIFFERENCE_US = 0.5
"""A rival counts as faster if it needs less than this share of our time and half a microsecond less: beyond noise."""
LEAST_CEILING_SHARE = 0.90


@dataclass(frozen=True, kw_only=True)
class Shortfall:
    """A measured call with our speed over that of `than`, a rival or the ceiling."""

    row: Row
    than: str
    ratio: float


def shortfalls(table: Iterable[Row]) -> Iterator[Shortfall]:
    """Yields a row's fastest rival if that is faster than ours, else its ceiling if ours is far below it."""
    for row in table:
        if not row.ours:
            continue
        faster = {name: row.speed_up(name) for name in ("xla", *rival_names([row])) if _is_behind(row, name)}
        if faster:
            rival = min(faster, key=lambda name: faster[name])
            yield Shortfall(row=row, than=RIVALS.get(rival, rival), ratio=faster[rival])
        elif row.main.is_large and not is_bound_by_products(row.main):
            share = row.main.ceiling_share(row.ours)
            if share < LEAST_CEILING_SHARE:
                yield Shortfall(row=row, than="the ceiling", ratio=share)


def _is_behind(row: Row, rival: str) -> bool:
    ratio, source = row.speed_up(rival), row.source(rival)
    if source is None or not ratio < LEAST_RATIO:
        return False
    _, shape = source
    return shape.microseconds(row.ours) - shape.microseconds(rival) > LEAST_DIFFERENCE_US


def cases_behind(results: Results) -> list[str]:
    """Lists the cases whose counters are worth reading."""
    return [case_name(found.row.main) for found in shortfalls(rows(results))]


def shortfall_table(results: Results, counters: Counters) -> str:
    """Makes the table of docs/results.md on calls that fall short, with what limits each."""
    table = [row for row in rows(results) if row.ours]
    found = list(shortfalls(table))
    words = (
        f"In {len(found)} of {len(table)} measured calls ours is more than {100 * (1 - LEAST_RATIO):.0f} % and "
        f"{LEAST_DIFFERENCE_US} µs behind the fastest rival, or bound by memory and below "
        f"{100 * LEAST_CEILING_SHARE:.0f} % of the ceiling."
    )
    if not found:
        return words
    header = ["operation", "", "shape", "our speed", "over", "TF/s", "MHz", "W", "what limits it"]
    lines = [_cells(each, counters) for each in found]
    return "\n\n".join((words, markdown_table(header, lines, "lllrlrrrl"), _legend(counters)))


def _cells(found: Shortfall, counters: Counters) -> list[str]:
    row, shape = found.row, found.row.main
    speed = teraflops_per_second(shape, row.ours)
    launches = counters.cases.get(case_name(shape))
    limits = [
        _other_choice(row),
        *((own_clock(shape, counters), lowered_clock(shape)) if is_bound_by_products(shape) else ()),
        limit(launches) if launches else "counters not read",
    ]
    return [
        f"`{shape.op}`",
        shape.phase,
        short_spec(shape.spec),
        f"{found.ratio:.2f}",
        found.than,
        f"{speed:.0f}" if speed is not None and math.isfinite(speed) else "–",
        *clock_and_power(shape),
        "; ".join(words for words in limits if words),
    ]


def _other_choice(row: Row) -> str:
    """Says so if a call that names no implementation takes another than the row's; "" for a spec of the past."""
    op = REGISTRY[row.main.op]
    spec = next((spec for spec in op.arg_specs if spec.name == row.main.spec), None)
    taken = row.ours if spec is None else implementations(op, spec)[0]
    return "" if taken == row.ours else f"`implementation=None` takes {RIVALS.get(taken, taken)} here"


def _legend(counters: Counters) -> str:
    text = (
        "MHz: median and lowest; W: median and highest. DRAM, issue slots and pipes in percent of their peak, by "
        "Nsight Compute (a copy reaches 88 % of DRAM's); stalls in warps that wait for each instruction issued. "
        f"Counters {counters.read}."
    )
    if any("sm_cycles" in launch for launches in counters.cases.values() for launch in launches):
        text += (
            " The clock within a launch is its cycles by its time: the GPU lowers it within 20 µs of multiplying "
            "random numbers, in cuBLAS's kernels as in these (see `pallas_kernels/primitives/gemm/TUNING.md`)."
        )
    return text
