"""Sizes that nobody chose, on a real GPU: other ones each time, by the rule that all kernels are held to."""

from __future__ import annotations

import random

import jax
import pytest

from pallas_kernels import REGISTRY, testing
from pallas_kernels.primitives.platform import target_device
from pallas_kernels.specs import plain
from xlafuse.bench.random_calls import Limits, random_call

LIMITS = Limits(length=4096, rows=2048, columns=8192, values=2**23, scores=2**25)
"""What a float64 reference can follow on the host."""
CALLS = [(op, i) for op in REGISTRY.values() for i in range(24 if op.name == "attention" else 2)]


@pytest.mark.parametrize("op", REGISTRY.values(), ids=list(REGISTRY))
def test_operations_take_what_is_drawn(op):
    calls = [random_call(op, seed, LIMITS) for seed in range(20)]
    for call in calls:
        jax.eval_shape(lambda arguments: op.function(**plain(arguments), implementation="xla"), call.structs())
    assert len({call.name for call in calls}) > 10


@pytest.mark.gpu
@pytest.mark.parametrize(("op", "number"), [pytest.param(op, i, id=f"{op.name}-{i}") for op, i in CALLS])
def test_values_and_gradients_of_random_shapes(op, number):
    if not target_device().is_hopper:
        pytest.skip("needs an attached Hopper GPU")
    del number
    seed = random.SystemRandom().randrange(2**30)
    spec = random_call(op, seed, LIMITS)
    print(spec.name)
    try:
        testing.check(op, spec, "mosaic", seed=seed)
    except NotImplementedError:
        testing.check(op, spec, None, seed=seed)
