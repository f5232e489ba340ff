"""The base of tests/kernels on a real GPU: every operation, implementation and argument spec."""

from __future__ import annotations

import random
from importlib.util import find_spec

import jax
import numpy as np
import pytest

from pallas_kernels import REGISTRY, testing
from pallas_kernels.primitives.platform import target_device
from pallas_kernels.specs import Static


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


def values_of(op, arguments, implementation):
    case = testing.Case(op=op, arguments=arguments, cotangents=())
    return tuple(testing.forward(case, implementation).values())


def runs_kernel(op, arguments, implementation) -> bool:
    lowered = jax.jit(lambda a: values_of(op, a, implementation)).lower(arguments)
    return "mosaic_gpu" in lowered.as_text()


FORWARD_BY_XLA = ("embedding",)
"""Operations of which only the gradient has kernels."""


def kernel_spec(op):
    """The first spec; of an operation with matrix products the first whose default is the kernel, if there is one:
    XLA's own are the default where they were measured to be the faster ones."""
    specs = op.tagged("gpu")
    if op.name in FORWARD_BY_XLA:
        return None
    if op.flops is None:
        return specs[0]
    return next((spec for spec in specs if runs_kernel(op, spec.structs(), None)), None)


def bits(value):
    return np.asarray(value, np.float32)


@pytest.mark.gpu
@pytest.mark.parametrize("op", REGISTRY.values(), ids=list(REGISTRY))
def test_default_is_not_xla_and_repeats_bit_for_bit(op, seed):
    spec = kernel_spec(op)
    case = testing.make_case(op, spec or op.tagged("gpu")[0], seed)
    assert spec is None or runs_kernel(op, case.arguments, None)
    run = testing.program(op, "mosaic")
    first, second = run(case.arguments, case.cotangents), run(case.arguments, case.cotangents)
    for name, value in first.items():
        np.testing.assert_array_equal(bits(value), bits(second[name]), err_msg=name)


@pytest.mark.gpu
def test_only_the_gradient_of_query_may_differ_between_runs(seed):
    op = REGISTRY["attention"]
    case = testing.make_case(op, next(spec for spec in op.tagged("gpu") if "causal-atomic" in spec.name), seed)
    run = testing.program(op, "mosaic")

    def twice(deterministic):
        arguments = {**case.arguments, "deterministic": Static(deterministic)}
        return [run(arguments, case.cotangents) for _ in range(2)]

    (in_order, again), (any_order, other) = twice(True), twice(False)
    for name in in_order:
        np.testing.assert_array_equal(bits(in_order[name]), bits(again[name]), err_msg=name)
        if name == "gradient of query":
            assert_close(any_order[name], in_order[name], name)
        else:
            np.testing.assert_array_equal(bits(any_order[name]), bits(other[name]), err_msg=name)


def assert_close(got, want, name=""):
    """As two ways of adding up the same 16-bit products are: an element that is a small difference of large ones can
    be far off for its own size, a whole array cannot."""
    difference = np.linalg.norm(bits(got) - bits(want))
    assert difference <= 1e-2 * np.linalg.norm(bits(want)), f"{name}: {difference} of {np.linalg.norm(bits(want))}"


OPS_AND_IMPLEMENTATIONS = [
    # By default a small matrix product is XLA's.
    pytest.param(op, implementation, id=f"{op.name}-{implementation or 'default'}")
    for op in REGISTRY.values()
    for implementation in ((None,) if op.flops is None else (None, "mosaic"))
]


@pytest.mark.gpu
@pytest.mark.parametrize(("op", "implementation"), OPS_AND_IMPLEMENTATIONS)
def test_vmap_remat_and_export(op, implementation, seed):
    case = testing.make_case(op, op.tagged("test")[0], seed)
    is_kernel = runs_kernel(op, case.arguments, implementation)
    assert is_kernel or (implementation is None and (op.flops is not None or op.name in FORWARD_BY_XLA))

    def values(arguments):
        return values_of(op, arguments, implementation)

    def assert_same(got, want):
        """Bit for bit where nothing but a kernel ran; XLA takes another product or sum for a stack of matrices."""
        if op.flops is None:
            np.testing.assert_array_equal(bits(got), bits(want))
        else:
            assert_close(got, want)

    expected = jax.jit(values)(case.arguments)

    exported = jax.export.export(jax.jit(values))(case.arguments)
    for got, want in zip(exported.call(case.arguments), expected, strict=True):
        assert_same(got, want)

    stacked = jax.tree.map(lambda leaf: leaf[None], {k: v for k, v in case.arguments.items() if k in op.batched})
    shared = {k: v for k, v in case.arguments.items() if k not in op.batched}
    for got, want in zip(jax.vmap(lambda b: values({**b, **shared}))(stacked), expected, strict=True):
        assert_same(got[0], want)

    def pull(arguments, run):
        return jax.vjp(run, arguments)[1](case.cotangents)[0]

    got = jax.jit(lambda a: pull(a, jax.checkpoint(values)))(case.arguments)
    for name, want in pull(case.arguments, values).items():
        if name in op.differentiable:
            assert_close(got[name], want, name)
