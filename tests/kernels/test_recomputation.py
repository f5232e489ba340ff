"""Under jax.checkpoint the pass that computes again has every kernel that changes an array. Needs no GPU."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from typing import Any

import compile_deviceless
import jax
import pytest
from jax._src.core import jaxprs_in_params

from pallas_kernels import REGISTRY, OpSpec, testing
from pallas_kernels.specs import ArgSpec, plain

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("jax_plugins.xla_cuda13") is None, reason="needs the extra 'deviceless'"
)


def unchanged(jaxpr: Any) -> Iterator[str]:
    """The references that are made and that no kernel, and nothing else, is given before they are read."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "new_ref":
            (reference,) = equation.outvars
            users = {each.primitive.name for each in jaxpr.eqns if reference in each.invars}
            if users <= {"freeze", "free_ref"}:
                yield f"{reference.aval} {users}"
        for inner in jaxprs_in_params(equation.params):
            yield from unchanged(inner)


def traced_gradient(op: OpSpec, spec: ArgSpec) -> Any:
    structs = spec.structs()
    outputs = tuple(jax.tree.leaves(jax.eval_shape(lambda arguments: op.reference(**plain(arguments)), structs)))

    def values(arguments):
        return tuple(testing.forward(testing.Case(op=op, arguments=arguments, cotangents=()), "mosaic").values())

    def gradient(arguments, cotangents):
        return jax.vjp(jax.checkpoint(values), arguments)[1](cotangents)[0]

    mesh, _ = compile_deviceless.h200()
    with jax.sharding.use_abstract_mesh(mesh):
        return jax.jit(gradient).trace(structs, outputs).jaxpr.jaxpr


def specs_of(op: OpSpec) -> dict[str, ArgSpec]:
    """By name: a small call, two that fill tiles, and the block's, for which attention has other kernels."""
    chosen = (op.tagged("test")[0], *op.tagged("gpu")[:2], *op.tagged("block"))
    return {spec.name: spec for spec in chosen}


CASES = [
    pytest.param(op, spec, id=f"{op.name}-{name}")
    for op in REGISTRY.values()
    if "mosaic" in op.implementations
    for name, spec in specs_of(op).items()
]


@pytest.mark.drawn(1 / 4, of_each="op")
@pytest.mark.parametrize(("op", "spec"), CASES)
def test_no_kernel_is_lost(op, spec):
    assert not list(unchanged(traced_gradient(op, spec)))
