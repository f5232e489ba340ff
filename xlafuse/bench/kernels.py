"""Kernel benchmark: times every argument spec tagged "bench" against XLA, peers and the copy ceiling.

For each shape and phase, the benchmark first checks values and gradients against XLA's. Then all candidates take turns
in one run: the ceiling's candidates (`ceiling`), `"xla"`, the operation's other implementations, its kernel variants on
request, and the same operation in other libraries (`peers`). An NVIDIA GPU must be attached.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax

from pallas_kernels import ArgSpec, OpSpec, get_op, testing, tuning
from pallas_kernels.specs import plain
from xlafuse.bench import peers
from xlafuse.bench.candidates import callable_of, check_close, checked, copies, inputs_of, timed
from xlafuse.bench.ceiling import ceiling_candidates
from xlafuse.bench.environment import Sampler
from xlafuse.bench.results import Problem, ShapeResult, short_spec
from xlafuse.bench.settings import Settings
from xlafuse.bench.timing import Candidate, buffer_sets
from xlafuse.errors import UnknownNameError, XlafuseError


class NoGpuError(XlafuseError, RuntimeError):
    """The benchmark needs an attached NVIDIA GPU."""


def require_gpu() -> None:
    """Raises NoGpuError, which says what JAX sees, unless an NVIDIA GPU is attached."""
    device = jax.devices()[0]
    if device.platform != "gpu" or "NVIDIA" not in device.device_kind.upper():
        raise NoGpuError(
            f"xlafuse bench measures on an attached NVIDIA GPU, and JAX sees only {device.device_kind!r} here. Run it "
            "on a machine with one, with `pip install 'xlafuse[cuda13]'` and without JAX_PLATFORMS=cpu; kept results "
            "are in notebooks/results."
        )


def is_wanted(spec: str, match: str) -> bool:
    """Tells whether the spec's name contains one of the comma-separated parts of `match`.

    A part that starts with "=" must equal the whole name. The name with short dtypes, as tables show it, matches too.
    """
    names = (spec, short_spec(spec))
    return any(
        part[1:] in names if part.startswith("=") else any(part in name for name in names) for part in match.split(",")
    )


def check_match(operations: Sequence[str], match: str) -> None:
    """Raises UnknownNameError, with the nearest names, unless `match` selects a benchmark shape of the operations."""
    names = [spec.name for name in operations for spec in get_op(name).tagged("bench")]
    if not any(is_wanted(name, match) for name in names):
        raise UnknownNameError("shape", match, dict.fromkeys(map(short_spec, names)))


def bench_operation(op: OpSpec, settings: Settings, sampler: Sampler | None = None) -> Iterator[ShapeResult | str]:
    """Times an operation's shapes one by one; yields a str for a shape that the time limit left out."""
    deadline = time.monotonic() + settings.seconds
    for spec in op.tagged("bench"):
        if not is_wanted(spec.name, settings.match):
            continue
        if settings.only and f"{op.name} {spec.name}" not in settings.only:
            continue
        for phase in settings.phases:
            if phase == "backward" and not op.differentiable:
                continue
            if time.monotonic() > deadline:
                yield f"{op.name} {phase} {spec.name}: not begun within {settings.seconds:.0f} s"
                continue
            with tuning.ignored() if settings.only else contextlib.nullcontext():
                result = bench_shape(op, spec, phase, settings, sampler)
            yield result


def bench_shape(
    op: OpSpec, spec: ArgSpec, phase: str, settings: Settings, sampler: Sampler | None = None
) -> ShapeResult:
    """Times one phase of an operation on one shape after checking its results.

    Failures go into the result's problems.
    """
    structs = plain(spec.structs())
    traffic = (op.forward_traffic if phase == "forward" else op.backward_traffic)(structs)
    sets = buffer_sets(traffic.bytes)
    result = ShapeResult(op=op.name, phase=phase, spec=spec.name, bytes=traffic.bytes)

    def make(problems: list[Problem]) -> list[Candidate]:
        cases = copies(testing.make_case(op, spec, settings.seed), sets)
        candidates = _candidates(op, structs, phase, cases, settings, problems)
        return [*ceiling_candidates(traffic, sets=sets, seed=settings.seed), *candidates] if candidates else []

    result = timed(result, make, settings, sampler, baseline="xla")
    ceilings = {c.name: c.timing.median_us for c in result.of_kind("ceiling")}
    return replace(result, ceiling=min(ceilings, key=lambda name: ceilings[name], default=None))


def _candidates(
    op: OpSpec,
    structs: dict[str, Any],
    phase: str,
    cases: Sequence[testing.Case],
    settings: Settings,
    problems: list[Problem],
) -> list[Candidate]:
    """Returns the candidates that run and agree with XLA; failures go into `problems`."""
    inputs = [inputs_of(case, phase) for case in cases]
    calls: list[tuple[str, Any, Callable[..., Any]]] = [("xla", "implementation", callable_of(op, phase, "xla"))]
    for name in op.implementations:
        if name != "xla" and (name != "triton" or "jax_triton" in settings.peers):
            calls.append((name, "implementation", callable_of(op, phase, name)))
    if settings.variants:
        for name, variant in op.variants(phase, structs).items():
            calls.append((f"variant: {name}", "variant", _variant(variant, phase)))

    def make(name: str, kind: Any, function: Callable[..., Any]) -> tuple[Candidate, Sequence[jax.Array]]:
        candidate = Candidate(name=name, kind=kind, call=jax.jit(function), inputs=inputs)
        return candidate, jax.block_until_ready(candidate.call(*inputs[0]))

    candidates = checked({call[0]: partial(make, *call) for call in calls}, problems)
    if not candidates or candidates[0].name != "xla":
        return []
    wanted = [name for name in dict.fromkeys(settings.peers) if name not in peers.OF_THE_OPERATION]
    return candidates + (_peers(wanted, phase, cases, problems) if wanted else [])


def _peers(names: Sequence[str], phase: str, cases: Sequence[testing.Case], problems: list[Problem]) -> list[Candidate]:
    """Returns the peers that run and agree with XLA; where there is dropout, they are compared without it."""
    cases = [peers.as_trained(case) for case in cases]
    compared = peers.without_dropout(cases[0])
    expected = _peers_results(compared, phase)
    has_dropout = compared is not cases[0]

    def make(name: str) -> tuple[Candidate, None]:
        library = peers.load(name)
        candidate, first = library.candidate(compared.op.name, phase, [compared] if has_dropout else cases)
        check_close(first, {key: expected[key] for key in first})
        return (library.candidate(compared.op.name, phase, cases)[0] if has_dropout else candidate), None

    return checked({name: partial(make, name) for name in names}, problems)


def _peers_results(case: testing.Case, phase: str) -> Mapping[str, jax.Array]:
    """Computes what peers must return, the outputs or the true gradients by name, with XLA.

    `OpSpec.backward` may let one array stand for another, which no other library does.
    """
    compute = testing.forward if phase == "forward" else testing.gradient

    def results(arguments, cotangents):
        return compute(replace(case, arguments=arguments, cotangents=cotangents), "xla")

    return jax.jit(results)(case.arguments, case.cotangents)


def _variant(variant: Callable[..., Any], phase: str) -> Callable[..., Any]:
    def forward(arguments):
        return tuple(value for value in jax.tree.leaves(variant(**plain(arguments))))

    def backward(arguments, cotangents):
        return tuple(jax.tree.leaves(variant(**plain(arguments), cotangents=cotangents)))

    return forward if phase == "forward" else backward
