"""Checks an operation against its float64 reference, for tests on any device and for the benchmark.

An element's error may be `ErrorBound.baseline_factor` times the largest error of `"xla"` on the same inputs in the same
dtype, plus `ErrorBound.ulps` units in the last place of the exact value. This bound holds for the results and for the
gradient of every differentiable argument. In a small array the largest error is a matter of luck. So if one draw of
inputs is out of bounds, several draws are judged together (`assert_draws_within`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.specs import ArgSpec, ArraySpec, ErrorBound, OpSpec, plain, seeds_of


@dataclass(frozen=True, kw_only=True)
class ErrorReport:
    """The error of one output against the float64 reference.

    error, baseline_error: the largest absolute error of the output, and of `"xla"`.
    excess: the largest |error| - bound over all elements; the check fails if it is positive.
    worst: the index of the element with that excess.
    baseline_factor: the factor of the bound, see `ErrorBound`.
    """

    output: str
    error: float
    baseline_error: float
    excess: float
    worst: tuple[int, ...]
    baseline_factor: float

    @property
    def is_within(self) -> bool:
        """Whether every element is within its bound and none is NaN."""
        return self.excess <= 0

    @classmethod
    def together(cls, reports: Sequence[ErrorReport]) -> ErrorReport:
        """Combines the reports of one output over several draws: the largest error against the baseline's largest."""
        beyond = [r.excess + r.baseline_factor * r.baseline_error for r in reports]
        worst = reports[int(np.argmax(beyond))]
        baseline_error = max(r.baseline_error for r in reports)
        return replace(
            worst, baseline_error=baseline_error, excess=max(beyond) - worst.baseline_factor * baseline_error
        )


@dataclass(frozen=True, kw_only=True)
class Case:
    """One call to check: an operation, its arguments, and a cotangent for each output."""

    op: OpSpec
    arguments: dict[str, Any]
    cotangents: Any

    @property
    def differentiable(self) -> dict[str, jax.Array]:
        """The arguments that have gradients, by name."""
        return {name: self.arguments[name] for name in self.op.differentiable if self.arguments.get(name) is not None}


def make_case(op: OpSpec, spec: ArgSpec, seed: int) -> Case:
    """Draws arguments and cotangents from `seed`."""
    arguments = spec.make(seed)
    outputs = jax.eval_shape(_outputs(op, arguments, "xla"))
    cotangents = tuple(
        ArraySpec(shape=o.shape, dtype=str(o.dtype)).make(own)
        for own, o in zip(seeds_of(seed + 1, len(outputs)), outputs, strict=True)
    )
    return Case(op=op, arguments=arguments, cotangents=cotangents)


def forward(case: Case, implementation: str | None) -> dict[str, jax.Array]:
    """Computes the outputs, by name."""
    outputs = _outputs(case.op, case.arguments, implementation)()
    return {f"output {i}": value for i, value in enumerate(outputs)}


def gradient(case: Case, implementation: str | None) -> dict[str, jax.Array]:
    """Computes the gradients of the differentiable arguments, by name."""

    def function(differentiable):
        return _outputs(case.op, {**case.arguments, **differentiable}, implementation)()

    (gradients,) = jax.vjp(function, case.differentiable)[1](case.cotangents)
    return {f"gradient of {name}": value for name, value in gradients.items()}


def values_and_gradients(case: Case, implementation: str | None) -> dict[str, jax.Array]:
    """Computes the outputs, and the gradients of another call, whose forward pass may be another kernel."""
    return {**finished(forward(case, implementation)), **finished(gradient(case, implementation))}


@functools.cache
def program(op: OpSpec, implementation: str | None) -> Callable[[Any, Any], dict[str, jax.Array]]:
    """Returns `values_and_gradients`, jitted, as a function of arguments and cotangents.

    To compile it is most of a check's time, so all calls of the same shapes share it.
    """

    def run(arguments, cotangents):
        return values_and_gradients(Case(op=op, arguments=arguments, cotangents=cotangents), implementation)

    # With excess precision a program rounds less often than the operations do one by one.
    return jax.jit(run, compiler_options={"xla_allow_excess_precision": False} if implementation == "xla" else None)


def baseline(case: Case) -> dict[str, jax.Array]:
    """Computes values and gradients by `"xla"`, rounded as single operations do.

    Results of 16 bits have the same largest errors by a program as by single operations, in all test cases. Those of 32
    bits need not: fused, gelu's gradient is several times less exact, and logits are not rounded before a loss.
    """
    if all(leaf.dtype.itemsize == 2 for leaf in jax.tree.leaves(case.cotangents)):
        return program(case.op, "xla")(dict(case.arguments), case.cotangents)
    return values_and_gradients(case, "xla")


def oracle(case: Case) -> dict[str, np.ndarray]:
    """Runs the operation's reference in float64, forward and backward."""

    def widen(value):
        is_float = isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jnp.floating)
        return jnp.asarray(np.asarray(value, np.float64)) if is_float else value

    with jax.enable_x64(True):
        wide = jax.tree.map(widen, (dict(case.arguments), case.cotangents))
        return {name: np.asarray(value) for name, value in program(case.op, "xla")(*wide).items()}


