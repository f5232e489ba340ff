"""Compares functions: counts them for a target that need not be present, and times them on the attached GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hlo_analysis import analyze, capture
from xlafuse.bench.candidates import checked, timing_problems
from xlafuse.bench.results import Problem
from xlafuse.bench.timing import Candidate, Timing, buffer_sets, time_candidates
from xlafuse.strategies import get_strategy
from xlafuse.studies.records import Row

UNFUSED = dict(get_strategy("unfused").compiler_options)
"""Options that turn XLA's fusion passes off."""
NO_COMMAND_BUFFERS = {"xla_gpu_enable_command_buffer": ""}


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One way to compute a case: a JAX function, or a function of PyTorch tensors if `framework` is "torch".

    is_checked: whether its outputs are to be those of the first variant.
    """

    function: Callable[..., Any]
    options: Mapping[str, Any] = field(default_factory=dict)
    framework: str = "jax"
    is_counted: bool = True
    is_checked: bool = True


def drawn(struct: Any, seed: int) -> jax.Array:
    """Draws an array of the shape: standard normal floats, or integers from -127 to 127."""
    key = jax.random.key(seed)
    if jnp.issubdtype(struct.dtype, jnp.integer):
        return jax.random.randint(key, struct.shape, -127, 128, jnp.int32).astype(struct.dtype)
    return jax.random.normal(key, struct.shape, jnp.float32).astype(struct.dtype)


@dataclass(frozen=True, kw_only=True)
class Case:
    """Variants of one function on the same abstract arguments.

    is_counted: whether the case is counted without a GPU. draw: makes an argument from its shape and a seed.
    """

    name: str
    arguments: tuple[Any, ...]
    variants: Mapping[str, Variant]
    is_counted: bool = True
    draw: Callable[[Any, int], jax.Array] = drawn


def torch_variants(function: Callable[..., Any]) -> dict[str, Variant]:
    """Returns eager and compiled PyTorch variants of function(torch, *tensors); the first call imports PyTorch."""
    kept: list[Any] = []

    def eager(*tensors: Any) -> Any:
        import torch  # pyright: ignore[reportMissingImports]

        return function(torch, *tensors)

    def compiled(*tensors: Any) -> Any:
        if not kept:
            import torch  # pyright: ignore[reportMissingImports]

            torch._dynamo.reset()  # otherwise another case's shapes would make this one dynamic
            kept.append(torch.compile(lambda *given: function(torch, *given), dynamic=False, fullgraph=True))
        return kept[0](*tensors)

    return {
        "PyTorch eager": Variant(function=eager, framework="torch"),
        "torch.compile": Variant(function=compiled, framework="torch"),
    }


def count_variants(cases: Iterable[Case], target: str) -> Iterator[Row | str]:
    """Counts launches, HBM bytes, FLOPs and temporary memory of every JAX variant, compiling two at a time."""
    jobs = [
        (case, name, variant)
        for case in cases
        if case.is_counted
        for name, variant in case.variants.items()
        if variant.framework == "jax" and variant.is_counted
    ]
    with ThreadPoolExecutor(2) as pool:
        yield from pool.map(lambda job: _counted(job, target), jobs)


def _counted(job: tuple[Case, str, Variant], target: str) -> Row | str:
    case, name, variant = job
    try:
        kept = capture(variant.function, *case.arguments, target=target, compiler_options=variant.options)
        found = analyze(kept)
    except Exception as error:  # a failing variant must not end the study
        return f"{case.name}, {name}: {type(error).__name__}: {str(error)[:300]}"
    far = [edge for edge in found.decisions if edge.verdict != "fused" and edge.bytes >= _LARGE]
    note = max(far, key=lambda edge: edge.bytes).reason[:200] if far else ""
    values = {
        "launches": found.launch_count,
        "bytes": found.traffic.bytes,
        "flops": found.traffic.flops,
        "temp_bytes": found.memory.temp_bytes,
        "roofline_us": round(found.roofline_us, 3),
        "compile_seconds": round(found.provenance.compile_seconds, 3),
    }
    kernels = [launch for launch in found.launches if launch.kind == "mosaic" and launch.registers is not None]
    if kernels:
        values["registers"] = max(launch.registers or 0 for launch in kernels)
        values["spill_bytes"] = sum(launch.spill_bytes or 0 for launch in kernels)
    return Row(case=case.name, variant=name, values=values, note=note)


_LARGE = 1e8
"""Least bytes of a value that XLA's word on why it is in memory is kept of, as a row's note."""
_TOLERANCE = 3e-2
"""Largest difference from the first variant's outputs, as a share of their norm."""


