"""Builds the calls to time: the function, copies of its arguments, and the check of its results."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hlo_analysis.targets.peaks import PEAKS
from pallas_kernels import OpSpec, testing
from pallas_kernels.specs import plain
from xlafuse.bench import attention_by_xla
from xlafuse.bench.environment import Sampler
from xlafuse.bench.results import Measured, Problem, ShapeResult
from xlafuse.bench.timing import Candidate, Timing, TimingRun, time_candidates

MESSAGE_LENGTH = 600
_TOLERANCE = 2e-2
"""Largest error, as a share of a result's norm.

The bound only catches a program that computes something else. The tests check accuracy.
"""
Outputs = Sequence[Any] | Mapping[str, Any]
"""Outputs to compare, in order or by name. Each is an array or a tree, of whose floating arrays the norm is taken."""


def callable_of(op: OpSpec, phase: str, implementation: str | None) -> Callable[..., Any]:
    """Returns the function to time; it takes the arguments from `inputs_of` and returns a tuple.

    phase: "forward"; "backward", the backward pass alone on what the forward pass of a named implementation saved; or
        "grad", the outputs and the gradients of the differentiable arguments.
    """

    def forward(arguments):
        return tuple(testing.forward(testing.Case(op=op, arguments=arguments, cotangents=()), implementation).values())

    def backward(arguments, cotangents):
        assert implementation is not None
        if (op.name, implementation) == ("attention", "xla"):
            return attention_by_xla.backward(plain(arguments), *cotangents)
        return tuple(jax.tree.leaves(op.backward(implementation, plain(arguments), cotangents)))

    def grad(arguments, cotangents):
        case = testing.Case(op=op, arguments=arguments, cotangents=cotangents)
        outputs, pull_back = jax.vjp(lambda given: forward({**arguments, **given}), case.differentiable)
        # As in a training step, where cotangents depend on the outputs. XLA would fuse the two passes otherwise.
        outputs, cotangents = jax.lax.optimization_barrier((outputs, cotangents))
        return (*outputs, *jax.tree.leaves(pull_back(cotangents)))

    return {"forward": forward, "backward": backward, "grad": grad}[phase]


def inputs_of(case: testing.Case, phase: str) -> tuple[Any, ...]:
    """Returns the arguments, followed by the cotangents unless the phase is "forward"."""
    return (case.arguments,) if phase == "forward" else (case.arguments, case.cotangents)


def copies(case: testing.Case, count: int) -> list[testing.Case]:
    """Returns the case and copies in memory of their own; drawing new values would take longer than timing them."""

    def copy(tree):
        return jax.tree.map(lambda leaf: leaf.copy() if isinstance(leaf, jax.Array) else leaf, tree)

    others = (replace(case, arguments=copy(case.arguments), cotangents=copy(case.cotangents)) for _ in range(1, count))
    return [case, *others]


def compiled(name: str, step: Any, arguments: Sequence[Any]) -> tuple[Any, dict[str, Any]]:
    """Compiles a strategy's jitted function; returns the program, and its compile time and memory as `Candidate.costs`.

    It prints the time, as a program of several layers takes long.
    """
    start = time.perf_counter()
    lowered = step.lower(*arguments)
    return compile_lowered(name, lowered, time.perf_counter() - start)


def compile_lowered(name: str, lowered: jax.stages.Lowered, lower_seconds: float) -> tuple[Any, dict[str, Any]]:
    """Compiles a lowered program; returns it with its costs, as `compiled` does."""
    start = time.perf_counter()
    program = lowered.compile()
    seconds = {"lower_seconds": lower_seconds, "compile_seconds": time.perf_counter() - start}
    print(f"  {name}: lower {lower_seconds:.1f} + compile {seconds['compile_seconds']:.1f} s", flush=True)
    memory = program.memory_analysis()
    peak = None
    if memory is not None:
        sizes = memory.argument_size_in_bytes, memory.output_size_in_bytes, memory.temp_size_in_bytes
        peak = sum(sizes) - memory.alias_size_in_bytes
    return program, {**seconds, "peak_bytes": peak}


def problem_of(name: str, error: Exception) -> Problem:
    """Returns the record of a candidate that failed or cannot run here."""
    return Problem(
        candidate=name,
        message=f"{type(error).__name__}: {str(error)[:MESSAGE_LENGTH]}",
        kind="unsupported" if isinstance(error, NotImplementedError | ImportError) else "failed",
    )


def timed(
    result: ShapeResult,
    make: Callable[[list[Problem]], Sequence[Candidate]],
    settings: Any,
    sampler: Sampler | None,
    *,
    baseline: str,
    wall_seconds: float = 0.0,
    by_gpu: bool = True,
    tokens: float = 0.0,
) -> ShapeResult:
    """Makes a shape's candidates, lets them take turns, and adds to the result what the run measured.

    make: returns the candidates that run and agree; it adds the others to a list of problems. What it raises, as when
        memory runs out, is a problem of the `baseline`.
    settings: has `rounds` and `calls`. wall_seconds, by_gpu: see `time_candidates`. tokens: of a call of a model.
    """
    start, problems = time.monotonic(), list(result.problems)
    try:
        candidates = make(problems)
    except Exception as error:  # the other shapes are worth having
        problems.append(problem_of(baseline, error))
        candidates = []
    result = replace(result, problems=tuple(problems), seconds=time.monotonic() - start)
    if not candidates:
        return result
    begun = time.monotonic()
    run = time_candidates(
        candidates, rounds=settings.rounds, calls=settings.calls, wall_seconds=wall_seconds, by_gpu=by_gpu
    )
    return replace(
        result,
        candidates=tuple(measured(c, run.timings[c.name], tokens) for c in candidates if c.name in run.timings),
        problems=(*problems, *timing_problems(run)),
        sets=len(candidates[0].inputs),
        seconds=time.monotonic() - start,
        warm_up_seconds=run.warm_up_seconds,
        is_steady=run.is_steady,
        activity=sampler.since(begun) if sampler else None,
    )


def with_shares(result: ShapeResult, flops: float) -> ShapeResult:
    """Adds each candidate's MFU, where the GPU's peak is known. flops: of a call on one GPU."""
    least_us = flops / peak(jax.devices()[0]) * 1e6
    if math.isnan(least_us):
        return result
    with_share = (replace(each, flops_share=least_us / each.timing.wall_us) for each in result.candidates)
    return replace(result, candidates=tuple(with_share))


def peak(device: Any) -> float:
    """Returns the FLOP/s of products of bfloat16 by the data sheet; NaN if the GPU is not described."""
    known = PEAKS.get(device.device_kind)
    return math.nan if known is None else dict(known.matrix_flops)["bf16"]


class Chain:
    """The arguments that all candidates share: each call updates them, and may donate them.

    begin: makes the arguments of the first call, and of the call after one that failed.
    advance: makes the next call's arguments of the last call's arguments and results.
    """

    def __init__(
        self, begin: Callable[[], tuple[Any, ...]], advance: Callable[[tuple[Any, ...], Any], tuple[Any, ...]]
    ) -> None:
        self._begin, self._advance = begin, advance
        self._next: tuple[Any, ...] | None = None

    @property
    def arguments(self) -> tuple[Any, ...]:
        """The next call's arguments."""
        self._next = self._begin() if self._next is None else self._next
        return self._next

    def begin_again(self) -> None:
        """Makes the next call the first one."""
        self._next = None

    def call(self, program: Callable[..., Any]) -> Any:
        """Calls a program with the next arguments; returns its result."""
        given, self._next = self.arguments, None
        result = program(*given)
        self._next = self._advance(given, result)
        return result


