"""The kernel benchmark: every argument spec of an operation tagged "bench", against XLA and the copy ceiling.

    python -m xlafuse.bench.kernels --op rms_norm -o results.json [--variants] [--phase forward] [--match 8192x4096]

For each shape and phase it first checks values and gradients, then times in one interleaved run: a copy of the same
bytes (the ceiling), `"xla"`, the operation as dispatched, and with `--variants` each kernel configuration worth trying.
It prints one line a candidate and writes JSON. Needs an attached NVIDIA GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import ArgSpec, OpSpec, Traffic, get_op, testing
from pallas_kernels.specs import plain
from xlafuse.bench.environment import environment, gpu_state
from xlafuse.bench.timing import Timing, buffer_sets, time_candidates

SCHEMA_VERSION = 1
PHASES = ("forward", "backward")


@dataclass(frozen=True, kw_only=True)
class Row:
    """One candidate on one shape. `ceiling_share` and `over_xla` compare with the same run; NaN errors are not kept."""

    op: str
    phase: str
    spec: str
    candidate: str
    bytes: int
    gigabytes_per_second: float
    ceiling_share: float
    over_xla: float
    timing: Timing


@dataclass(frozen=True, kw_only=True)
class Problem:
    """A candidate or check that failed, with its message; the others go on."""

    op: str
    phase: str
    spec: str
    candidate: str
    message: str


def bench_shape(
    op: OpSpec, spec: ArgSpec, phase: str, *, with_variants: bool, rounds: int
) -> tuple[list[Row], list[Problem]]:
    """Checks and times one shape."""
    traffic = (op.forward_traffic if phase == "forward" else op.backward_traffic)(plain(spec.structs()))
    problems = []

    def note(candidate: str, error: Exception) -> None:
        message = f"{type(error).__name__}: {str(error)[:600]}"
        problems.append(Problem(op=op.name, phase=phase, spec=spec.name, candidate=candidate, message=message))

    sets = [testing.make_case(op, spec, seed) for seed in range(buffer_sets(traffic.bytes))]
    candidates = _candidates(op, spec, phase, with_variants=with_variants)
    baseline = jax.jit(candidates["xla"])(*_inputs(sets[0], phase))
    for name in list(candidates):
        try:
            result = jax.block_until_ready(jax.jit(candidates[name])(*_inputs(sets[0], phase)))
            _check_close(result, baseline)
        except Exception as error:  # a variant that does not compile or is wrong must not end the run
            note(name, error)
            del candidates[name]
    inputs = {name: [_inputs(case, phase) for case in sets] for name in candidates}
    candidates["copy"] = _copy(traffic)
    inputs["copy"] = [(_copy_inputs(case, traffic),) for case in sets]
    timings = time_candidates(candidates, inputs, rounds=rounds)
    ceiling, xla = timings["copy"].median_us, timings["xla"].median_us
    rows = [
        Row(
            op=op.name,
            phase=phase,
            spec=spec.name,
            candidate=name,
            bytes=traffic.bytes,
            gigabytes_per_second=traffic.bytes / timing.median_us / 1e3,
            ceiling_share=ceiling / timing.median_us,
            over_xla=xla / timing.median_us,
            timing=timing,
        )
        for name, timing in timings.items()
    ]
    return rows, problems


def _inputs(case: testing.Case, phase: str) -> tuple[Any, ...]:
    return (case.arguments,) if phase == "forward" else (case.arguments, case.cotangents)


def _candidates(op: OpSpec, spec: ArgSpec, phase: str, *, with_variants: bool) -> dict[str, Callable[..., Any]]:
    candidates: dict[str, Callable[..., Any]] = {}
    for implementation in ("xla", *(name for name in op.implementations if name != "xla")):
        candidates[implementation] = _call(op, phase, implementation)
    if with_variants:
        for name, variant in op.variants(phase, plain(spec.structs())).items():
            candidates[f"variant: {name}"] = _variant(variant, phase)
    return candidates


def _call(op: OpSpec, phase: str, implementation: str) -> Callable[..., Any]:
    def forward(arguments):
        return tuple(testing.forward(testing.Case(op=op, arguments=arguments, cotangents=()), implementation).values())

    def backward(arguments, cotangents):
        return op.backward(implementation, plain(arguments), cotangents)

    return forward if phase == "forward" else backward


def _variant(variant: Callable[..., Any], phase: str) -> Callable[..., Any]:
    def forward(arguments):
        return tuple(value for value in variant(**plain(arguments)) if value is not None)

    def backward(arguments, cotangents):
        return variant(**plain(arguments), cotangents=cotangents)

    return forward if phase == "forward" else backward


def _check_close(result: Sequence[jax.Array], baseline: Sequence[jax.Array]) -> None:
    """Guards against timing nonsense; the tests hold the exact rule. Compares norms, as far as outputs correspond."""
    if len(result) != len(baseline):
        return
    for i, (got, expected) in enumerate(zip(result, baseline, strict=True)):
        got, expected = got.astype(jnp.float32), expected.astype(jnp.float32)
        error = float(jnp.linalg.norm((got - expected).ravel()) / (jnp.linalg.norm(expected.ravel()) + 1e-30))
        if not error < 2e-2:
            raise AssertionError(f"output {i} is off by {error:.3g} of its norm")


def _copy(traffic: Traffic) -> Callable[..., Any]:
    """Elementwise work that reads and writes as many arrays: what a memory-bound kernel can reach at best."""

    def copy(arrays):
        count = len(traffic.written)
        outputs = [array + array.dtype.type(1) for array in arrays[:count]]
        for extra in arrays[count:]:
            outputs[0] = outputs[0] + extra
        return tuple(outputs)

    return copy


def _copy_inputs(case: testing.Case, traffic: Traffic) -> tuple[jax.Array, ...]:
    """Arrays of the operation's own call, the largest ones, one for each that it reads."""
    arrays = [a for a in jax.tree.leaves((case.arguments, case.cotangents)) if isinstance(a, jax.Array)]
    arrays = [a for a in arrays if a.nbytes == traffic.read[0]]
    return tuple(arrays[i % len(arrays)] for i in range(len(traffic.read)))


