"""The speeds that kernels are held to, and which measured shapes reach them.

Where memory bounds an operation, a goal is a share of the speed of a plain copy of as many bytes, and a ratio to XLA.
Where matrix products bound it, a goal is a ratio to the fastest of XLA and the peers, or to a peer that the goal names.
A small call may take at most a microsecond longer than XLA's.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import product

from pallas_kernels import REGISTRY
from pallas_kernels.specs import plain
from xlafuse.bench.ceiling import COPY
from xlafuse.bench.coverage import implementations
from xlafuse.bench.results import PHASES, ShapeResult
from xlafuse.bench.rows import RIDGE, RIVALS, Row, is_bound_by_products, product_flops, rival_names
from xlafuse.bench.timing import L2_CACHE_BYTES

SMALL_ROWS = 64
SMALL_US = 1.0
"""How much longer than XLA's a call of at most `SMALL_ROWS` rows may take."""


@dataclass(frozen=True, kw_only=True)
class Goal:
    """A ratio of speeds that operations must reach in each of some phases.

    shapes: patterns of spec names, `*` for any part.
    least: the ratio; None where it is only reported.
    to: whose speed: "copy", "fastest" of all that were timed beside ours, "choice" (of what `implementation=None` takes
        over the fastest implementation or variant), "without dropout" (the operation's own), "small" (XLA's with a
        microsecond more), or the name of a rival.
    rivals: what must be timed beside ours for the ratio to count in full.
    together: whether the times of all phases are added up, of one visit.
    """

    operations: tuple[str, ...]
    phases: tuple[str, ...]
    shapes: tuple[str, ...]
    least: float | None
    to: str = "fastest"
    rivals: tuple[str, ...] = ()
    together: bool = False

    def covers(self, op: str, spec: str) -> bool:
        """Whether the goal is about the operation on that shape."""
        return op in self.operations and any(fnmatchcase(spec, shape) for shape in self.shapes)

    def calls(self) -> Iterator[tuple[str, str]]:
        """Operation and spec of each timed call that the goal is about, in the registry's order."""
        for op in REGISTRY.values():
            for spec in op.tagged("bench"):
                if self.covers(op.name, spec.name):
                    yield op.name, spec.name

    @property
    def words(self) -> str:
        """'1.03 × XLA'."""
        return f"{self.least:.2f} × {_TO.get(self.to) or rival_label(self.to)}"


_TO = {
    "copy": "the copy",
    "fastest": "the fastest rival",
    "choice": "the fastest implementation",
    "without dropout": "its own speed without dropout",
    "small": f"XLA with {SMALL_US:.0f} µs more",
}
_FORWARD, _BACKWARD = ("forward",), ("backward",)
_BOTH = ("forward", "backward")
_ROWS = ("32768x4096-bfloat16*", "8192x8192-bfloat16*", "16384x4096-float32*")
_ROWS_16_BIT = _ROWS[:2]
_TOKENS = ("2x4096*", "8x4096*", "4x4096*")
_TOKENS_16_BIT = ("2x4096*", "8x4096*")
_FEW = ("16-*", "1-*")


def _by_memory(
    operations: tuple[str, ...],
    phases: tuple[str, ...],
    shapes: tuple[str, ...],
    *,
    copy: float,
    xla: float | None = None,
    xla_shapes: tuple[str, ...] | None = None,
) -> tuple[Goal, ...]:
    """A share of the copy's speed, and a ratio to XLA on `xla_shapes`, which are all shapes by default."""
    goals = [Goal(operations=operations, phases=phases, shapes=shapes, least=copy, to="copy")]
    if xla is not None:
        goals.append(Goal(operations=operations, phases=phases, shapes=xla_shapes or shapes, least=xla, to="xla"))
    return tuple(goals)


_NORMS, _ACTIVATIONS = ("rms_norm", "layer_norm"), ("bias_activation", "gated_activation")
_MEMORY_GOALS = (
    *_by_memory(_NORMS, _FORWARD, _ROWS, copy=0.97, xla=1.4),
    *_by_memory(_NORMS, _BACKWARD, _ROWS, copy=0.88, xla=3.0),
    *_by_memory(("softmax",), _FORWARD, _ROWS, copy=0.96, xla=1.3),
    *_by_memory(("softmax",), _BACKWARD, _ROWS, copy=0.92, xla=1.3),
    *_by_memory(_ACTIVATIONS, _BOTH, _ROWS, copy=0.96, xla=1.4, xla_shapes=_ROWS_16_BIT),
    *_by_memory(("rope",), _BOTH, _TOKENS, copy=0.96, xla=1.4, xla_shapes=_TOKENS_16_BIT),
    *_by_memory(("cross_entropy",), _BACKWARD, ("8192x128256-bfloat16-reduction_mean",), copy=0.90, xla=1.8),
    *_by_memory(("dropout_residual_norm",), _FORWARD, _ROWS, copy=0.95, xla=2.0),
    *_by_memory(("linear", "gated_linear", "norm_linear"), _FORWARD, _FEW, copy=0.93),
    *_by_memory(("qkv_projection",), _FORWARD, _FEW, copy=0.90),
    *_by_memory(("linear_residual_norm",), _FORWARD, ("16-14336-*", "1-14336-*"), copy=0.93),
    *_by_memory(("decode_attention",), _FORWARD, ("16x32768-*",), copy=0.90),
)


