"""`fuse` under transformations, on trees, effects, modules, and bad input."""

from __future__ import annotations

import functools
import inspect

import flax.nnx as nnx
import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.source_info_util import user_frames
from rewriting import normal

import hlo_analysis
import xlafuse
from hlo_analysis.capture.lowering import answers_of, mesh_of_one, under_mesh_of_one
from hlo_analysis.targets import load_target
from xlafuse.fusion import FuseWarning, search

X, SCALE = normal((8, 64)), normal((64,), seed=1)


def norm(x, scale):
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-5) * scale


def layers(x, weights, scale):
    def body(carry, weight):
        h = norm(carry, scale)
        return carry + jax.checkpoint(lambda h: jax.nn.silu(h @ weight) * h)(h), None

    return jnp.sum(jax.lax.scan(body, x, weights)[0] ** 2)


WEIGHTS = 0.1 * normal((3, 64, 64), seed=3)


def operations(fn, *arguments, **options):
    reports = []
    jax.eval_shape(xlafuse.fuse(fn, report=reports.append, **options), *arguments)
    return [each.operation for each in reports[0].taken]


def test_bodies_of_loops_and_remat_are_rewritten():
    assert operations(layers, X, WEIGHTS, SCALE) == ["rms_norm", "gated_activation"]


@pytest.mark.parametrize(
    "transform",
    [jax.jit, jax.grad, jax.value_and_grad, lambda f: jax.jit(jax.grad(f, argnums=(0, 1, 2))), jax.checkpoint],
)
def test_transformations(transform):
    ours, plain = transform(xlafuse.fuse(layers)), transform(layers)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4),
        ours(X, WEIGHTS, SCALE),
        plain(X, WEIGHTS, SCALE),
    )


def test_vmap_sees_the_unbatched_function():
    ours = jax.vmap(xlafuse.fuse(layers), in_axes=(0, None, None))(X[:, None], WEIGHTS, SCALE)
    plain = jax.vmap(layers, in_axes=(0, None, None))(X[:, None], WEIGHTS, SCALE)
    np.testing.assert_allclose(ours, plain, rtol=1e-4)


