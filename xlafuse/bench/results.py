"""Records of a kernel benchmark, and their JSON: write, read, merge."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, Literal

from pydantic import TypeAdapter, ValidationError

from xlafuse.bench.environment import Activity, Environment
from xlafuse.bench.timing import L2_CACHE_BYTES, Timing
from xlafuse.errors import XlafuseError

SCHEMA_VERSION = 2
_VISIT = timedelta(hours=2)
PHASES = ("forward", "backward")


class ResultsError(XlafuseError, ValueError):
    """A file of results cannot be read or merged; the message has the file and the reason."""


@dataclass(frozen=True, kw_only=True)
class Problem:
    """A candidate that gave no time: it failed, or ("unsupported") takes no such arguments or is not installed."""

    candidate: str
    message: str
    kind: Literal["failed", "unsupported"] = "failed"


@dataclass(frozen=True, kw_only=True)
class Measured:
    """A candidate on a shape. kind: see `timing.Candidate`.

    lower_seconds, compile_seconds: until the first call of a whole model can run, tracing and XLA's part. peak_bytes:
    the device memory of that program, arguments included.
    """

    name: str
    kind: Literal["implementation", "default", "variant", "peer", "ceiling", "strategy"]
    timing: Timing
    lower_seconds: float | None = None
    compile_seconds: float | None = None
    peak_bytes: int | None = None


@dataclass(frozen=True, kw_only=True)
class ShapeResult:
    """One phase of one operation on one shape, all candidates timed in turns.

    bytes: what a perfect kernel reads and writes.
    ceiling: the name of the candidate that is the copy ceiling.
    sets: sets of buffers that took turns.
    activity: clocks and power while this shape was timed.
    """

    op: str
    phase: str
    spec: str
    bytes: int
    ceiling: str | None
    candidates: tuple[Measured, ...]
    problems: tuple[Problem, ...] = ()
    sets: int = 1
    seconds: float = 0.0
    warm_up_seconds: float = 0.0
    is_steady: bool = True
    activity: Activity | None = None

    @property
    def key(self) -> tuple[str, str, str]:
        """Identifies the shape in a merged file."""
        return self.op, self.spec, self.phase

    @property
    def is_large(self) -> bool:
        """Whether a call moves so much that memory, and no launch or cache, sets its time."""
        return self.bytes >= 2 * L2_CACHE_BYTES

    def microseconds(self, name: str) -> float:
        """The median of a candidate, NaN where it was not timed."""
        return next((c.timing.median_us for c in self.candidates if c.name == name), math.nan)

    def gigabytes_per_second(self, name: str) -> float:
        """The perfect kernel's bytes over a candidate's time."""
        return self.bytes / self.microseconds(name) / 1e3

    def ceiling_share(self, name: str) -> float:
        """The ceiling's time over a candidate's: 1 at the ceiling."""
        return self.microseconds(self.ceiling or "") / self.microseconds(name)

    def speed_up(self, name: str, over: str) -> float:
        """How many times as fast as the candidate `over`."""
        return self.microseconds(over) / self.microseconds(name)

    def of_kind(self, kind: str) -> tuple[Measured, ...]:
        """The candidates of a kind."""
        return tuple(c for c in self.candidates if c.kind == kind)

    @property
    def chosen(self) -> str | None:
        """The implementation to quote: "mosaic" where it was timed, else the first that is not "xla", else "xla"."""
        names = [c.name for c in self.of_kind("implementation")]
        return min(names, key=lambda name: (name != "mosaic", name == "xla"), default=None)


@dataclass(frozen=True, kw_only=True)
class Run:
    """One process's measurements. left_out: operations or shapes that were not reached, with the reason."""

    started: str
    environment: Environment
    settings: Mapping[str, Any]
    shapes: tuple[ShapeResult, ...] = ()
    left_out: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Results:
    """A file of results. Ratios hold within a shape, whose candidates ran together."""

    runs: tuple[Run, ...]
    schema_version: int = field(default=SCHEMA_VERSION)

    @property
    def shapes(self) -> tuple[ShapeResult, ...]:
        """Of all runs."""
        return tuple(shape for run in self.runs for shape in run.shapes)

    @property
    def visits(self) -> tuple[int, ...]:
        """For each run the index of its visit's first: runs on one kind of GPU that began within two hours."""
        found: dict[int, int] = {}
        for i in sorted(range(len(self.runs)), key=lambda i: self.runs[i].started):
            run = self.runs[i]
            found[i] = next((first for first in set(found.values()) if _is_one_visit(self.runs[first], run)), i)
        return tuple(found[i] for i in range(len(self.runs)))