def time_variants(cases: Iterable[Case]) -> Iterator[Row | str]:
    """Times every variant on the GPU with CUPTI; the variants of a case take turns, with buffers beyond the L2 cache.

    Outputs are compared with those of the first variant, by the norm of the difference.
    """
    for case in cases:
        size = sum(np.prod(s.shape, dtype=np.int64) * s.dtype.itemsize for s in jax.tree.leaves(case.arguments))
        sets = min(8, buffer_sets(int(size)))
        inputs = [
            jax.tree.map(lambda leaf, k=k, case=case: case.draw(leaf, abs(hash(leaf.shape)) % 1000 + k), case.arguments)
            for k in range(sets)
        ]
        compiled = compile_all(
            {
                name: (variant.function, inputs[0], variant.options)
                for name, variant in case.variants.items()
                if variant.framework == "jax"
            }
        )
        makers = {
            name: partial(_candidate, name, variant, compiled.get(name), inputs)
            for name, variant in case.variants.items()
        }
        problems: list[Problem] = []
        candidates = checked(makers, problems, tolerance=_TOLERANCE)
        run = time_candidates(candidates, rounds=6, calls=4, warm_up_seconds=(0.15, 0.4))
        for problem in (*problems, *timing_problems(run)):
            yield f"{case.name}, {problem.candidate}: {problem.message[:300]}"
        for name, timing in run.timings.items():
            yield Row(case=case.name, variant=name, values=_values(timing))


def compile_all(jobs: Mapping[Any, tuple[Callable[..., Any], tuple[Any, ...], Mapping[str, Any]]]) -> dict[Any, Any]:
    """Compiles functions with XLA options, sixteen at a time, since XLA compiles a program on one core.

    If one fails, a str with the reason takes its place.
    """
    lowered = {name: _attempt(lambda f=f, a=a: jax.jit(f).lower(*a)) for name, (f, a, _) in jobs.items()}

    def compiled(name: Any) -> Any:
        each = lowered[name]
        return each if isinstance(each, str) else _attempt(lambda: each.compile(compiler_options=dict(jobs[name][2])))

    with ThreadPoolExecutor(16) as pool:
        return dict(zip(jobs, pool.map(compiled, jobs), strict=True))


def _attempt(work: Callable[[], Any]) -> Any:
    try:
        return work()
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:300]}"


def _candidate(name: str, variant: Variant, compiled: Any, inputs: Sequence[tuple[Any, ...]]) -> tuple[Candidate, Any]:
    """Returns a variant's candidate and its first results; None for results that are not to be compared."""
    if variant.framework == "torch":
        from xlafuse.bench.peers.tensors import candidate_of, to_jax, to_torch

        def call(*tensors: Any) -> tuple[Any, ...]:
            given = variant.function(*tensors)
            return given if isinstance(given, tuple) else (given,)

        candidate, results = candidate_of(name, call, [tuple(map(to_torch, each)) for each in inputs])
        return candidate, [to_jax(result) for result in results] if variant.is_checked else None
    if isinstance(compiled, str):
        raise RuntimeError(compiled)
    candidate = Candidate(name=name, kind="peer", call=compiled, inputs=inputs)
    results = jax.tree.leaves(compiled(*inputs[0]))
    return candidate, results if variant.is_checked else None


def wall_times(calls: Mapping[str, Callable[[], Any]], *, rounds: int = 9) -> dict[str, dict[str, float]]:
    """Times calls in turns on the host, each of which waits for its result; values as those of `time_variants`."""
    candidates = [
        Candidate(name=name, kind="peer", call=call, inputs=[()], wait=lambda _: None) for name, call in calls.items()
    ]
    run = time_candidates(candidates, rounds=rounds, calls=1, by_gpu=False)
    if run.failures:
        raise RuntimeError(str(dict(run.failures)))
    return {name: _values(timing) for name, timing in run.timings.items()}


def _values(timing: Timing) -> dict[str, float]:
    """Returns a row's times in microseconds, and the number of kernels where CUPTI counted them."""
    counted = {"wall_us": timing.wall_us, "kernels": len(timing.kernels)} if timing.kernels else {}
    return {"us": timing.median_us, "p20_us": timing.p20_us, "p80_us": timing.p80_us, **counted}