@pytest.mark.parametrize("outside", [True, False])
def test_shard_map(outside):
    mesh = jax.make_mesh((1,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    specs = {"mesh": mesh, "in_specs": (jax.P("d"), jax.P()), "out_specs": jax.P("d")}
    reports = []
    fuse = functools.partial(xlafuse.fuse, report=reports.append)
    mapped = fuse(jax.shard_map(norm, **specs)) if outside else jax.shard_map(fuse(norm), **specs)
    np.testing.assert_allclose(jax.jit(mapped)(X, SCALE), norm(X, SCALE), rtol=1e-5)
    assert [each.operation for each in reports[0].taken] == ["rms_norm"]


def test_cond_and_while():
    def fn(x, scale, flag):
        x = jax.lax.cond(flag, lambda x: norm(x, scale), lambda x: x, x)
        return jax.lax.while_loop(lambda c: c[0] < 2, lambda c: (c[0] + 1, norm(c[1], scale)), (0, x))[1]

    assert operations(fn, X, SCALE, True) == ["rms_norm"] * 2
    np.testing.assert_allclose(xlafuse.fuse(fn)(X, SCALE, jnp.array(True)), fn(X, SCALE, True), rtol=1e-5)


def test_trees_statics_and_closures():
    def fn(batch, *, how, epsilon=1e-5, extra=None):
        assert epsilon == 1e-5 and extra is None
        y = norm(batch["x"], SCALE) if how == "norm" else batch["x"]
        return {"y": y, "how": how, "parts": (batch["x"], None)}

    ours = xlafuse.fuse(fn)({"x": X}, how="norm")
    assert ours["how"] == "norm" and ours["parts"][1] is None
    np.testing.assert_allclose(ours["y"], norm(X, SCALE), rtol=1e-6)
    static = jax.jit(xlafuse.fuse(fn), static_argnames="how")
    with pytest.raises(TypeError, match="str"):
        static({"x": X}, how="norm")  # jit itself returns no strings


def test_closed_over_tracers():
    def outer(scale):
        return jnp.sum(xlafuse.fuse(lambda x: norm(x, scale))(X))

    np.testing.assert_allclose(jax.grad(outer)(SCALE), jax.grad(lambda s: jnp.sum(norm(X, s)))(SCALE), rtol=1e-5)


def test_effects_happen_once_and_in_order(capfd):
    def fn(x, scale):
        jax.debug.print("first {}", 1, ordered=True)
        y = norm(x, scale)
        jax.debug.print("second {}", 2, ordered=True)
        return y

    jax.block_until_ready(jax.jit(xlafuse.fuse(fn))(X, SCALE))
    jax.effects_barrier()
    assert capfd.readouterr().out.split("\n")[:2] == ["first 1", "second 2"]


def test_functions_with_their_own_derivative_are_left():
    @jax.custom_vjp
    def own(x, scale):
        return norm(x, scale)

    own.defvjp(lambda x, scale: (own(x, scale), None), lambda _, dy: (dy, None))
    assert operations(own, X, SCALE) == []


def test_a_differentiated_function_is_left_with_a_warning():
    gradient = jax.grad(lambda x: jnp.sum(norm(x, SCALE) ** 2))
    with pytest.warns(FuseWarning, match=r"jax.grad\(fuse\(loss\)\)"):
        ours = xlafuse.fuse(gradient)(X)
    np.testing.assert_array_equal(ours, gradient(X))


def test_a_function_of_open_sizes_is_left_with_a_warning():
    (rows,) = jax.export.symbolic_shape("rows")
    with pytest.warns(FuseWarning, match="sizes are left open"):
        result = jax.eval_shape(xlafuse.fuse(norm), jax.ShapeDtypeStruct((rows, 64), "float32"), SCALE)
    assert result.shape[0] == rows


@pytest.mark.parametrize(("rows", "depth", "columns"), [(0, 64, 128), (8, 0, 128), (8, 64, 0)])
def test_empty_arrays_are_left_alone(rows, depth, columns):
    x, w = jnp.ones((rows, depth), jnp.bfloat16), jnp.ones((depth, columns), jnp.bfloat16)
    assert operations(lambda x, w: jax.nn.gelu(x @ w), x, w) == []


def test_the_function_is_traced_once_a_call():
    calls = []

    def fn(x, scale):
        calls.append(1)
        return norm(x, scale)

    fused = jax.jit(xlafuse.fuse(fn))
    fused(X, SCALE)
    fused(X, SCALE)
    assert len(calls) == 1


def test_an_exported_function_has_the_same_kernels():
    pytest.importorskip("jax_plugins.xla_cuda13", reason="needs the extra 'deviceless'")
    target = load_target("h200")
    shapes = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((1024, 1024), (1024, 2048), (1024, 2048))]
    fused = jax.jit(xlafuse.fuse(lambda x, gate, up: jax.nn.silu(x @ gate) * (x @ up)))
    with answers_of(target):
        exported = under_mesh_of_one(mesh_of_one(target), lambda: jax.export.export(fused, platforms=["cuda"])(*shapes))
    restored = jax.export.deserialize(exported.serialize())
    launches = hlo_analysis.analyze(hlo_analysis.capture(restored.call, *shapes, target="h200")).launches
    assert [each.kind for each in launches] == ["mosaic"]


def test_calls_keep_the_line_of_the_program():
    x, w = X.astype(jnp.bfloat16), WEIGHTS[0].astype(jnp.bfloat16)
    (call,) = jax.make_jaxpr(xlafuse.fuse(lambda x, w: jax.nn.silu(x @ w)))(x, w).eqns
    frames = [next(iter(user_frames(each.source_info.traceback))) for each in call.params["jaxpr"].eqns]
    lines = {each.file_name for each in frames}
    assert lines == {__file__}


def test_reports_name_lines_and_implementations():
    reports = []
    xlafuse.fuse(norm, report=reports.append)(X, SCALE)
    (site,) = reports[0].taken
    assert "test_fusion_transformations.py:" in site.where
    assert site.implementation == "xla"
    assert site.options == {"epsilon": 1e-5}


def test_sites_in_modules_are_where_the_user_calls_them():
    class Model(nnx.Module):
        def __init__(self):
            self.norm = nnx.RMSNorm(64, rngs=nnx.Rngs(0))

        def __call__(self, x):
            return self.norm(x)

    reports = []
    model = Model()
    jax.eval_shape(xlafuse.fuse(lambda x: model(x), report=reports.append), X)
    line = inspect.getsourcelines(Model.__call__)[1] + 1
    assert reports[0].taken[0].where == f"tests/fusion/test_fusion_transformations.py:{line}"


def test_a_second_layer_traces_no_more_definitions():
    def layers(count, x, scale, weight):
        for _ in range(count):
            x = x + jax.nn.silu(norm(x, scale) @ weight) * x
        return x

    traced = []
    for count in (2, 6):
        assert len(operations(functools.partial(layers, count), X, SCALE, WEIGHTS[0])) == 2 * count
        traced.append(search._pattern.cache_info().misses)
    assert traced[0] == traced[1]


def test_what_is_taken_is_not_refused_as_something_else():
    def causal(x):
        return jax.nn.dot_product_attention(x, x, x, is_causal=True, implementation="xla")

    reports = []
    jax.eval_shape(xlafuse.fuse(causal, report=reports.append), jnp.ones((1, 8, 2, 16), jnp.bfloat16))
    assert [each.operation for each in reports[0].taken] == ["attention"]
    assert not reports[0].refused


def test_attention_around_a_taken_softmax_is_refused_with_the_reason():
    def kept(x, keep):
        weights = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", x, x)) * keep
        return jnp.einsum("bhqk,bkhd->bqhd", weights, x)

    reports = []
    arguments = jnp.ones((1, 8, 2, 16), jnp.bfloat16), jnp.ones((1, 2, 8, 8), bool)
    jax.eval_shape(xlafuse.fuse(kept, report=reports.append), *arguments)
    assert [each.operation for each in reports[0].taken] == ["softmax"]
    assert any("are not scaled" in each.reason and each.operation == "attention" for each in reports[0].refused)


def test_bad_input():
    with pytest.raises(TypeError, match="expected a function"):
        xlafuse.fuse(3)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="no operation 'norm'"):
        xlafuse.fuse(norm, ops=["norm"])
    with pytest.raises(ValueError, match="unknown allowance"):
        xlafuse.fuse(norm, allow=["anything"])
    with pytest.raises(ZeroDivisionError):
        xlafuse.fuse(lambda x: x / (1 // 0))(X)


def assert_same_state(ours, plain):
    for one, other in zip(jax.tree.leaves(nnx.state(ours)), jax.tree.leaves(nnx.state(plain)), strict=True):
        if jnp.issubdtype(one.dtype, jax.dtypes.prng_key):
            one, other = jax.random.key_data(one), jax.random.key_data(other)
        np.testing.assert_allclose(one, other, atol=1e-5)


class Block(nnx.Module):
    """A block with all kinds of state."""

    def __init__(self, rngs):
        self.norm = nnx.LayerNorm(64, rngs=rngs)
        self.linear = nnx.Linear(64, 64, rngs=rngs)
        self.batch_norm = nnx.BatchNorm(64, rngs=rngs)
        self.dropout = nnx.Dropout(0.3, rngs=rngs)

    def __call__(self, x):
        return self.dropout(self.batch_norm(nnx.silu(self.linear(self.norm(x))) * x))


def test_modules_keep_their_state():
    ours, plain = Block(nnx.Rngs(0)), Block(nnx.Rngs(0))
    for _ in range(2):  # the second call draws other dropout
        np.testing.assert_allclose(xlafuse.fuse(ours)(X), plain(X), rtol=1e-3, atol=1e-4)
    assert_same_state(ours, plain)


def test_modules_as_arguments_under_nnx_transformations():
    ours, plain = Block(nnx.Rngs(0)), Block(nnx.Rngs(0))

    def loss(module, x):
        return jnp.mean(module(x) ** 2)

    gradients = nnx.jit(nnx.grad(xlafuse.fuse(loss)))(ours, X)
    expected = nnx.jit(nnx.grad(loss))(plain, X)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5), gradients, expected)
    assert_same_state(ours, plain)


def test_a_method_of_a_module():
    class Model(nnx.Module):
        def __init__(self):
            self.scale = nnx.Param(SCALE)

        def forward(self, x):
            return norm(x, self.scale[...])

    np.testing.assert_allclose(xlafuse.fuse(Model().forward)(X), norm(X, SCALE), rtol=1e-6)


def test_a_warning_names_the_users_line():
    class Model:
        def loss(self, x):
            return jax.grad(lambda x: jnp.sum(x**2))(x)

    fused = xlafuse.fuse(Model().loss)
    calls = [fused, jax.jit(fused), lambda x: jax.vmap(fused)(x[None])]
    for call in calls:
        with pytest.warns(FuseWarning) as caught:
            call(jnp.ones(8))
        assert caught[0].filename == __file__
