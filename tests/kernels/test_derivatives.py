"""Operations have first derivatives in reverse mode, on a CPU as on a Hopper GPU."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.mesh import AbstractDevice
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from pallas_kernels import gated_linear, rms_norm
from pallas_kernels.arguments import Norm

HOPPER = AbstractMesh(
    (1,),
    ("d",),
    axis_types=(AxisType.Auto,),
    abstract_device=AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="gpu"),
)
X, SCALE = jnp.linspace(-1, 1, 512).reshape(4, 128), jnp.ones(128)


def norm(x, implementation=None):
    return rms_norm(x, SCALE, implementation=implementation)


def total(x, implementation=None):
    return jnp.sum(norm(x, implementation) ** 2)


REFUSED = {
    "jvp": lambda how: jax.jvp(lambda x: norm(x, how), (X,), (X,)),
    "jvp of jit": lambda how: jax.jvp(jax.jit(lambda x: norm(x, how)), (X,), (X,)),
    "jit of jvp": lambda how: jax.jit(lambda x: jax.jvp(lambda x: norm(x, how), (x,), (x,)))(X),
    "jacfwd": lambda how: jax.jacfwd(lambda x: norm(x, how))(X),
    "linearize": lambda how: jax.linearize(lambda x: norm(x, how), X)[1](X),
    "second, reverse over reverse": lambda how: jax.grad(lambda x: jnp.sum(jax.grad(total)(x, how) ** 2))(X),
    "second, forward over reverse": lambda how: jax.jvp(lambda x: jax.grad(total)(x, how), (X,), (X,)),
    "of a pullback": lambda how: jax.grad(lambda dy: jnp.sum(jax.vjp(lambda x: norm(x, how), X)[1](dy)[0] ** 2))(X),
}


@pytest.mark.parametrize("name", REFUSED)
def test_forward_and_second_derivatives_are_refused_on_a_cpu(name):
    with pytest.raises(NotImplementedError, match=r"^rms_norm has first derivatives in reverse mode.*='xla'"):
        REFUSED[name](None)
    assert jax.tree.leaves(REFUSED[name]("xla"))


@pytest.mark.parametrize("name", ["jvp", "second, reverse over reverse", "second, forward over reverse"])
@pytest.mark.parametrize("implementation", [None, "mosaic"])
def test_they_are_refused_alike_on_hopper(name, implementation):
    def lowered(x):
        return jax.tree.leaves(REFUSED[name](implementation))

    with jax.sharding.use_abstract_mesh(HOPPER), pytest.raises(NotImplementedError, match=r"^rms_norm has first"):
        jax.jit(lowered).trace(X).lower(lowering_platforms=("cuda",))


def test_arrays_within_a_norm_count():
    w = jnp.ones((128, 128))

    def function(scale):
        return gated_linear(X, w, w, norm=Norm(scale=scale))

    with pytest.raises(NotImplementedError, match=r"^gated_linear has first"):
        jax.jvp(function, (SCALE,), (SCALE,))


def _scanned(x, how):
    @jax.checkpoint
    def step(x, _):
        return norm(x, how), None

    return jax.lax.scan(step, x, None, length=3)[0]


def _mapped(x, how):
    mesh = jax.make_mesh((1,), ("data",), axis_types=(AxisType.Auto,))
    cut = PartitionSpec("data")
    return jax.shard_map(lambda x: norm(x, how), mesh=mesh, in_specs=cut, out_specs=cut)(x)


FIRST = {
    "plain": norm,
    "jit": lambda x, how: jax.jit(lambda x: norm(x, how))(x),
    "vmap": lambda x, how: jax.vmap(lambda row: norm(row, how))(x),
    "scan of checkpoint": _scanned,
    "shard_map": _mapped,
}


@pytest.mark.drawn(1 / 3)
@pytest.mark.parametrize("name", FIRST)
@pytest.mark.parametrize("with_jit", [False, True])
def test_first_derivatives_are_those_of_xla(name, with_jit):
    def gradient(how):
        function = jax.grad(lambda x: jnp.sum(FIRST[name](x, how) ** 3))
        return (jax.jit(function) if with_jit else function)(X)

    np.testing.assert_allclose(gradient(None), gradient("xla"), rtol=1e-6)


def test_nothing_of_it_is_in_the_program():
    def text(how):
        def function(x):
            return jax.value_and_grad(total)(x, how)

        return jax.jit(function).lower(X).as_text()

    assert text(None) == text("xla")
