"""One base over every operation, implementation and argument spec of the registry, interpreted on a CPU."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from pallas_kernels import REGISTRY, testing
from pallas_kernels.specs import plain

CASES = [pytest.param(op, spec, id=f"{op.name}-{spec.name}") for op in REGISTRY.values() for spec in op.tagged("test")]
"""Everything. The results of "xla" are what others are compared with."""
TRANSFORMED = [pytest.param(op, op.tagged("test")[0], id=op.name) for op in REGISTRY.values()]
"""One argument spec each, where the transformation and not the shape is in question."""
IMPLEMENTATIONS = ("mosaic", "xla")
"""Implementations that run here. "triton" needs a GPU: tests/gpu runs it, and test_triton.py interprets it."""

pytestmark = pytest.mark.usefixtures("interpreter")


# test_interpreter_as_shipped.py has another shape of each operation in each run.
@pytest.mark.drawn(1 / 8, of_each="op")
@pytest.mark.parametrize(("op", "spec"), CASES)
def test_values_and_gradients(op, spec, seed):
    """A kernel either computes the right thing or says why it cannot; None then still computes it."""
    try:
        testing.check(op, spec, "mosaic", seed=seed)
    except NotImplementedError as error:
        assert "ragged" in spec.tags, f"mosaic refused an ordinary shape: {error}"
        assert len(str(error)) > 40
        testing.check(op, spec, None, seed=seed)


@pytest.mark.drawn(1 / 6)
@pytest.mark.parametrize("op", REGISTRY.values(), ids=list(REGISTRY))
def test_values_and_gradients_without_jit(op, seed):
    def draw(seed):
        case = testing.make_case(op, op.tagged("test")[0], seed)
        return testing.reports(case, testing.values_and_gradients(case, "mosaic"))

    testing.assert_draws_within(draw, seed, "one by one")


def stacked_cases(op, spec, seed):
    """Two cases that share the arguments without leading dimensions, and their batched arguments stacked."""
    first, second = testing.make_case(op, spec, seed), testing.make_case(op, spec, seed + 7)
    shared = {k: v for k, v in first.arguments.items() if k not in op.batched}
    second = testing.Case(op=op, arguments={**second.arguments, **shared}, cotangents=second.cotangents)
    batched = {k: jnp.stack([first.arguments[k], second.arguments[k]]) for k in op.batched if k in first.arguments}
    cotangents = jax.tree.map(lambda *leaves: jnp.stack(leaves), first.cotangents, second.cotangents)
    return (first, second), batched, shared, cotangents


@pytest.mark.drawn(1 / 6)
@pytest.mark.parametrize(("op", "spec"), TRANSFORMED)
def test_vmap(op, spec, seed):
    @jax.jit
    def run(batched, shared, cotangents):
        def one(batched, cotangents):
            case = testing.Case(op=op, arguments={**batched, **shared}, cotangents=cotangents)
            return testing.values_and_gradients(case, "mosaic")

        return jax.vmap(one)(batched, cotangents)

    def draw(seed):
        cases, batched, shared, cotangents = stacked_cases(op, spec, seed)
        got = testing.finished(run(batched, shared, cotangents))
        reports = []
        for i, case in enumerate(cases):
            reports += testing.reports(case, jax.tree.map(lambda leaf, i=i: leaf[i], got))
        return reports

    testing.assert_draws_within(draw, seed, "vmap")


@pytest.mark.drawn(1 / 12)
@pytest.mark.parametrize("check_vma", [False, True], ids=["unchecked", "checked"])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(("op", "spec"), TRANSFORMED)
def test_shard_map_values_and_gradients(op, implementation, spec, seed, check_vma):
    if len(jax.devices("cpu")) < 2:
        pytest.skip("needs two simulated CPU devices; run this folder by itself")
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices("cpu")[:2])

    def local(batched, shared):
        arguments = {**{k: v[0] for k, v in batched.items()}, **shared}
        result = op.function(**plain(arguments), implementation=implementation)
        return tuple(leaf[None] for leaf in (result if isinstance(result, tuple) else (result,)))

    sharded = jax.shard_map(local, mesh=mesh, in_specs=(P("data"), P()), out_specs=P("data"), check_vma=check_vma)

    @jax.jit
    def values_and_gradients(batched, shared, cotangents):
        values, pullback = jax.vjp(sharded, batched, shared)
        return values, *pullback(cotangents)

    def draw(seed):
        cases, batched, shared, cotangents = stacked_cases(op, spec, seed)
        results = testing.finished(values_and_gradients(batched, shared, cotangents))
        values, batched_gradients, shared_gradients = results
        reports = []
        for i, case in enumerate(cases):
            got = {f"output {j}": value[i] for j, value in enumerate(values)}
            got |= {f"gradient of {k}": value[i] for k, value in batched_gradients.items() if k in op.differentiable}
            reports += testing.reports(case, got)
        # Shared arguments get the sum over the devices.
        exact_gradients = [testing.oracle(case) for case in cases]
        for name, value in shared_gradients.items():
            if name in op.differentiable:
                exact = sum(exact[f"gradient of {name}"] for exact in exact_gradients)
                tolerance = 4 * float(jnp.finfo(value.dtype).eps) * (1 + np.abs(exact).max())
                np.testing.assert_allclose(np.asarray(value, np.float64), exact, atol=tolerance, err_msg=f"seed={seed}")
        return reports

    testing.assert_draws_within(draw, seed, "shards")


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(("op", "spec"), TRANSFORMED)
def test_eval_shape(op, implementation, spec):
    structs = spec.structs()
    got = jax.eval_shape(lambda arguments: op.function(**plain(arguments), implementation=implementation), structs)
    expected = jax.eval_shape(lambda arguments: op.reference(**plain(arguments)), structs)
    assert jax.tree.map(lambda s: (s.shape, s.dtype), got) == jax.tree.map(lambda s: (s.shape, s.dtype), expected)