def _is_one_visit(first: Run, run: Run) -> bool:
    def place(each: Run) -> tuple[str, ...]:
        gpu = each.environment.gpu
        return tuple(gpu.get(name, "") for name in ("gpu", "driver", "power_limit_watts"))

    if place(first) != place(run):
        return False
    return abs(datetime.fromisoformat(run.started) - datetime.fromisoformat(first.started)) <= _VISIT


_RESULTS = TypeAdapter(Results)


def to_json(results: Results) -> str:
    """The file's text, the same for equal results."""
    return json.dumps(asdict(results), indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def load(path: Path) -> Results:
    """What `write` wrote.

    Raises:
        ResultsError: no such file, not JSON, or of another schema version.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ResultsError(f"expected a file of benchmark results at {path}: {error}") from None
    version = data.get("schema_version") if isinstance(data, dict) else None
    if version != SCHEMA_VERSION:
        raise ResultsError(
            f"{path} has schema version {version!r}, expected {SCHEMA_VERSION}; measure again with this package"
        )
    try:
        return _RESULTS.validate_python(data, strict=False)
    except ValidationError as error:
        raise ResultsError(f"{path} is not a file of benchmark results: {str(error)[:500]}") from None


def write(path: Path, results: Results) -> None:
    """Writes all of it or nothing: a temporary file beside `path`, renamed."""
    text = to_json(results)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def rivals(shape: ShapeResult) -> tuple[str, ...]:
    """What was timed beside ours and XLA: other libraries, and the operation's Triton kernels and calls of cuDNN."""
    ours = ("mosaic", "xla")
    named = [
        c.name for c in shape.candidates if c.kind == "peer" or (c.kind == "implementation" and c.name not in ours)
    ]
    return tuple(name for name in named if name != shape.chosen)


def merge(parts: Iterable[Results]) -> Results:
    """One file of several: where a shape was measured more than once, the last in order counts.

    Of earlier measurements those stay, beside it, that have a rival which no later one has: libraries that cannot be in
    one process are measured in several runs. See `xlafuse.bench.rows`.

    Raises:
        ResultsError: measured on different kinds of GPU.
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
    """All of it where `seen` is None; else what its rivals outside `seen` are compared with; None without such."""
    if seen is None:
        return shape
    if seen.issuperset(rivals(shape)):
        return None
    kept = tuple(c for c in shape.candidates if c.kind != "variant" and c.name not in seen)
    return replace(shape, candidates=kept, problems=())


_SHORT_DTYPES = {"bfloat16": "bf16", "float16": "f16", "float32": "f32"}


def short_spec(spec: str) -> str:
    """A spec's name with short dtypes."""
    for long, short in _SHORT_DTYPES.items():
        spec = spec.replace(long, short)
    return spec


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[str]], align: str) -> str:
    """A table in Markdown. align: 'l' or 'r' for each column."""
    lines = [header, [{"l": "---", "r": "---:"}[each] for each in align], *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def geometric_mean(values: Sequence[float]) -> float:
    """Of what is finite and above zero; NaN of nothing."""
    logarithms = [math.log(value) for value in values if value > 0 and math.isfinite(value)]
    return math.exp(sum(logarithms) / len(logarithms)) if logarithms else math.nan
