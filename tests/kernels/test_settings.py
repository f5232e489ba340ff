"""What callers may set in JAX must not matter to the kernels."""

from __future__ import annotations

import traceback
from functools import partial
from pathlib import Path

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import pytest
from compile_deviceless import kernel_calls
from jax._src.mesh import AbstractDevice
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

import pallas_kernels
from pallas_kernels import (
    REGISTRY,
    batch_norm,
    bias_activation,
    cross_entropy,
    decode_attention,
    gated_activation,
    linear_cross_entropy,
)
from pallas_kernels.specs import plain

HOPPER = AbstractMesh(
    (1,),
    ("d",),
    axis_types=(AxisType.Auto,),
    abstract_device=AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="gpu"),
)


def test_kernels_are_traced_in_32_bits():
    def function(x):
        return jnp.sum(gated_activation(x, x, implementation="mosaic"))

    x = jnp.ones((2, 256), "bfloat16")
    with jax.sharding.use_abstract_mesh(HOPPER):
        narrow = jax.make_jaxpr(jax.vmap(jax.jit(jax.grad(function))))(x)
        with jax.enable_x64(True):
            wide = jax.make_jaxpr(jax.vmap(jax.jit(jax.grad(function))))(x)
    assert kernels(wide) == kernels(narrow) != []


def kernels(jaxpr):
    """The bodies of the kernels that a program calls."""
    return [str(call.params["jaxprs"]) for call in kernel_calls(jaxpr.jaxpr)]


def test_every_kernel_is_made_with_the_package_s_settings():
    folder = Path(pallas_kernels.__file__).parent
    own = [file.name for file in folder.rglob("*.py") if "plgpu.kernel(" in file.read_text()]
    assert own == ["settings.py"], "call pallas_kernels.primitives.settings.kernel in place of plgpu.kernel"


@pytest.mark.parametrize(
    ("name", "shapes", "frames"),
    [
        ("rms_norm", [(3, 264), (264,)], 9),
        ("attention", [(1, 72, 3, 64)] * 3, 7),
        ("gated_linear", [(130, 192), (192, 320), (192, 320)], 9),
    ],
)
def test_few_frames_lead_from_a_call_to_its_launch(name, shapes, frames, monkeypatch):
    real, folder, found = plgpu.kernel, str(Path(pallas_kernels.__file__).parent), []

    def kernel(body, **options):
        launch = real(body, **options)

        def counted(*operands):
            found.append(sum(frame.filename.startswith(folder) for frame in traceback.extract_stack()))
            return launch(*operands)

        return counted

    monkeypatch.setattr(plgpu, "kernel", kernel)
    function = partial(getattr(pallas_kernels, name), implementation="mosaic")
    with jax.sharding.use_abstract_mesh(HOPPER):
        jax.eval_shape(function, *(jax.ShapeDtypeStruct(shape, "bfloat16") for shape in shapes))
    assert found == [frames]


@pytest.mark.parametrize("op", REGISTRY.values(), ids=lambda op: op.name)
def test_strict_promotion_is_for_the_caller_s_own_expressions(op):
    structs = op.tagged("test")[0].structs()

    def results():  # a function of its own each time: JAX keeps what it traced
        return jax.eval_shape(lambda arguments: op.function(**plain(arguments)), structs)

    usual = results()
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        assert results() == usual


def test_kernels_keep_their_loops_where_jit_is_disabled():
    def function(hidden, w):
        return linear_cross_entropy(hidden, w, jnp.zeros(8, "int32"), reduction="sum", implementation="mosaic")

    hidden, w = jnp.ones((8, 64), "bfloat16"), jnp.ones((64, 320), "bfloat16")
    with jax.sharding.use_abstract_mesh(HOPPER):
        usual = jax.make_jaxpr(function)(hidden, w)
        with jax.disable_jit():
            unrolled = jax.make_jaxpr(function)(hidden, w)
    assert kernels(unrolled) == kernels(usual) != []


def test_strict_promotion_does_not_reach_gradients():
    query, cache = jnp.ones((1, 1, 2, 64), "bfloat16"), jnp.ones((1, 8, 1, 64), "bfloat16")

    def function(query):
        return jnp.sum(decode_attention(query, cache, cache, jnp.ones(1, "int32"), implementation="mosaic"))

    strict = jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise")
    with jax.sharding.use_abstract_mesh(HOPPER), strict[0], strict[1]:
        gradient = jax.eval_shape(jax.grad(function), query)
    assert (gradient.shape, gradient.dtype) == (query.shape, query.dtype)


def test_labels_alone_make_no_nan():
    with jax.debug_nans(True):
        losses = cross_entropy(jnp.zeros((2, 4)), jnp.array([1, -1]))
        with pytest.raises(FloatingPointError):
            cross_entropy(jnp.zeros((2, 4)), jnp.array([1, 4]))
    assert losses[1] == 0


SHARED_ROWS = {
    "batch_norm": lambda x, scale: batch_norm(x, scale, scale, implementation="mosaic")[0],
    "bias_activation": lambda x, bias: bias_activation(x, bias, implementation="mosaic"),
}


@pytest.mark.parametrize("name", SHARED_ROWS)
def test_rows_that_devices_share_beside_what_they_do_not(name):
    device = AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="gpu")
    mesh = AbstractMesh((2,), ("data",), axis_types=(AxisType.Auto,), abstract_device=device)
    x, vectors = jnp.ones((4, 256)), jnp.ones((2, 256))

    def function(x, vectors):
        local = jax.shard_map(
            lambda x, vector: SHARED_ROWS[name](x, vector[0])[None],
            mesh=mesh,
            in_specs=(PartitionSpec(), PartitionSpec("data")),
            out_specs=PartitionSpec("data"),
        )
        return jnp.sum(local(x, vectors))

    with jax.sharding.use_abstract_mesh(mesh):
        gradients = jax.eval_shape(jax.grad(function, argnums=(0, 1)), x, vectors)
    assert [gradient.shape for gradient in gradients] == [x.shape, vectors.shape]