def bytes_of(tree: Any) -> int:
    """Counts the bytes of a tree of arrays or shapes."""
    return sum(leaf.dtype.itemsize * leaf.size for leaf in jax.tree.leaves(tree))


def measured(candidate: Candidate, timing: Timing, tokens: float = 0.0) -> Measured:
    """Returns the record of a candidate that was timed. tokens: of a call of a model, 0 for anything else."""
    rate = tokens / timing.wall_us * 1e6 if tokens else None
    return Measured(name=candidate.name, kind=candidate.kind, timing=timing, tokens_per_second=rate, **candidate.costs)


def timing_problems(run: TimingRun) -> list[Problem]:
    """Returns the records of the candidates that failed while they were timed."""
    return [Problem(candidate=name, message=text[:MESSAGE_LENGTH]) for name, text in run.failures.items()]


def checked(
    makers: Mapping[str, Callable[[], tuple[Candidate, Any]]],
    problems: list[Problem],
    **limits: float,
) -> list[Candidate]:
    """Returns the candidates that run and agree with the first that does; failures go into `problems`.

    makers: by name, what makes a candidate and its first results, or None if they are not to be compared. limits: those
        of `check_close`.
    """
    made: list[Candidate] = []
    expected: Any = ()
    for name, make in makers.items():
        try:
            candidate, results = make()
            if not made:
                expected = results or ()
            elif results is not None:
                error = check_close(results, expected, of=made[0].name, **limits)
                candidate = replace(candidate, costs={**candidate.costs, "error": error})
        except Exception as error:  # one that fails must not end the run of the others
            problems.append(problem_of(name, error))
            continue
        made.append(candidate)
        del results  # frees their memory
    return made


