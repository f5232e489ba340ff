"""Records of a kernel benchmark, and how they are written, read and merged as JSON."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from pydantic import TypeAdapter

from xlafuse.bench.environment import Activity, Environment
from xlafuse.bench.timing import L2_CACHE_BYTES, Timing
from xlafuse.errors import XlafuseError
from xlafuse.files import read_record, to_json, write_files

SCHEMA_VERSION = 2


class ResultsError(XlafuseError, ValueError):
    """A file of results cannot be read or merged; the message names the file and the reason."""


@dataclass(frozen=True, kw_only=True)
class Problem:
    """Candidate without a time: it failed, or is "unsupported" because it refuses the arguments or is not installed."""

    candidate: str
    message: str
    kind: Literal["failed", "unsupported"] = "failed"


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Timing of one candidate on one shape.

    kind: see `timing.Candidate`.
    lower_seconds, compile_seconds: tracing time and XLA's time before a whole model's first call.
    peak_bytes: device memory of that program, arguments included.
    tokens_per_second: tokens, or what the result's `unit` says, a second of a whole model, by wall clock; on several
        GPUs those of one.
    flops_share: FLOPs of the model's products over what the GPU's peak allows in that time (MFU), of public models and
        on several GPUs.
    error: largest error of the results that were compared with the baseline's, as a share of their norm.
    """

    name: str
    kind: Literal["implementation", "default", "variant", "peer", "ceiling", "strategy"]
    timing: Timing
    lower_seconds: float | None = None
    compile_seconds: float | None = None
    peak_bytes: int | None = None
    tokens_per_second: float | None = None
    flops_share: float | None = None
    error: float | None = None


@dataclass(frozen=True, kw_only=True)
class ShapeResult:
    """One phase of one operation on one shape, with all candidates timed in turns.

    bytes: bytes that a perfect kernel reads and writes; 0 where they are not counted.
    ceiling: name of the candidate that serves as the copy ceiling.
    sets: number of buffer sets that took turns.
    activity: clocks and power during the timing.
    unit: what `Measured.tokens_per_second` counts.
    """

    op: str
    phase: str
    spec: str
    bytes: int = 0
    ceiling: str | None = None
    candidates: tuple[Measured, ...] = ()
    problems: tuple[Problem, ...] = ()
    sets: int = 1
    seconds: float = 0.0
    warm_up_seconds: float = 0.0
    is_steady: bool = True
    activity: Activity | None = None
    unit: str = "tokens"

    @property
    def key(self) -> tuple[str, str, str]:
        """Identifies the shape in a merged file."""
        return self.op, self.spec, self.phase

    @property
    def is_large(self) -> bool:
        """Whether a call moves enough bytes that memory sets its time, and neither the launch nor the cache."""
        return self.bytes >= 2 * L2_CACHE_BYTES

    def microseconds(self, name: str) -> float:
        """Returns a candidate's median time, or NaN if it was not timed."""
        return next((c.timing.median_us for c in self.candidates if c.name == name), math.nan)

    def gigabytes_per_second(self, name: str) -> float:
        """Returns a candidate's bandwidth: the perfect kernel's bytes over the candidate's time."""
        return self.bytes / self.microseconds(name) / 1e3

    def ceiling_share(self, name: str) -> float:
        """Returns the ceiling's time over a candidate's time; 1 means at the ceiling."""
        return self.microseconds(self.ceiling or "") / self.microseconds(name)

    def speed_up(self, name: str, over: str) -> float:
        """Returns the speed-up of a candidate over another."""
        return self.microseconds(over) / self.microseconds(name)

    def of_kind(self, kind: str) -> tuple[Measured, ...]:
        """Returns the candidates of a kind."""
        return tuple(c for c in self.candidates if c.kind == kind)

    @property
    def chosen(self) -> str | None:
        """The implementation to quote: "mosaic" if it was timed, else the first other than "xla", else "xla"."""
        names = [c.name for c in self.of_kind("implementation")]
        return min(names, key=lambda name: (name != "mosaic", name == "xla"), default=None)