def _product(operation: str, least: float, *shapes: str, to: str = "fastest") -> Goal:
    rivals = ("xla", "torch_compile") if to == "fastest" else (to,)
    return Goal(operations=(operation,), phases=_FORWARD, shapes=shapes, least=least, to=to, rivals=rivals)


_PRODUCT_GOALS = (
    _product("linear", 1.00, "8192-4096-4096-bfloat16", "512-4096-4096-bfloat16"),
    _product("linear", 1.06, "8192-4096-16384-bfloat16-bias-*"),
    _product("linear", 1.02, "8192-14336-4096-bfloat16-residual"),
    _product("linear", 1.10, "512-4096-16384-bfloat16-bias-*", "512-14336-4096-bfloat16-residual"),
    _product("gated_linear", 1.05, "8192-*"),
    _product("gated_linear", 1.10, "512-*"),
    _product("qkv_projection", 1.06, "8192-*"),
    _product("qkv_projection", 1.10, "512-*"),
    _product("linear_residual_norm", 1.02, "8192-14336-*"),
    _product("linear_residual_norm", 1.10, "512-14336-*"),
    _product("quantized_linear", 1.00, "8192-*-int8*", to="xla_bf16"),
    _product("quantized_linear", 1.10, "512-*-int8*", to="xla_bf16"),
    _product("quantized_linear", 1.70, "16-*-int8*", "1-*-int8*", to="xla_bf16"),
    _product("lora_linear", 1.08, "8192-*-rank16-*"),
    _product("lora_linear", 1.20, "512-*-rank16-*"),
    # Of a reduced loss this phase is the loss and all gradients.
    Goal(operations=("linear_cross_entropy",), phases=_BACKWARD, least=1.03, to="xla", rivals=("xla",),
         shapes=("4096-4096-128256-bfloat16-reduction_mean",)),
)  # fmt: skip


def _attention(
    phases: tuple[str, ...],
    least: float | None,
    shapes: tuple[str, ...],
    rivals: tuple[str, ...] = (),
    *,
    to: str = "fastest",
    together: bool = False,
) -> Goal:
    return Goal(
        operations=("attention",), phases=phases, shapes=shapes, least=least, to=to, rivals=rivals, together=together
    )


_FULL, _CAUSAL = ("cudnn", "torch_eager", "jax_mosaic"), ("cudnn", "torch_eager", "jla")
"""Rivals without a mask, and under a causal one in both passes; forward JAX's own kernel is one of these, too."""
_CAUSAL_FORWARD = (*_CAUSAL, "jax_mosaic")
_FULL_128 = ("4x4096x4096x32x8x128-bfloat16", "1x16384x16384x32x8x128-bfloat16")
_CAUSAL_128 = (*(f"{full}-causal" for full in _FULL_128), "2x4096x4096x32x8x128-bfloat16-causal")
_OTHER_FULL = ("4x4096x4096x32x8x64-bfloat16", "4x4096x4096x16x4x256-bfloat16")
_OTHER_CAUSAL = ("4x4096x4096x32x8x64-bfloat16-causal",)
_WIDE_CAUSAL = ("4x4096x4096x16x4x256-bfloat16-causal",)
"""Of a head size that jla does not take."""
_WINDOW = "1x16384x16384x32x8x128-bfloat16-causal-window_1023_0"
_PACKED = "1x16384x16384x32x8x128-bfloat16-8_documents-causal"
_DROPOUT = "-dropout_0.1"
_DROPPED = (f"*{_DROPOUT}",)
_SHORT = (
    "16x1x1x*", "1x1x1x*", "16x1x4096x*", "16x16x4096x*", "16x16x16x*", "16x128x128x*", "1x512x512x*", "16x512x512x*",
)  # fmt: skip
_ATTENTION_GOALS = (
    _attention(_FORWARD, 1.05, _FULL_128, _FULL),
    _attention(_FORWARD, 1.05, _CAUSAL_128, _CAUSAL_FORWARD),
    _attention(_BOTH, 1.03, _FULL_128, _FULL, together=True),
    _attention(_BOTH, 1.03, _CAUSAL_128, _CAUSAL, together=True),
    _attention(_FORWARD, 1.00, _OTHER_FULL, _FULL),
    _attention(_FORWARD, 1.00, _OTHER_CAUSAL, _CAUSAL_FORWARD),
    _attention(_FORWARD, 1.00, _WIDE_CAUSAL, _FULL),
    _attention(_BACKWARD, 0.95, _OTHER_FULL, _FULL),
    _attention(_BACKWARD, 0.95, _OTHER_CAUSAL, _CAUSAL),
    _attention(_BACKWARD, 0.95, _WIDE_CAUSAL, ("cudnn", "torch_eager")),
    _attention(_FORWARD, 1.05, (_WINDOW, _PACKED), ("cudnn", "jla")),
    _attention(_FORWARD, 3.0, (_WINDOW,), to="cudnn_dense_mask"),
    # The peer cuDNN has a dense mask here.
    _attention(_FORWARD, 3.0, (_PACKED,), to="cudnn"),
    _attention(_FORWARD, 0.85, _DROPPED, to="without dropout"),
    _attention(_BACKWARD, None, _DROPPED, to="without dropout"),
    _attention(
        _BOTH,
        0.98,
        (*_FULL_128, *_CAUSAL_128, *_OTHER_FULL, *_OTHER_CAUSAL, *_WIDE_CAUSAL, _WINDOW, *_SHORT),
        ("xla", "cudnn"),
        to="choice",
    ),
    # cuDNN is no implementation of these: no dropout with our mask, no segments.
    _attention(_BOTH, 0.98, (_PACKED, *_DROPPED), ("xla",), to="choice"),
    Goal(operations=("decode_attention",), phases=_FORWARD, shapes=("*",), least=0.98, to="choice", rivals=("xla",)),
)
GOALS = (*_MEMORY_GOALS, *_PRODUCT_GOALS, *_ATTENTION_GOALS)


