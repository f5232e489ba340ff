"""Rows of a table: a shape's last measurement, with columns for peers that only another run timed.

Not every library runs in one process with every other: torch.compile needs PyTorch's Triton, jax-triton a newer one.
Their runs are merged shape by shape, and each ratio is still of two times of one run.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pallas_kernels import REGISTRY
from pallas_kernels.specs import plain
from xlafuse.bench.results import PHASES, Results, ShapeResult, rivals

RIVALS = {
    "xla": "XLA",
    "torch_compile": "torch.compile",
    "torch_max_autotune": "torch.compile, autotuned",
    "torch_eager": "PyTorch",
    "liger": "Liger",
    "triton": "jax-triton",
    "cudnn": "cuDNN",
    "cudnn_dense_mask": "cuDNN, dense mask",
    "jax_mosaic": "JAX's Mosaic kernel, f16",
    "xla_bf16": "XLA, bf16 weights",
}
"""What ours is timed against, by name, as tables call it and in their order."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """A shape, measured in the run numbered `run` (from 1, in the file's order), and its other measurements by run.

    visits: the visit of each run: see `Results.visits`.
    """

    main: ShapeResult
    run: int
    others: tuple[tuple[int, ShapeResult], ...] = ()
    visits: tuple[int, ...] = ()

    @property
    def ours(self) -> str:
        """The implementation to quote, "" where none was timed."""
        return self.main.chosen or ""

    @property
    def runs(self) -> dict[int, ShapeResult]:
        """The measurements by the number of their run, the last first."""
        found = {self.run: self.main, **dict(self.others)}
        return {number: found[number] for number in sorted(found, reverse=True)}

    def in_visit(self, visit: int) -> dict[int, ShapeResult]:
        """The measurements of one visit by the number of their run, the last first."""
        return {run: shape for run, shape in self.runs.items() if self.visits[run - 1] == visit}

    def source(self, rival: str) -> tuple[int, ShapeResult] | None:
        """The run and measurement in which ours and `rival` took turns, the main one first; None where none did."""
        for run, shape in ((self.run, self.main), *self.others):
            if math.isfinite(shape.speed_up(self.ours, rival)):
                return run, shape
        return None

    def speed_up(self, rival: str) -> float:
        """How many times as fast as `rival` ours is, both of one run; NaN where no run has both, or they are one."""
        found = None if rival == self.ours else self.source(rival)
        return found[1].speed_up(self.ours, rival) if found else math.nan

    def runs_elsewhere(self, names: Iterable[str]) -> dict[str, int]:
        """Which of these columns are of another run than the row, and of which."""
        found = {name: source[0] for name in names if name != self.ours and (source := self.source(name))}
        return {name: run for name, run in found.items() if run != self.run}


def rows(results: Results) -> list[Row]:
    """A row a shape, in the registry's order; shapes that it does not have come last, as they come."""
    found: dict[tuple[str, str, str], list[tuple[int, ShapeResult]]] = {}
    for number, run in enumerate(results.runs, start=1):
        for shape in run.shapes:
            found.setdefault(shape.key, []).insert(0, (number, shape))
    visits = results.visits
    made = [Row(main=last[1], run=last[0], others=tuple(rest), visits=visits) for last, *rest in found.values()]
    order = {
        (op.name, spec.name): (i, j) for i, op in enumerate(REGISTRY.values()) for j, spec in enumerate(op.arg_specs)
    }
    end = (len(REGISTRY), 0)
    return sorted(made, key=lambda row: order.get((row.main.op, row.main.spec), end))


def grouped(table: Iterable[Row]) -> Sequence[tuple[str, str, list[Row]]]:
    """Rows by operation, in order of appearance, and phase, forward first."""
    groups: dict[str, dict[str, list[Row]]] = {}
    for row in table:
        groups.setdefault(row.main.op, {phase: [] for phase in PHASES})[row.main.phase].append(row)
    return [(op, phase, group) for op, phases in groups.items() for phase, group in phases.items() if group]


def rival_names(table: Iterable[Row]) -> list[str]:
    """Everything but ours and XLA that some row was timed against, in order of appearance."""
    names = (name for row in table for shape in (row.main, *(s for _, s in row.others)) for name in rivals(shape))
    return list(dict.fromkeys(names))


def product_flops(shape: ShapeResult) -> int | None:
    """Additions and multiplications of a shape's matrix products, None where the operation has none or is unknown."""
    op = REGISTRY.get(shape.op)
    if op is None or op.flops is None:
        return None
    spec = next((spec for spec in op.arg_specs if spec.name == shape.spec), None)
    if spec is None:
        return None
    return op.flops(plain(spec.structs()), shape.phase)


RIDGE = 200
"""Operations a byte from which an H200's tensor cores set the time, and not its memory: some 800 TF/s over 4.2 TB/s."""


def is_bound_by_products(shape: ShapeResult) -> bool:
    """Whether a perfect kernel's time is that of its matrix products."""
    flops = product_flops(shape)
    return flops is not None and flops > RIDGE * shape.bytes


def teraflops_per_second(shape: ShapeResult, name: str) -> float | None:
    """Of a candidate, None where the operation has no matrix products or `name` was not timed."""
    flops = product_flops(shape)
    timed = next((c.timing.median_us for c in shape.candidates if c.name == name), None)
    return None if flops is None or timed is None else flops / timed / 1e6
