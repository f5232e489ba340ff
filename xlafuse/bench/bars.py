"""The speeds the kernels are held to, and which measured shapes miss them.

Where memory sets the time, a bar is a share of the copy ceiling (a plain copy of as many bytes, of the same run) and a
ratio to XLA; where matrix products do, a ratio to the fastest of XLA and the peers. At small sizes a call may take at
most a microsecond longer than XLA's.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from pallas_kernels import REGISTRY
from xlafuse.bench.ceiling import COPY
from xlafuse.bench.products import is_bound_by_products
from xlafuse.bench.rows import Row, rival_names

_SHAPES = ("32768x4096-bfloat16", "8192x8192-bfloat16", "16384x4096-float32")
_SMALL_ROWS = 64
SMALL_US = 1.0
"""How much longer than XLA's a small call may take."""


@dataclass(frozen=True, kw_only=True)
class Bar:
    """What operations must reach in a phase, on the shapes whose names begin with one of `shapes`.

    over_xla: the ratio, or None where none is asked for; over_xla_dtypes: the dtypes that it is asked of.
    """

    operations: tuple[str, ...]
    phases: tuple[str, ...]
    share: float
    over_xla: float | None
    shapes: tuple[str, ...] = _SHAPES
    over_xla_dtypes: tuple[str, ...] = ("bfloat16", "float32")

    def applies(self, row: Row) -> bool:
        """Whether the row is one of those that this bar is about."""
        shape = row.main
        return shape.op in self.operations and shape.phase in self.phases and shape.spec.startswith(self.shapes)


