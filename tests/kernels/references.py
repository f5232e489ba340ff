"""What an operation should give: "xla" in its own dtype and in float64, by programs that are compiled once; for tests
only.

`pallas_kernels.testing` computes "xla" one jax.numpy operation after the other and compiles the float64 reference anew
at each call, and compiling is what interpreted tests spend their time on. Here each is one program, values and
gradients together, which all cases share whose arguments have the same shapes and dtypes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import OpSpec, get_op, testing
from pallas_kernels.specs import ArgSpec
from pallas_kernels.testing import Case, ErrorReport


def check(op: OpSpec, spec: ArgSpec, implementation: str | None, *, seed: int) -> list[ErrorReport]:
    """As `testing.check`: values and gradients are within their bounds, or an AssertionError names the seed."""

    def draw(seed: int) -> list[ErrorReport]:
        case = testing.make_case(op, spec, seed)
        if implementation == "xla":  # is its own baseline, and serves other cases as a program
            got = xla(case)
            return testing.error_reports(got, got, oracle(case), op.error_bound)
        return reports(case, values_and_gradients(case, implementation))

    return testing.assert_draws_within(draw, seed, f"{op.name} {spec.name} {implementation}")


def values_and_gradients(case: Case, implementation: str | None) -> dict[str, jax.Array]:
    """Those of one call, and those of another that is differentiated: its forward pass may be another kernel."""
    values = testing.finished(testing.forward(case, implementation))
    return {**values, **testing.finished(testing.gradient(case, implementation))}


def reports(case: Case, got: Mapping[str, jax.Array]) -> list[ErrorReport]:
    """How far `got`, some of the case's values and gradients, is from what it should be."""
    return testing.error_reports(dict(got), baseline(case), oracle(case), case.op.error_bound)


def xla(case: Case) -> dict[str, jax.Array]:
    """Values and gradients by "xla", in one program."""
    return _program(case.op.name)(*_inputs(case))


def baseline(case: Case) -> dict[str, jax.Array]:
    """Values and gradients by "xla", rounded as single operations do.

    Results of 16 bits have the same largest errors by a program as by single operations, in all test cases. Those of 32
    bits need not: fused, gelu's gradient is several times less exact, and logits are not rounded before a loss.
    """
    if all(leaf.dtype.itemsize == 2 for leaf in jax.tree.leaves(case.cotangents)):
        return xla(case)
    return values_and_gradients(case, "xla")


def oracle(case: Case) -> dict[str, np.ndarray]:
    """Values and gradients in float64, with the operation's reference."""
    with jax.enable_x64(True):
        wide = jax.tree.map(_widened, _inputs(case))
        return {name: np.asarray(value) for name, value in _program(case.op.name)(*wide).items()}


def _inputs(case: Case) -> tuple[dict[str, Any], Any]:
    return dict(case.arguments), case.cotangents


def _widened(value: Any) -> Any:
    is_float = isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jnp.floating)
    return jnp.asarray(np.asarray(value, np.float64)) if is_float else value


@functools.cache
def _program(op: str) -> Callable[[Any, Any], dict[str, jax.Array]]:
    def run(arguments, cotangents):
        return values_and_gradients(Case(op=get_op(op), arguments=arguments, cotangents=cotangents), "xla")

    # With excess precision a program rounds less often than the operations do one by one.
    return jax.jit(run, compiler_options={"xla_allow_excess_precision": False})