def check_close(
    result: Outputs,
    baseline: Outputs,
    *,
    of: str = "xla",
    smallest: float = 0.0,
    tolerance: float = _TOLERANCE,
) -> float:
    """Checks that results agree by their relative error in norm; returns the largest error.

    Args:
        of: whose results the baseline is, for the message.
        smallest: smallest reference for a result's error, as a share of the largest root mean square among the
            baseline's results. One below it, such as the gradient of a query that sees one key, holds only rounding
            errors.
        tolerance: the largest error, as a share of a result's norm.

    Raises:
        AssertionError: a result is off by more than the tolerance, or has NaNs.
    """
    found, expected = map(_named, (result, baseline))
    if len(found) != len(expected):
        raise AssertionError(f"{len(found)} arrays, expected {len(expected)}")
    sums = {name: _sums(found[name], expected[name]) for name in expected}
    least = smallest * max((math.sqrt(square / max(1, count)) for _, square, count in sums.values()), default=0.0)
    largest = 0.0
    for name, (difference, square, count) in sums.items():
        error = math.sqrt(difference) / (max(math.sqrt(square), least * math.sqrt(count)) + 1e-30)
        if not error < tolerance:
            raise AssertionError(f"{name} is off by {error:.3g} of its norm from {of}'s")
        largest = max(largest, error)
    return largest


def _named(outputs: Outputs) -> Mapping[str, Any]:
    return outputs if isinstance(outputs, Mapping) else {f"output {i}": each for i, each in enumerate(outputs)}


def _sums(result: Any, expected: Any) -> tuple[float, float, float]:
    """Sums the squares of the difference of all floating arrays and of what is expected; counts their elements."""
    sums = np.zeros(3)
    for got, want in zip(jax.tree.leaves(result), jax.tree.leaves(expected), strict=True):
        if jnp.issubdtype(want.dtype, jnp.floating):
            sums += *map(float, _sums_of_squares(jnp.asarray(got), want)), want.size
    return sums[0], sums[1], sums[2]


@jax.jit
def _sums_of_squares(got: jax.Array, expected: jax.Array) -> tuple[jax.Array, jax.Array]:
    # Compiled, so that large arrays need no float32 copies.
    got, expected = got.reshape(expected.shape).astype(jnp.float32), expected.astype(jnp.float32)
    return jnp.sum(jnp.square(got - expected)), jnp.sum(jnp.square(expected))
