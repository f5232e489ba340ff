"""Products of sizes that no library's kernel takes: which are padded, and that padding changes no number."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from draws import normal
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, NamedSharding, PartitionSpec

from pallas_kernels import Norm, linear, linear_cross_entropy, norm_linear
from pallas_kernels.primitives.odd_sizes import MATRICES, Padding, padded_product, padding_of

H100 = AbstractDevice(device_kind="NVIDIA H100 80GB HBM3", num_cores=132, platform="cuda")
MESH = AbstractMesh((1,), ("d",), axis_types=(AxisType.Auto,), abstract_device=H100)
TIED = (((1,), (1,)), ((), ()))
"""The dimensions of a product with a table (vocabulary, features)."""


def struct(*shape, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(shape, dtype)


def padded(lhs, rhs, dimensions=MATRICES, **options):
    with jax.sharding.use_abstract_mesh(MESH):
        return padding_of(lhs, rhs, dimensions, **options)


@pytest.mark.parametrize(
    ("lhs", "rhs", "dimensions", "sizes", "only_gradients"),
    [
        ((8192, 1024), (1024, 50257), MATRICES, ((8192, 1024), (1024, 50304)), False),
        ((8192, 1024), (30522, 1024), TIED, ((8192, 1024), (30528, 1024)), True),
        ((8192, 50257), (50257, 1024), MATRICES, ((8192, 50304), (50304, 1024)), False),
        ((1001, 8192), (1001, 8192), (((0,), (0,)), ((), ())), None, False),  # the rows alone are odd
        ((4, 2048, 1001), (1001, 4096), (((2,), (0,)), ((), ())), ((4, 2048, 1008), (1008, 4096)), False),
        ((8192, 1024), (1024, 8, 101), MATRICES, None, False),  # 808 columns lie side by side
        ((8192, 1024), (1024, 50256), MATRICES, None, False),
        ((128, 1024), (1024, 50257), MATRICES, None, False),  # the copy takes longer than the product
        ((8192, 1024), (1024, 5), MATRICES, None, False),
        ((8192, 1024), (1024, 30522), MATRICES, ((8192, 1024), (1024, 30528)), True),  # summed over in a gradient
        ((600, 1024), (1024, 50257), MATRICES, ((600, 1024), (1024, 50304)), False),
        ((600, 1024), (1024, 50258), MATRICES, None, False),  # one of three products is slow
        ((8, 2048, 1024), (8, 1024, 4097), (((2,), (1,)), ((0,), (0,))), None, False),
    ],
)
def test_what_is_padded(lhs, rhs, dimensions, sizes, only_gradients):
    found = padded(struct(*lhs), struct(*rhs), dimensions)
    assert (None if found is None else (found.lhs, found.rhs)) == sizes
    assert found is None or found.serves_gradients_only == only_gradients


def test_what_is_never_padded():
    assert padded(struct(8192, 1024, dtype=jnp.float32), struct(1024, 50257, dtype=jnp.float32)) is None
    assert padding_of(struct(8192, 1024), struct(1024, 50257), MATRICES) is None, "on a CPU"
    mesh = AbstractMesh((2,), ("d",), axis_types=(AxisType.Explicit,), abstract_device=H100)
    w = jax.ShapeDtypeStruct((1024, 50258), jnp.bfloat16, sharding=NamedSharding(mesh, PartitionSpec(None, "d")))
    assert padded(struct(8192, 1024), w) is None, "sharded"
    few = struct(1024, 512), struct(512, 50257)
    assert padded(*few) is not None
    assert padded(*few, copies_result=True) is None, "the copy of the result takes what the product saves"


def test_a_transposed_table_is_odd_in_its_result_alone():
    found = padded(struct(8192, 1024), struct(1024, 50257), minor=(1, 0))
    assert found is not None
    assert found.serves_gradients_only


@pytest.mark.parametrize("only_gradients", [False, True])
def test_padding_changes_no_number(only_gradients):
    x, w = normal(0, (12, 13), jnp.float32), normal(1, (13, 21), jnp.float32)
    padding = Padding(lhs=(12, 16), rhs=(16, 24), result=(12, 21), serves_gradients_only=only_gradients)
    cotangent = normal(2, (12, 21), jnp.float32)
    own, pullback = jax.vjp(lambda x, w: padded_product(x, w, MATRICES, padding), x, w)
    right, plain = jax.vjp(jnp.matmul, x, w)
    for one, other in zip((own, *pullback(cotangent)), (right, *plain(cotangent)), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("only_gradients", [False, True])
def test_all_products_of_a_gradient_are_padded(only_gradients):
    padding = Padding(lhs=(12, 16), rhs=(16, 24), result=(12, 21), serves_gradients_only=only_gradients)
    gradient = jax.grad(lambda x, w: padded_product(x, w, MATRICES, padding).sum(), (0, 1))
    jaxpr = jax.make_jaxpr(gradient)(struct(12, 13), struct(13, 21))
    products = [each for each in jaxpr.jaxpr.eqns if each.primitive.name == "dot_general"]
    assert products
    sizes = {size for each in products for value in (*each.invars, *each.outvars) for size in value.aval.shape}
    assert sizes == {12, 16, 24}


@pytest.mark.parametrize("operation", ["linear", "norm_linear", "linear_cross_entropy"])
def test_operations_pad_what_they_leave_to_xla(operation):
    """Not if XLA was asked for by name."""
    labels = struct(8192, dtype=jnp.int32)
    call = {
        "linear": lambda x, w, _, **options: linear(x, w, **options),
        "norm_linear": lambda x, w, _, **options: norm_linear(x, w, norm=Norm(None, epsilon=1e-6), **options),
        "linear_cross_entropy": lambda x, w, labels, **options: linear_cross_entropy(
            x, w, labels, reduction="sum", **options
        ),
    }[operation]

    def columns(**options):
        def total(x, w, labels):
            return call(x, w, labels, **options).astype(jnp.float32).sum()

        with jax.sharding.use_abstract_mesh(MESH):
            return "50304" in str(
                jax.make_jaxpr(jax.grad(total, (0, 1)))(struct(8192, 1024), struct(1024, 50257), labels)
            )

    assert columns()
    assert not columns(implementation="xla")


@pytest.mark.parametrize(
    "options", [{"reduction": "mean"}, {"label_smoothing": 0.1}, {"ignore_index": 140, "z_loss": 0.1}]
)
def test_the_loss_of_padded_logits_is_that_of_the_vocabulary(monkeypatch, options):
    """Also of labels in the padding, which name no token, and of one that is ignored."""
    padding = Padding(lhs=(8, 16), rhs=(16, 136), result=(8, 133), serves_gradients_only=False)
    for module in ("primitives.odd_sizes", "ops.linear_cross_entropy.api"):
        monkeypatch.setattr(f"pallas_kernels.{module}.padding_of", lambda *_, **__: padding)
    x, w = normal(0, (8, 16), jnp.float32), normal(1, (16, 133), jnp.float32)
    labels = jnp.asarray([0, 132, 133, 135, 140, -1, 7, 9])

    def results(implementation):
        def losses(x, w):
            return linear_cross_entropy(x, w, labels, implementation=implementation, **options)

        own, pullback = jax.vjp(losses, x, w)
        return own, *pullback(jnp.ones_like(own))

    for one, other in zip(results(None), results("xla"), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)
