"""Small calls: decoding steps of operations on rows, which may take a microsecond longer than XLA's."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

from pallas_kernels import REGISTRY
from pallas_kernels.specs import plain
from xlafuse.bench.bars import SMALL_ROWS, SMALL_US
from xlafuse.bench.coverage import implementations
from xlafuse.bench.products import is_bound_by_products
from xlafuse.bench.results import PHASES
from xlafuse.bench.rows import Row
from xlafuse.bench.timing import L2_CACHE_BYTES


def small_row_calls() -> Iterator[tuple[str, str, str]]:
    """The small calls of operations on rows, whether measured or not."""
    for op in REGISTRY.values():
        for spec in op.tagged("bench") if op.flops is None else ():
            for phase in PHASES if op.differentiable else PHASES[:1]:
                structs = plain(spec.structs())
                traffic = (op.forward_traffic if phase == "forward" else op.backward_traffic)(structs)
                if _rows_of(op.name, spec.name) <= SMALL_ROWS and traffic.bytes < 2 * L2_CACHE_BYTES:
                    yield op.name, spec.name, phase


def small_calls(rows: Iterable[Row]) -> list[Row]:
    """The shapes of at most 64 rows (rope: tokens) that stay in the L2 cache: decoding steps."""
    small = [row for row in rows if row.ours and not row.main.is_large and not is_bound_by_products(row.main)]
    return [row for row in small if _rows_of(row.main.op, row.main.spec) <= SMALL_ROWS and _is_taken(row)]


def slow_small_calls(rows: Iterable[Row]) -> list[Row]:
    """Those on which ours takes more than `SMALL_US` longer than XLA."""
    small = small_calls(rows)
    return [row for row in small if row.main.microseconds(row.ours) - row.main.microseconds("xla") > SMALL_US]


def _is_taken(row: Row) -> bool:
    """Whether a call that names no implementation takes what the row quotes; a shape that is no longer here counts."""
    op = REGISTRY[row.main.op]
    spec = next((spec for spec in op.arg_specs if spec.name == row.main.spec), None)
    return spec is None or implementations(op, spec)[0] == row.ours


def _rows_of(operation: str, spec: str) -> float:
    """The spec's leading dimensions multiplied: "64x4096-bfloat16" has 64, a product's "16-4096-1024-bfloat16" 16."""
    head = spec.partition("-")[0].partition("+")[0].split("x")
    sizes = [int(size) for size in head if size.isdigit()]
    op = REGISTRY.get(operation)
    if op is not None and op.flops is not None:
        return math.prod(sizes[:1])
    kept = sizes[:2] if operation == "rope" else sizes[:-1]  # rope: batch x tokens x heads + key heads x head size
    return math.prod(kept) if sizes else math.inf