def error_reports(
    got: Mapping[str, jax.Array], baseline: Mapping[str, jax.Array], exact: Mapping[str, np.ndarray], bound: ErrorBound
) -> list[ErrorReport]:
    """Compares outputs with the float64 reference, element by element.

    Raises:
        AssertionError: an output's shape or dtype differs from the baseline's.
    """
    reports = []
    for name, value in got.items():
        base = baseline[name]
        if (value.shape, value.dtype) != (base.shape, base.dtype):
            raise AssertionError(f"{name} is {jax.typeof(value)}, expected {jax.typeof(base)}")
        if value.size == 0:
            continue
        error = np.abs(np.asarray(value, np.float64) - exact[name])
        baseline_error = float(np.max(np.abs(np.asarray(base, np.float64) - exact[name])))
        baseline_error = max(baseline_error, bound.least_error)
        allowed = bound.baseline_factor * baseline_error + bound.ulps * _ulp(exact[name], value.dtype)
        excess = np.where(np.isnan(error), np.inf, error - allowed)
        worst = np.unravel_index(np.argmax(excess), excess.shape)
        reports.append(
            ErrorReport(
                output=name,
                error=float(np.max(error)),
                baseline_error=baseline_error,
                excess=float(excess[worst]),
                worst=tuple(map(int, worst)),
                baseline_factor=bound.baseline_factor,
            )
        )
    return reports


def reports(case: Case, got: Mapping[str, jax.Array]) -> list[ErrorReport]:
    """Compares some of the case's values and gradients with the float64 reference."""
    return error_reports(got, baseline(case), oracle(case), case.op.error_bound)


def check(op: OpSpec, spec: ArgSpec, implementation: str | None, *, seed: int) -> list[ErrorReport]:
    """Compares outputs and gradients of `implementation`, in one program, with the float64 reference.

    Raises:
        AssertionError: an output or gradient is out of bounds; the message has the seed and the numbers.
    """
    run = program(op, implementation)

    def draw(seed):
        case = make_case(op, spec, seed)
        base = baseline(case)
        got = base if implementation == "xla" else finished(run(case.arguments, case.cotangents))
        return error_reports(got, base, oracle(case), op.error_bound)

    return assert_draws_within(draw, seed, f"{op.name} {spec.name} {implementation}")


def finished(values: Any) -> Any:
    """Waits until the values are computed and returns them.

    Without this wait an interpreted kernel can deadlock: its callbacks dispatch JAX computations, and a CPU client runs
    at most 32 at a time. If the program goes on, computations that wait for the kernel fill all 32 places, and the
    kernel waits for a place.
    """
    return jax.block_until_ready(values)


DRAWS = 16
"""The number of draws that are judged together if the first one is out of bounds.

With fewer draws, a sum that XLA seldom rounds, such as a sum of six rows, could look exact.
"""


def assert_draws_within(draw: Callable[[int], list[ErrorReport]], seed: int, title: str) -> list[ErrorReport]:
    """Returns the reports of `draw(seed)`, or of `DRAWS` draws together if that one is out of bounds.

    `draw` must return the same outputs in the same order for every seed.

    Raises:
        AssertionError: an output is out of bounds for this seed, and also over `DRAWS` seeds together, where its
            largest error is compared with the baseline's largest error.
    """
    reports = draw(seed)
    if not all(report.is_within for report in reports):
        draws = [reports, *(draw(seed + 1000 * i) for i in range(1, DRAWS))]
        reports = [ErrorReport.together(output) for output in zip(*draws, strict=True)]
        assert_within(reports, f"{title} seed={seed}, {DRAWS} draws")
    return reports


def assert_within(reports: Sequence[ErrorReport], title: str) -> None:
    """Raises an AssertionError that lists every output out of bounds."""
    bad = [report for report in reports if not report.is_within]
    if bad:
        lines = "\n".join(
            f"  {r.output}: error {r.error:.3g} ('xla' {r.baseline_error:.3g}), {r.excess:.3g} too much at {r.worst}"
            for r in bad
        )
        raise AssertionError(f"{title}: out of bounds\n{lines}")


def _outputs(op: OpSpec, arguments: dict[str, Any], implementation: str | None) -> Callable[[], tuple[jax.Array, ...]]:
    def call():
        if jax.config.jax_enable_x64:  # the oracle
            result = op.reference(**plain(arguments))
        else:
            result = op.function(**plain(arguments), implementation=implementation)
        return result if isinstance(result, tuple) else (result,)

    return call


def _ulp(value: np.ndarray, dtype) -> np.ndarray:
    """Returns the distance between neighbouring numbers of `dtype` at |value|."""
    info = jnp.finfo(dtype)
    magnitude = np.maximum(np.abs(value), float(info.smallest_normal))
    return float(info.eps) * np.exp2(np.floor(np.log2(magnitude)))
