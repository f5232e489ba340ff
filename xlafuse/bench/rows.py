"""Rows of a results table: a shape's last measurement, with columns for peers that only another run timed.

Some libraries cannot share a process: torch.compile needs PyTorch's Triton, jax-triton a newer one. Rows merge their
runs shape by shape, but each ratio is of two times from one run.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pallas_kernels import REGISTRY
from pallas_kernels.specs import plain
from xlafuse.bench.block import batch_and_length, flops
from xlafuse.bench.results import Results, ShapeResult, rivals
from xlafuse.bench.settings import PHASES
from xlafuse.models import PRESETS, get_preset

RIVALS = {
    "xla": "XLA",
    "torch_compile": "torch.compile",
    "torch_eager": "PyTorch",
    "torch_max_autotune": "torch.compile, max-autotune",
    "liger": "Liger",
    "triton": "jax-triton",
    "cudnn": "cuDNN",
    "jax_mosaic": "JAX's Mosaic kernel, f16",
    "fa3": "FlashAttention-3",
    "fa4": "FlashAttention-4",
    "fa4_deterministic": "FlashAttention-4, deterministic",
    "quack": "quack",
    "xla_bf16": "XLA, bf16 weights",
}
"""Rivals by name, with their labels in tables, in the tables' order."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """A shape's main measurement, from run number `run`, and its other measurements by run.

    run: counts from 1, in the file's order.
    """

    main: ShapeResult
    run: int
    others: tuple[tuple[int, ShapeResult], ...] = ()

    @property
    def ours(self) -> str:
        """The implementation to quote; "" if none was timed."""
        return self.main.chosen or ""

    def source(self, rival: str) -> tuple[int, ShapeResult] | None:
        """Returns run and measurement in which ours and `rival` took turns, the main one first; None if none did."""
        for run, shape in ((self.run, self.main), *self.others):
            if math.isfinite(shape.speed_up(self.ours, rival)):
                return run, shape
        return None

    def speed_up(self, rival: str) -> float:
        """Returns our speed-up over `rival` within one run; NaN if no run has both or `rival` is ours."""
        found = None if rival == self.ours else self.source(rival)
        return found[1].speed_up(self.ours, rival) if found else math.nan

    def runs_elsewhere(self, names: Iterable[str]) -> dict[str, int]:
        """Returns the columns whose times are from another run than the row's, with that run's number."""
        found = {name: source[0] for name in names if name != self.ours and (source := self.source(name))}
        return {name: run for name, run in found.items() if run != self.run}


def rows(results: Results) -> list[Row]:
    """Makes a row for each shape, in the registry's order; shapes outside the registry come last."""
    found: dict[tuple[str, str, str], list[tuple[int, ShapeResult]]] = {}
    for number, run in enumerate(results.runs, start=1):
        for shape in run.shapes:
            found.setdefault(shape.key, []).insert(0, (number, shape))
    made = [Row(main=last[1], run=last[0], others=tuple(rest)) for last, *rest in found.values()]
    order = {
        (op.name, spec.name): (i, j) for i, op in enumerate(REGISTRY.values()) for j, spec in enumerate(op.arg_specs)
    }
    end = (len(REGISTRY), 0)
    return sorted(made, key=lambda row: order.get((row.main.op, row.main.spec), end))


def grouped(table: Iterable[Row]) -> Sequence[tuple[str, str, list[Row]]]:
    """Groups rows by operation, in order of appearance, and by phase, forward first."""
    groups: dict[str, dict[str, list[Row]]] = {}
    for row in table:
        groups.setdefault(row.main.op, {phase: [] for phase in PHASES})[row.main.phase].append(row)
    return [(op, phase, group) for op, phases in groups.items() for phase, group in phases.items() if group]


def rival_names(table: Iterable[Row]) -> list[str]:
    """Lists the rivals that the rows were timed against, without XLA, in order of appearance."""
    names = (name for row in table for shape in (row.main, *(s for _, s in row.others)) for name in rivals(shape))
    return list(dict.fromkeys(names))


def product_flops(shape: ShapeResult) -> int | None:
    """Counts the FLOPs of a shape's matrix products; None if the operation or block has none or is unknown."""
    if shape.op in PRESETS:
        return flops(get_preset(shape.op), batch_and_length(shape.spec), shape.phase)
    op = REGISTRY.get(shape.op)
    if op is None or op.flops is None:
        return None
    spec = next((spec for spec in op.arg_specs if spec.name == shape.spec), None)
    if spec is None:
        return None
    return op.flops(plain(spec.structs()), shape.phase)


RIDGE = 200
"""FLOPs per byte above which an H200's tensor cores set the time instead of memory: about 800 TF/s over 4.2 TB/s."""


def is_bound_by_products(shape: ShapeResult) -> bool:
    """Tells whether matrix products set the time of a perfect kernel."""
    flops = product_flops(shape)
    return flops is not None and flops > RIDGE * shape.bytes


def teraflops_per_second(shape: ShapeResult, name: str) -> float:
    """Returns a candidate's TF/s; NaN if the operation has no matrix products or the candidate was not timed."""
    flops = product_flops(shape)
    return math.nan if flops is None else flops / shape.microseconds(name) / 1e6


def rate(shape: ShapeResult, name: str) -> str:
    """Formats a candidate's rate: TF/s where matrix products set the time, else GB/s of a perfect kernel's bytes."""
    if is_bound_by_products(shape):
        return f"{teraflops_per_second(shape, name):.0f} TF/s"
    return f"{shape.gigabytes_per_second(name):.0f} GB/s"