@functools.cache
def small_goals() -> tuple[Goal, ...]:
    """For each operation and phase, its calls of few rows that stay in the L2 cache: decoding steps."""
    goals = []
    for op in REGISTRY.values():
        for phase in PHASES if op.differentiable else PHASES[:1]:
            traffic = op.forward_traffic if phase == "forward" else op.backward_traffic
            names = []
            for spec in op.tagged("bench"):
                structs = plain(spec.structs())
                moved = traffic(structs).bytes
                by_memory = op.flops is None or op.flops(structs, phase) <= RIDGE * moved
                if _row_count(op.name, spec.name) <= SMALL_ROWS and moved < 2 * L2_CACHE_BYTES and by_memory:
                    names.append(spec.name)
            if names:
                goals.append(Goal(operations=(op.name,), phases=(phase,), shapes=tuple(names), least=1.0, to="small"))
    return tuple(goals)


def _row_count(operation: str, spec: str) -> float:
    """The spec's leading dimensions multiplied: "64x4096-bfloat16" has 64, a product's "16-4096-1024-bfloat16" 16."""
    head = spec.partition("-")[0].partition("+")[0].split("x")
    sizes = [int(size) for size in head if size.isdigit()]
    if REGISTRY[operation].flops is not None:
        return math.prod(sizes[:1])
    kept = sizes[:2] if operation == "rope" else sizes[:-1]  # rope: batch x tokens x heads + key heads x head size
    return math.prod(kept) if sizes else math.inf


def _is_taken(row: Row) -> bool:
    """Whether a call without an implementation takes what the row quotes; a spec that is no longer here counts."""
    op = REGISTRY[row.main.op]
    spec = next((spec for spec in op.arg_specs if spec.name == row.main.spec), None)
    return spec is None or implementations(op, spec)[0] == row.ours


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """A measured ratio beside its goal; it counts as met where it rounds to the goal's two digits.

    shapes: what was measured of ours, a phase each, all of one visit.
    ratio: times as fast as `than`; of another run than the shapes where `than` says so.
    absent: the goal's rivals that no run had beside ours, though they did not refuse the shape.
    """

    goal: Goal
    shapes: tuple[ShapeResult, ...]
    ours: str
    ratio: float
    than: str
    absent: tuple[str, ...] = ()

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
        return self.goal.least is None or round(self.ratio, 2) >= self.goal.least

    @property
    def copy_ratio(self) -> float:
        """What a kernel as fast as the copy would have, where the goal is a ratio to XLA and memory bounds the call."""
        shape = self.shapes[0]
        is_asked = self.goal.to == "xla" and not is_bound_by_products(shape)
        return shape.microseconds("xla") / shape.microseconds(COPY) if is_asked else math.inf

    @property
    def is_out_of_reach(self) -> bool:
        """Whether not even a kernel as fast as the copy would reach the goal."""
        return not self.is_met and self.copy_ratio < (self.goal.least or 0)


Table = Mapping[tuple[str, str, str], Row]
"""Rows by operation, spec and phase."""


