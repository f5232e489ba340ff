"""A kernel that a program calls several times is one jaxpr, which JAX lowers once."""

from __future__ import annotations

import functools
from collections import Counter
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compile_deviceless import kernel_calls
from test_settings import HOPPER

from pallas_kernels import REGISTRY
from pallas_kernels.primitives.sharing import described, traced_once
from pallas_kernels.specs import plain

CASES = [pytest.param(op, spec, id=f"{op.name}-{spec.name}") for op in REGISTRY.values() for spec in op.tagged("test")]


@pytest.mark.drawn(1 / 8, of_each="op")
@pytest.mark.parametrize(("op", "spec"), CASES)
def test_operations_share_their_kernels(op, spec):
    def forward(arguments):
        return op.function(**plain(arguments), implementation=("mosaic", "xla"))

    def gradients(arguments):
        floats = [leaf for leaf in jax.tree.leaves(forward(arguments)) if jnp.issubdtype(leaf.dtype, jnp.floating)]
        return sum(jnp.sum(leaf.astype(jnp.float32)) for leaf in floats)

    kernels = 0
    for function in (forward, jax.grad(gradients, allow_int=True)):
        with jax.sharding.use_abstract_mesh(HOPPER):
            twice = jax.make_jaxpr(lambda a, f=function: (f(a), f(a)))(spec.structs())
        calls = Counter(id(call.params["jaxprs"][0]) for call in kernel_calls(twice.jaxpr))
        assert 1 not in calls.values(), "a kernel's body closes over an array, or what is never equal"
        kernels += len(calls)
    assert kernels or spec != op.tagged("test")[0]


@dataclass(frozen=True)
class Settings:
    width: Any


def body(width: Any, scale: Any = None):
    def inner(x):
        return x * width

    def function(x):
        return function if scale else inner(x)

    return function


def test_bodies_are_alike_when_what_they_close_over_is():
    assert described(body(8)) == described(body(8))
    assert described(body(Settings(width=(1, "a")))) == described(body(Settings(width=(1, "a"))))
    assert described(functools.partial(body(8), 1)) == described(functools.partial(body(8), 1))
    different = [8, 9, 8.0, Settings(width=8), (8,), [8], {"width": 8}, "8", None, True, 1, jnp.square]
    assert len({described(body(each)) for each in different}) == len(different)
    assert described(body(8, scale=1)) != described(body(8))


@pytest.mark.parametrize("array", [jnp.ones(2), np.ones(2)], ids=["jax", "numpy"])
def test_arrays_are_not_kept(array):
    with pytest.raises(TypeError):
        described(body(Settings(width=[array])))
    assert traced_once(jnp.sin, body(array)) is jnp.sin


def test_calls_keep_their_own_place_in_the_program():
    def double(x):
        return x * 2.0

    @jax.make_jaxpr
    def program(x):
        for name in ("first", "second"):
            with jax.named_scope(name):
                x = traced_once(double, body(8))(x)
        return x

    equations = program(1.0).jaxpr.eqns
    assert [str(each.source_info.name_stack) for each in equations] == ["first", "second"]
    assert [each.primitive.name for each in equations] == ["mul", "mul"]
