"""The FLOP metadata of kernels agrees with the operation's own count."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from compile_deviceless import kernel_calls
from jax._src.mesh import AbstractDevice
from jax.sharding import AbstractMesh, AxisType

from hlo_analysis.hlo.attributes import _STATED_FLOPS
from pallas_kernels import REGISTRY, attention, linear, testing
from pallas_kernels.specs import plain

H200 = AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="gpu")
MESH = AbstractMesh((1,), ("_device",), axis_types=(AxisType.Auto,), abstract_device=H200)
PRODUCTS = [name for name, op in REGISTRY.items() if op.flops is not None]


def stated(function, *arguments):
    """FLOPs and elements of results, of each kernel of a call."""
    with jax.sharding.use_abstract_mesh(MESH):
        jaxpr = jax.jit(function).trace(*arguments).jaxpr.jaxpr
    texts = [(call.ctx.xla_metadata or {}).get("matrix_flops", "") for call in kernel_calls(jaxpr)]
    return [(int(m[2]), int(m[3])) for text in texts if (m := _STATED_FLOPS.fullmatch(f'matrix_flops="{text}"'))]


@pytest.mark.parametrize("name", PRODUCTS)
def test_forward_kernels_state_the_operations_flops(name):
    op = REGISTRY[name]
    spec = op.tagged("bench")[0]

    def forward(arguments):
        return testing.forward(testing.Case(op=op, arguments=arguments, cotangents=()), "mosaic")

    flops = sum(count for count, _ in stated(forward, spec.structs()))
    # lora_linear fills ranks up to a multiple of 64, where x @ a is a product of its own, which is XLA's.
    bounds = {"rel": 0.01 if name == "lora_linear" else 0}
    assert flops == pytest.approx(op.flops(plain(spec.structs()), "forward"), **bounds)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("length", [256, 4096])
def test_attention_states_seven_products_of_two_kernels_or_five_of_one(length, causal):
    op = REGISTRY["attention"]
    heads = jax.ShapeDtypeStruct((2, length, 8, 128), jnp.bfloat16)
    arguments = {"query": heads, "key": heads, "value": heads}

    def backward(query, key, value, dout):
        given = {"query": query, "key": key, "value": value, "is_causal": causal}
        return op.backward("mosaic", given, (dout,))

    made = stated(backward, heads, heads, heads, heads)
    one = op.flops({**arguments, "is_causal": causal}, "forward") // 2
    assert [count // one for count, _ in made] == ([3, 4] if length == 256 else [5])


def test_under_vmap_the_statement_is_of_one_member():
    """Whose results are so many elements, by which a reader sees how many members there are."""
    x, w = jax.ShapeDtypeStruct((3, 512, 256), jnp.bfloat16), jax.ShapeDtypeStruct((256, 256), jnp.bfloat16)
    made = stated(jax.vmap(lambda x, w: linear(x, w, implementation="mosaic"), in_axes=(0, None)), x, w)
    assert made == [(2 * 512 * 256 * 256, 512 * 256)]


def test_what_depends_on_segments_is_not_stated():
    heads, segments = jax.ShapeDtypeStruct((1, 512, 2, 64), jnp.bfloat16), jax.ShapeDtypeStruct((1, 512), jnp.int32)
    assert stated(lambda q, s: attention(q, q, q, segment_ids=s, implementation="mosaic"), heads, segments) == []