_BOTH = ("forward", "backward")
BARS = (
    Bar(operations=("rms_norm", "layer_norm"), phases=("forward",), share=0.97, over_xla=1.4),
    Bar(operations=("rms_norm", "layer_norm"), phases=("backward",), share=0.88, over_xla=3.0),
    Bar(operations=("softmax",), phases=("forward",), share=0.96, over_xla=1.3),
    Bar(operations=("softmax",), phases=("backward",), share=0.92, over_xla=1.3),
    Bar(operations=("bias_activation", "gated_activation"), phases=_BOTH, share=0.96, over_xla=1.4,
        over_xla_dtypes=("bfloat16",)),
    Bar(operations=("rope",), phases=_BOTH, share=0.96, over_xla=1.4, over_xla_dtypes=("bfloat16",),
        shapes=("2x4096", "8x4096", "4x4096")),
    Bar(operations=("cross_entropy",), phases=("backward",), share=0.90, over_xla=1.8,
        shapes=("8192x128256-bfloat16-reduction_mean",)),
    Bar(operations=("dropout_residual_norm",), phases=("forward",), share=0.95, over_xla=2.0),
    Bar(operations=("linear", "gated_linear"), phases=("forward",), share=0.93, over_xla=None, shapes=("16-", "1-")),
    Bar(operations=("decode_attention",), phases=("forward",), share=0.90, over_xla=None, shapes=("16x32768",)),
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """A row beside its bar. Shares and ratios count as met where they round to the bar's two digits."""

    row: Row
    bar: Bar

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


def verdicts(table: Iterable[Row]) -> list[Verdict]:
    """Of every row that a bar is about and that was measured."""
    return [Verdict(row=row, bar=bar) for row in table for bar in BARS if row.ours and bar.applies(row)]


@dataclass(frozen=True, kw_only=True)
class ProductBar:
    """How many times as fast as the fastest rival an operation must be, on shapes whose names begin with `shapes`."""

    operations: tuple[str, ...]
    phases: tuple[str, ...]
    over_best: float
    shapes: tuple[str, ...]

    def applies(self, row: Row) -> bool:
        """Whether the row is one of those that this bar is about."""
        shape = row.main
        return shape.op in self.operations and shape.phase in self.phases and shape.spec.startswith(self.shapes)


_FORWARD = ("forward",)
PRODUCT_BARS = (
    ProductBar(operations=("linear",), phases=_FORWARD, over_best=1.00,
               shapes=("8192-4096-4096-bfloat16", "512-4096-4096-bfloat16")),
    ProductBar(operations=("linear",), phases=_FORWARD, over_best=1.06, shapes=("8192-4096-16384-bfloat16-bias",)),
    ProductBar(operations=("linear",), phases=_FORWARD, over_best=1.02, shapes=("8192-14336-4096-bfloat16-residual",)),
    ProductBar(operations=("linear",), phases=_FORWARD, over_best=1.10,
               shapes=("512-4096-16384-bfloat16-bias", "512-14336-4096-bfloat16-residual")),
    ProductBar(operations=("gated_linear",), phases=_FORWARD, over_best=1.05, shapes=("8192-",)),
    ProductBar(operations=("gated_linear",), phases=_FORWARD, over_best=1.10, shapes=("512-",)),
    ProductBar(operations=("qkv_projection",), phases=_FORWARD, over_best=1.06, shapes=("8192-",)),
    ProductBar(operations=("qkv_projection",), phases=_FORWARD, over_best=1.10, shapes=("512-",)),
    ProductBar(operations=("linear_residual_norm",), phases=_FORWARD, over_best=1.02, shapes=("8192-14336",)),
    ProductBar(operations=("linear_residual_norm",), phases=_FORWARD, over_best=1.10, shapes=("512-14336",)),
    ProductBar(operations=("lora_linear",), phases=_FORWARD, over_best=1.08,
               shapes=("8192-4096-4096-rank16", "8192-4096-14336-rank16")),
    ProductBar(operations=("lora_linear",), phases=_FORWARD, over_best=1.20, shapes=("512-",)),
    ProductBar(operations=("attention",), phases=_FORWARD, over_best=1.05,
               shapes=("4x4096x4096x32x8x128-", "2x4096x4096x32x8x128-", "1x16384x16384x32x8x128-")),
    ProductBar(operations=("attention",), phases=_FORWARD, over_best=1.00,
               shapes=("4x4096x4096x32x8x64-", "4x4096x4096x16x4x256-")),
    ProductBar(operations=("attention",), phases=("backward",), over_best=0.95,
               shapes=("4x4096x4096x32x8x64-", "4x4096x4096x16x4x256-")),
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class ProductVerdict:
    """A row beside its bar; the ratio counts as met where it rounds to the bar's two digits."""

    row: Row
    bar: ProductBar

    @property
    def best_rival(self) -> str:
        """The fastest of XLA and the peers, each against ours of its own run."""
        names = [name for name in ("xla", *rival_names([self.row])) if math.isfinite(self.row.speed_up(name))]
        return min(names, key=self.row.speed_up, default="xla")

    @property
    def over_best(self) -> float:
        """Times as fast as that one."""
        return self.row.speed_up(self.best_rival)

    @property
    def is_met(self) -> bool:
        """Whether the ratio is large enough."""
        return round(self.over_best, 2) >= self.bar.over_best


def product_verdicts(table: Iterable[Row]) -> list[ProductVerdict]:
    """Of every row that a bar on products is about and that was measured."""
    return [ProductVerdict(row=row, bar=bar) for row in table for bar in PRODUCT_BARS if row.ours and bar.applies(row)]


def small_calls(table: Iterable[Row]) -> list[Row]:
    """The shapes of at most 64 rows (rope: tokens) that stay in the L2 cache: decoding steps."""
    small = [row for row in table if row.ours and not row.main.is_large and not is_bound_by_products(row.main)]
    return [row for row in small if _rows_of(row) <= _SMALL_ROWS]


def slow_small_calls(table: Iterable[Row]) -> list[Row]:
    """Those on which ours takes more than `SMALL_US` longer than XLA."""
    small = small_calls(table)
    return [row for row in small if row.main.microseconds(row.ours) - row.main.microseconds("xla") > SMALL_US]


def _rows_of(row: Row) -> float:
    """The spec's leading dimensions multiplied: "64x4096-bfloat16" has 64, a product's "16-4096-1024-bfloat16" 16."""
    head = row.main.spec.partition("-")[0].partition("+")[0].split("x")
    sizes = [int(size) for size in head if size.isdigit()]
    op = REGISTRY.get(row.main.op)
    if op is not None and op.flops is not None:
        return math.prod(sizes[:1])
    kept = sizes[:2] if row.main.op == "rope" else sizes[:-1]  # rope: batch x tokens x heads + key heads x head size
    return math.prod(kept) if sizes else math.inf
