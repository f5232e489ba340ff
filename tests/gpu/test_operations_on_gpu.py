"""The base of tests/kernels on a real GPU: every operation, implementation and argument spec."""

from __future__ import annotations

import random
from importlib.util import find_spec

import jax
import numpy as np
import pytest

from pallas_kernels import REGISTRY, testing
from pallas_kernels.primitives.platform import target_device


def has_hopper() -> bool:
    return target_device().is_hopper


CASES = [
    pytest.param(op, implementation, spec, id=f"{op.name}-{implementation}-{spec.name}")
    for op in REGISTRY.values()
    for implementation in op.implementations
    if implementation != "xla"  # the baseline itself
    if implementation != "triton" or find_spec("jax_triton")
    for spec in op.arg_specs
    if "bench" not in spec.tags  # same kernels, more rows: minutes of float64 on the host
]


@pytest.fixture(autouse=True)
def _needs_hopper():
    if not has_hopper():
        pytest.skip("needs an attached Hopper GPU")


@pytest.fixture
def seed() -> int:
    return random.SystemRandom().randrange(2**30)


@pytest.mark.gpu
@pytest.mark.parametrize(("op", "implementation", "spec"), CASES)
def test_values_and_gradients(op, implementation, spec, seed):
    try:
        reports = testing.check(op, spec, implementation, seed=seed)
    except NotImplementedError:
        # The Triton kernels say no to masks and to rows of more than one block, the Mosaic ones to short rows alone.
        assert "ragged" in spec.tags or (implementation == "triton" and ("mask" in spec.name or "long" in spec.tags))
        reports = testing.check(op, spec, None, seed=seed)
    print(spec.name, [(r.output, r.error, r.baseline_error) for r in reports])


@pytest.mark.gpu
@pytest.mark.parametrize("op", REGISTRY.values(), ids=list(REGISTRY))
def test_default_is_not_xla_and_repeats_bit_for_bit(op, seed):
    case = testing.make_case(op, op.tagged("gpu")[0], seed)
    text = (
        jax.jit(lambda a: testing.forward(testing.Case(op=op, arguments=a, cotangents=()), None))
        .lower(case.arguments)
        .as_text()
    )
    assert "mosaic_gpu" in text
    first, second = testing.gradient(case, None), testing.gradient(case, None)
    for name, value in first.items():
        np.testing.assert_array_equal(np.asarray(value, np.float32), np.asarray(second[name], np.float32), err_msg=name)


@pytest.mark.gpu
@pytest.mark.parametrize("op", REGISTRY.values(), ids=list(REGISTRY))
def test_vmap_remat_and_export(op, seed):
    spec = op.tagged("test")[0]
    case = testing.make_case(op, spec, seed)

    def values(arguments):
        return tuple(testing.forward(testing.Case(op=op, arguments=arguments, cotangents=()), None).values())

    expected = jax.jit(values)(case.arguments)

    exported = jax.export.export(jax.jit(values))(case.arguments)
    for got, want in zip(exported.call(case.arguments), expected, strict=True):
        np.testing.assert_array_equal(np.asarray(got, np.float32), np.asarray(want, np.float32))

    stacked = jax.tree.map(lambda leaf: leaf[None], {k: v for k, v in case.arguments.items() if k in op.batched})
    shared = {k: v for k, v in case.arguments.items() if k not in op.batched}
    for got, want in zip(jax.vmap(lambda b: values({**b, **shared}))(stacked), expected, strict=True):
        np.testing.assert_array_equal(np.asarray(got[0], np.float32), np.asarray(want, np.float32))

    def pull(arguments, run):
        return jax.vjp(run, arguments)[1](case.cotangents)[0]

    for name, want in pull(case.arguments, values).items():
        if name not in op.differentiable:
            continue
        got = jax.jit(lambda a: pull(a, jax.checkpoint(values)))(case.arguments)[name]
        np.testing.assert_allclose(np.asarray(got, np.float32), np.asarray(want, np.float32), rtol=2e-2, atol=1e-3)