@dataclass(frozen=True, kw_only=True)
class Run:
    """Measurements of one process.

    left_out: operations or shapes that it did not reach, with the reason.
    """

    started: str
    environment: Environment
    settings: Mapping[str, Any]
    shapes: tuple[ShapeResult, ...] = ()
    left_out: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Results:
    """Contents of a file of results. Ratios are valid only within a shape, whose candidates ran together."""

    runs: tuple[Run, ...]
    schema_version: int = field(default=SCHEMA_VERSION)

    @property
    def shapes(self) -> tuple[ShapeResult, ...]:
        """The shapes of all runs."""
        return tuple(shape for run in self.runs for shape in run.shapes)


_RESULTS = TypeAdapter(Results)


def load(path: Path) -> Results:
    """Loads a file that `write` wrote; raises ResultsError if it is none, or has another schema version."""
    return read_record(path, _RESULTS, SCHEMA_VERSION, "a file of benchmark results", ResultsError)


def write(path: Path, results: Results) -> None:
    """Writes the whole file or nothing."""
    text = to_json(results)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_files(path.parent, {path.name: text})


def rivals(shape: ShapeResult) -> tuple[str, ...]:
    """Returns the candidates to compare ours with besides XLA: peers, and the operation's Triton and cuDNN calls."""
    ours = ("mosaic", "xla")
    named = [
        c.name for c in shape.candidates if c.kind == "peer" or (c.kind == "implementation" and c.name not in ours)
    ]
    return tuple(name for name in named if name != shape.chosen)


def merge(parts: Iterable[Results]) -> Results:
    """Merges files of results; the last measurement of a shape replaces earlier ones.

    An earlier measurement stays beside it if it has a rival that no later one has, since libraries that cannot share a
    process are measured in several runs. See `xlafuse.bench.rows`.

    Raises:
        ResultsError: the files are from different kinds of GPU.
    """
    runs = [run for part in parts for run in part.runs]
    kinds = sorted({run.environment.device_kind for run in runs if run.shapes})
    if len(kinds) > 1:
        raise ResultsError(f"expected results of one kind of GPU, got {', '.join(kinds)}; keep a file for each")
    measured = {" ".join((shape.op, shape.phase, shape.spec)) for run in runs for shape in run.shapes}
    kept: list[Run] = []
    seen: dict[tuple[str, str, str], set[str]] = {}
    for run in reversed(runs):
        shapes = tuple(shape for before in run.shapes if (shape := _what_is_new(before, seen.get(before.key))))
        for shape in run.shapes:
            seen.setdefault(shape.key, set()).update(rivals(shape))
        left_out = tuple(note for note in run.left_out if note.partition(":")[0] not in measured)
        if shapes or left_out:
            kept.append(replace(run, shapes=shapes, left_out=left_out))
    return Results(runs=tuple(reversed(kept)))


def _what_is_new(shape: ShapeResult, seen: set[str] | None) -> ShapeResult | None:
    """Returns the measurements to keep of a shape whose rivals `seen` were measured later.

    All of them stay if `seen` is None. Otherwise the new rivals and the candidates that they are compared with stay;
    without new rivals the result is None.
    """
    if seen is None:
        return shape
    if seen.issuperset(rivals(shape)):
        return None
    kept = tuple(c for c in shape.candidates if c.kind != "variant" and c.name not in seen)
    return replace(shape, candidates=kept, problems=())


_SHORT_DTYPES = {"bfloat16": "bf16", "float16": "f16", "float32": "f32"}


def short_spec(spec: str) -> str:
    """Returns a spec's name with short dtypes."""
    for long, short in _SHORT_DTYPES.items():
        spec = spec.replace(long, short)
    return spec


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[str]], align: str) -> str:
    """Formats a Markdown table. align: 'l' or 'r' for each column."""
    lines = [header, [{"l": "---", "r": "---:"}[each] for each in align], *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def geometric_mean(values: Sequence[float]) -> float:
    """Returns the geometric mean of the finite positive values; NaN if there are none."""
    logarithms = [math.log(value) for value in values if value > 0 and math.isfinite(value)]
    return math.exp(sum(logarithms) / len(logarithms)) if logarithms else math.nan