def verdicts(rows: Iterable[Row]) -> list[Verdict]:
    """One for every goal on every shape that was measured."""
    return [verdict for _, verdict in _judged(rows) if verdict is not None]


def unmeasured(rows: Iterable[Row]) -> list[tuple[Goal, str, str, str]]:
    """Goal, operation, phase and spec of each goal on a shape that no run measured, or not beside what counts.

    Small calls of matrix products have a goal where they are measured.
    """
    absent = [call for call, verdict in _judged(rows) if verdict is None and call[0].least is not None]
    return [call for call in absent if call[0].to != "small" or REGISTRY[call[1]].flops is None]


def _judged(rows: Iterable[Row]) -> Iterator[tuple[tuple[Goal, str, str, str], Verdict | None]]:
    table = {row.main.key: row for row in rows if row.ours}
    for goal in (*GOALS, *small_goals()):
        for op, spec in goal.calls():
            for phases in (goal.phases,) if goal.together else ((phase,) for phase in goal.phases):
                found = [table[op, spec, phase] for phase in phases if (op, spec, phase) in table]
                if goal.to == "small" and found and not _is_taken(found[0]):
                    continue
                verdict = _verdict(goal, table, found) if len(found) == len(phases) else None
                yield (goal, op, " + ".join(phases), spec), verdict


def _verdict(goal: Goal, table: Table, rows: Sequence[Row]) -> Verdict | None:
    row = rows[0]
    times = row.main.microseconds
    if goal.to == "copy":
        return Verdict(goal=goal, shapes=(row.main,), ours=row.ours, ratio=times(COPY) / times(row.ours), than="copy")
    if goal.to == "small":
        ratio = (times("xla") + SMALL_US) / times(row.ours)
        return Verdict(goal=goal, shapes=(row.main,), ours=row.ours, ratio=ratio, than=_TO["small"])
    if goal.to == "without dropout":
        without = table.get((row.main.op, row.main.spec.removesuffix(_DROPOUT), row.main.phase))
        return _beside_itself(goal, row, without) if without else None
    return _beside_choices(goal, row) if goal.to == "choice" else _beside_rivals(goal, rows)


def rival_label(name: str) -> str:
    """What tables call a rival."""
    return RIVALS.get(name, name)


def _beside_rivals(goal: Goal, rows: Sequence[Row]) -> Verdict | None:
    """The ratio of sums over the rows, for each rival of the last visit that has all of them beside ours."""
    names = dict.fromkeys(("xla", *goal.rivals, *rival_names(rows))) if goal.to == "fastest" else (goal.to,)
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
    return Verdict(
        goal=goal,
        shapes=tuple(shape for _, shape in own),
        ours=ours,
        ratio=ratio(best),
        than=rival_label(best) + (f", run {elsewhere[0]}" if elsewhere else ""),
        absent=_absent_rivals(goal, sources, [shape for row in rows for shape in row.runs.values()]),
    )


def _absent_rivals(goal: Goal, timed: Container[str], shapes: Iterable[ShapeResult]) -> tuple[str, ...]:
    """The goal's rivals that were not timed, without those that said that they cannot run these shapes."""
    problems = [problem for shape in shapes for problem in shape.problems]
    # A library that is not there is "unsupported" too.
    refused = {problem.candidate for problem in problems if problem.message.startswith(NotImplementedError.__name__)}
    return tuple(rival_label(name) for name in goal.rivals if name not in timed and name not in refused)


def _beside_itself(goal: Goal, row: Row, without: Row) -> Verdict | None:
    for visit in sorted(set(row.visits), reverse=True):
        for shape, other in product(row.in_visit(visit).values(), without.in_visit(visit).values()):
            ratio = other.microseconds(row.ours) / shape.microseconds(row.ours)
            if math.isfinite(ratio):
                return Verdict(goal=goal, shapes=(shape,), ours=row.ours, ratio=ratio, than="itself without dropout")
    return None


def _beside_choices(goal: Goal, row: Row) -> Verdict | None:
    """What a call without a name takes, of the dispatch rules as they are now, in the row's last run."""
    op, shape = REGISTRY[row.main.op], row.main
    spec = next(spec for spec in op.arg_specs if spec.name == shape.spec)
    taken = next((name for name in implementations(op, spec) if math.isfinite(shape.microseconds(name))), row.ours)
    kinds = ("implementation", "variant")
    others = [c.name for c in shape.candidates if c.name != taken and (c.kind in kinds or c.name in goal.rivals)]
    if not others:
        return None
    best = min(others, key=shape.microseconds)
    absent = _absent_rivals(goal, (*others, taken), [shape])
    return Verdict(
        goal=goal,
        shapes=(shape,),
        ours=taken,
        ratio=shape.speed_up(taken, best),
        than=best.removeprefix("variant: ") if best.startswith("variant: ") else rival_label(best),
        absent=absent,
    )