def format_row(row: Row) -> str:
    """One line: shape, candidate, µs, GB/s, share of the ceiling, ratio to XLA."""
    timing = row.timing
    return (
        f"{row.phase:8} {row.spec:34} {row.candidate:36} {timing.median_us:9.2f} µs "
        f"[{timing.p20_us:.2f}, {timing.p80_us:.2f}] {row.gigabytes_per_second:7.0f} GB/s "
        f"{100 * row.ceiling_share:6.1f} % of copy {row.over_xla:6.2f} x xla  {len(timing.kernels)} kernels"
    )


def write_json(path: Path, document: Mapping[str, Any]) -> None:
    """Writes all of it or nothing: a temporary file beside `path`, renamed."""
    text = json.dumps(document, indent=1) + "\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status, 1 where something failed its check."""
    parser = argparse.ArgumentParser(
        prog="python -m xlafuse.bench.kernels", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--op", default="rms_norm", help="an operation of pallas_kernels.REGISTRY")
    parser.add_argument("--phase", choices=PHASES, action="append", help="default: both")
    parser.add_argument("--match", default="", help="only specs whose name holds this")
    parser.add_argument("--variants", action="store_true", help="time every kernel configuration, too")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("-o", "--output", type=Path, required=True, help="the JSON file")
    options = parser.parse_args(argv)
    op = get_op(options.op)
    rows: list[Row] = []
    problems: list[Problem] = []
    before = environment()
    for spec in op.tagged("bench"):
        if options.match not in spec.name:
            continue
        for phase in options.phase or PHASES:
            new_rows, new_problems = bench_shape(op, spec, phase, with_variants=options.variants, rounds=options.rounds)
            rows += new_rows
            problems += new_problems
            for row in new_rows:
                print(format_row(row), flush=True)
            for problem in new_problems:
                print(f"FAILED   {problem.spec} {problem.phase} {problem.candidate}: {problem.message}", flush=True)
            # After every shape, so that an interrupted run keeps what it has.
            write_json(
                options.output,
                {
                    "schema_version": SCHEMA_VERSION,
                    "environment": asdict(before),
                    "gpu_after": gpu_state(),
                    "rows": [asdict(row) for row in rows],
                    "problems": [asdict(problem) for problem in problems],
                },
            )
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
