"""Memory that compiled programs take, counted from XLA's buffer assignment for a GPU that need not be there.

The goal of a fused loss is that no array of logits is in memory: its temporary buffers must be smaller than one.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

import jax
import jax.numpy as jnp

from pallas_kernels import ArgSpec, OpSpec, get_op
from pallas_kernels.specs import plain
from xlafuse.bench.candidates import callable_of
from xlafuse.bench.environment import commit
from xlafuse.bench.results import PHASES, ResultsError, markdown_table, short_spec

SCHEMA_VERSION = 1
OPERATION, SPEC = "linear_cross_entropy", "4096-4096-128256-bfloat16-reduction_mean"


@dataclass(frozen=True, kw_only=True)
class MemoryCount:
    """Of one implementation on one shape. logits_bytes: of an array of all logits in the inputs' dtype."""

    op: str
    phase: str
    spec: str
    implementation: str
    temp_bytes: int
    peak_bytes: int
    logits_bytes: int


@dataclass(frozen=True, kw_only=True)
class MemoryCounts:
    """A file of them. target: see `xlafuse targets`."""

    date: str
    commit: str
    jax: str
    target: str
    counts: tuple[MemoryCount, ...]
    schema_version: int = SCHEMA_VERSION


def count(target: str = "h200") -> MemoryCounts:
    """Compiles the loss, ours and XLA's."""
    op = get_op(OPERATION)
    spec = next(spec for spec in op.arg_specs if spec.name == SPEC)
    counts = [_count(op, spec, phase, i, target) for phase in PHASES for i in ("mosaic", "xla")]
    now = f"{datetime.now(UTC):%Y-%m-%dT%H:%MZ}"
    return MemoryCounts(date=now, commit=commit(), jax=jax.__version__, target=target, counts=tuple(counts))


def _count(op: OpSpec, spec: ArgSpec, phase: str, implementation: str, target: str) -> MemoryCount:
    from hlo_analysis import capture

    structs = spec.structs()
    arguments = plain(structs)
    logits = math.prod(arguments["labels"].shape) * arguments["w"].shape[1] * arguments["hidden"].dtype.itemsize
    cotangents = (jax.ShapeDtypeStruct((), jnp.float32),)
    inputs = (structs,) if phase == "forward" else (structs, cotangents)
    memory = capture(callable_of(op, phase, implementation), *inputs, target=target).memory
    return MemoryCount(
        op=op.name,
        phase=phase,
        spec=spec.name,
        implementation=implementation,
        temp_bytes=memory.temp_bytes,
        peak_bytes=memory.peak_bytes,
        logits_bytes=logits,
    )


def write(path: Path, counts: MemoryCounts) -> None:
    """Writes them as JSON."""
    path.write_text(json.dumps(asdict(counts), indent=1) + "\n", encoding="utf-8")


def load(path: Path) -> MemoryCounts | None:
    """What `write` wrote; None where there is no such file.

    Raises:
        ResultsError: another schema version.
    """
    if not path.is_file():
        return None
    data = json.loads(path.read_text(encoding="utf-8"))
    if data.get("schema_version") != SCHEMA_VERSION:
        raise ResultsError(f"{path} has schema version {data.get('schema_version')!r}, expected {SCHEMA_VERSION}")
    return MemoryCounts(**{**data, "counts": tuple(MemoryCount(**each) for each in data["counts"])})


def is_met(found: MemoryCount) -> bool:
    """Whether the temporary buffers are too small to hold the logits."""
    return found.temp_bytes < found.logits_bytes


def markdown(counts: MemoryCounts | None) -> str:
    """A table of the counts beside the goal, or that nothing was counted."""
    if counts is None or not counts.counts:
        return "Memory: not counted."
    header = ["memory, MB", "", "shape", "implementation", "temporary", "logits", "at most"]
    table = markdown_table(header, [_cells(found) for found in counts.counts], "llllrrr")
    origin = f"{counts.date[:10]}, commit {counts.commit}, jax {counts.jax}, target {counts.target}"
    return (
        f"{table}\n\nCounted from the buffers of programs compiled without a GPU ({origin}). Temporary: beside "
        "arguments and results; at most: with them. The goal is that ours has less than the logits; misses in bold."
    )


def _cells(found: MemoryCount) -> list[str]:
    temporary, logits, peak = (f"{size / 1e6:.0f}" for size in (found.temp_bytes, found.logits_bytes, found.peak_bytes))
    is_missed = found.implementation == "mosaic" and not is_met(found)
    cells = [f"`{found.op}`", found.phase, short_spec(found.spec), f"`{found.implementation}`"]
    return [*cells, f"**{temporary}**" if is_missed else temporary, logits, peak]
