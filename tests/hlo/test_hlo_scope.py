"""Scopes, against what JAX really writes under every transformation and kind of control flow."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from hlo_analysis.hlo import parse_module
from hlo_analysis.hlo.scope import scope_of

X = jax.ShapeDtypeStruct((4, 4), jnp.float32)
BATCH = jax.ShapeDtypeStruct((3, 4, 4), jnp.float32)


def block(x):
    with jax.named_scope("block"):
        with jax.named_scope("mlp"):
            y = jnp.sin(x @ x)
        with jax.named_scope("norm"):
            return y * jnp.tanh(x)


def scopes(function, *shapes) -> dict[str, set[str]]:
    """Scopes by phase in the optimised program, where every call has been inlined."""
    found: dict[str, set[str]] = {"forward": set(), "backward": set()}
    for computation in parse_module(jax.jit(function).lower(*shapes).compile().as_text()).computations.values():
        for instruction in computation.instructions.values():
            if "/" in instruction.op_name:
                scope, phase = scope_of(instruction.op_name)
                found[phase].add(scope)
    return found


def grad(function):
    return jax.grad(lambda x: function(x).sum())


BLOCK = {"block/mlp", "block/norm"}


def prefixed(prefix: str) -> set[str]:
    return {f"{prefix}/{scope}" for scope in BLOCK}


def test_forward():
    assert scopes(block, X) == {"forward": BLOCK, "backward": set()}


def test_inner_functions():
    def program(x):
        with jax.named_scope("outer"):
            return jax.jit(block)(jnp.einsum("ij,jk->ik", x, x))

    assert scopes(program, X)["forward"] == {"outer"} | prefixed("outer")


@pytest.mark.parametrize(
    ("function", "shape"),
    [
        (grad(block), X),
        (grad(jax.vmap(block)), BATCH),
        (grad(jax.checkpoint(block)), X),
        (grad(jax.vmap(jax.checkpoint(block))), BATCH),
        (grad(jax.jit(block)), X),
        (grad(jax.checkpoint(block, policy=jax.checkpoint_policies.dots_saveable)), X),
        (jax.grad(lambda x: grad(block)(x).sum()), X),
    ],
    ids=["grad", "vmap", "remat", "vmap of remat", "jit", "remat with policy", "second order"],
)
def test_backward(function, shape):
    found = scopes(function, shape)
    assert found["backward"] - {""} == BLOCK
    assert found["forward"] - {""} <= BLOCK


@pytest.mark.parametrize(
    "function",
    [
        lambda x: jax.checkpoint(block)(x),
        lambda x: jax.named_scope("inner")(jax.checkpoint(block))(x),
        lambda x: jax.checkpoint(jax.named_scope("inner")(jax.checkpoint(block)))(x),
        lambda x: jax.lax.scan(lambda c, _: (jax.checkpoint(block)(c), None), x, None, length=3)[0],
        lambda x: jax.lax.scan(
            lambda c, _: (jax.named_scope("inner")(jax.checkpoint(block))(c), None), x, None, length=3
        )[0],
        lambda x: jax.lax.cond(x.sum() > 0, jax.checkpoint(block), lambda y: y, x),
        lambda x: jax.jit(lambda y: jax.named_scope("inner")(jax.checkpoint(block))(y))(x),
        lambda x: jax.checkpoint(lambda y: jax.lax.scan(lambda c, _: (block(c), None), y, None, length=3)[0])(x),
    ],
    ids=["in a scope", "in two scopes", "nested", "scan", "scan in a scope", "cond", "jit", "of scan"],
)
def test_rematerialisation_does_not_double_the_scopes_around_it(function):
    found = scopes(grad(jax.named_scope("outer")(function)), X)
    everything = {scope.replace("inner/", "").replace("/inner", "") for scope in found["forward"] | found["backward"]}
    assert everything - {""} == {"outer"} | prefixed("outer") or everything - {""} == prefixed("outer")
    assert {"outer/inner/block/mlp", "outer/block/mlp"} & found["backward"]
    assert not any("inner/inner" in scope or "outer/outer" in scope for scope in found["backward"])


def test_loops_and_branches():
    def program(x):
        with jax.named_scope("steps"):
            x = jax.lax.scan(lambda c, _: (block(c), c.sum()), x, None, length=3)[0]
        with jax.named_scope("until"):
            x = jax.lax.while_loop(lambda c: c.sum() < 100, lambda c: block(c) + 1, x)
        with jax.named_scope("for"):
            x = jax.lax.fori_loop(0, 3, lambda _, c: block(c), x)
        with jax.named_scope("choice"):
            x = jax.lax.cond(x.sum() > 0, block, lambda y: y + 1, x)
            return jax.lax.switch(x.sum().astype(int), [block, lambda y: y * 2, lambda y: y - 1], x)

    names = ("steps", "until", "for", "choice")
    found = scopes(program, X)
    assert found["forward"] - {""} == set().union(names, *(prefixed(name) for name in names))
    assert found["backward"] == set()
    # Under grad (a while loop with an open end has none).
    steps = scopes(grad(lambda x: jax.named_scope("s")(jax.lax.scan)(lambda c, _: (block(c), None), x, None, 3)[0]), X)
    assert steps == {"forward": {"s"} | prefixed("s"), "backward": {"s"} | prefixed("s")}


def test_custom_derivatives():
    @jax.custom_vjp
    def f(x):
        return jnp.sin(x)

    def forward(x):
        with jax.named_scope("kernel"):
            return jnp.sin(x) @ x, x

    def backward(x, g):
        with jax.named_scope("kernel_vjp"):
            return (g @ jnp.cos(x),)

    f.defvjp(forward, backward)

    @jax.custom_jvp
    def h(x):
        return jnp.tanh(x)

    @h.defjvp
    def _(primals, tangents):
        with jax.named_scope("rule"):
            return h(*primals), tangents[0] * jnp.exp(primals[0])

    found = scopes(grad(lambda x: jax.named_scope("outer")(f)(x) * 2.0), X)
    assert "outer/kernel_vjp" in found["backward"]
    found = scopes(grad(lambda x: jax.named_scope("outer")(h)(x) @ x), X)
    assert "outer/rule" in found["forward"] | found["backward"]


def test_shard_map():
    mesh = jax.make_mesh((1,), ("i",), axis_types=(AxisType.Auto,), devices=jax.devices()[:1])

    def program(x):
        with jax.named_scope("outer"):
            return jax.shard_map(block, mesh=mesh, in_specs=P("i"), out_specs=P("i"))(x)

    assert scopes(program, X)["forward"] - {"", "outer"} == prefixed("outer")
    found = scopes(grad(program), X)
    assert found["backward"] - {"", "outer"} == prefixed("outer")


@pytest.mark.parametrize(
    ("op_name", "scope", "phase"),
    [
        ("", "", "forward"),
        ("x", "", "forward"),
        ("params['w/x']", "", "forward"),
        ("jit(f)/block/mlp/dot_general", "block/mlp", "forward"),
        ("jit(f)/transpose(jvp(block))/mlp/dot_general", "block/mlp", "backward"),
        ("jit(f)/jvp(vmap(block))/mlp/sin", "block/mlp", "forward"),
        ("jit(f)/jvp(jit(silu))/mul", "", "forward"),
        ("jit(f)/transpose(jvp())/broadcast_in_dim", "", "backward"),
        ("jit(<lambda>)/jvp(block)/mlp/jit(silu)", "block/mlp", "forward"),
        # one of two op names that XLA merged
        ("jit(f)/a/mul;jit(f)/b/add", "a", "forward"),
        # einsum names a scope by its equation
        ("jit(f)/jvp(attn)/vmap(BTNH,BSNH->BNTS)/dot_general", "attn", "forward"),
        # Pallas puts the name of a Mosaic GPU kernel before its primitive; a pallas_call may have none
        ("jit(f)/transpose(jvp(block))/mlp_norm/rms_norm_vjp/mpmd_map", "block/mlp_norm", "backward"),
        ("jit(f)/mpmd_map", "", "forward"),
        ("jit(f)/block/mlp/pallas_call", "block/mlp", "forward"),
        ("jit(f)/shard_map/mlp/psum", "mlp", "forward"),
        ("jit(f)/while/body/eval_jaxpr/while/body/block/sin", "block", "forward"),
        ("jit(f)/cond/branch_12_fun/block/sin", "block", "forward"),
        ("jit(f)/transpose(jvp(a))/b/jvp(a)/b/checkpoint/rematted_computation/c/cos", "a/b/c", "backward"),
        ("jit(f)/transpose(jvp(a))/a/jvp(a)/a/checkpoint/rematted_computation/c/cos", "a/a/c", "backward"),
        ("jit(f)/transpose(jvp(a))/b/jvp(a)/b/remat2", "a/b", "backward"),
        # scopes that only look like JAX's own
        ("jit(f)/body/cond/sin", "body/cond", "forward"),
        ("jit(f)/a/a/sin", "a/a", "forward"),
        ("jit(f)/we/ird (sc)ope/sin", "we/ird (sc)ope", "forward"),
        ("jit(f)/jvp(we/ird (sc)ope)/sin", "we/ird (sc)ope", "forward"),
        ("jit(f)/layer(1)/sin", "layer(1)", "forward"),
        ("jit(f)/open(/b/sin", "open(/b", "forward"),
        ("jit(f)/" + "jvp(" * 5000 + "a" + ")" * 5000 + "/sin", "a", "forward"),
        # JAX of some years ago wrote the primitive's parameters
        ("jit(f)/mlp/dot_general[dimension_numbers=(((1,), (0,)), ((), ())) precision=None]", "mlp", "forward"),
    ],
)
def test_op_names(op_name, scope, phase):
    assert scope_of(op_name) == (scope, phase)
