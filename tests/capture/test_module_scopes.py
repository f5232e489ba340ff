"""Modules of Flax NNX name the operations that they trace, and are afterwards what they were."""

from __future__ import annotations

import re
import threading
from typing import Any, Literal

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax._src.interpreters import mlir
from jaxlib.mlir import ir
from nnx_programs import WIDTH, Block, Model, X, model

from hlo_analysis import analyze
from hlo_analysis.capture import capture
from hlo_analysis.capture.lowering import lower
from hlo_analysis.errors import CaptureError
from hlo_analysis.hlo.scope import scope_of
from hlo_analysis.targets import load_target


def scopes(fn: Any, *arguments: Any) -> set[str]:
    """Scopes of the program's operations as they are lowered."""
    bytecode = lower(fn, arguments, target=load_target("cpu")).bytecode
    with mlir.make_ir_context():
        text = str(ir.Module.parse(bytecode).operation.get_asm(enable_debug_info=True))
    return {scope_of(name)[0] for name in re.findall(r'loc\("(jit\([^"]*)"', text)} - {""}


def linear() -> nnx.Linear:
    return nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(0))


def test_modules_are_named_by_attribute_and_index() -> None:
    def call(model: Model, x: jax.Array) -> jax.Array:
        return model(x)

    found = scopes(call, model(), X)
    block = {"", "/norm", "/attention", "/attention/qkv", "/mlp", "/mlp/up", "/mlp/down"}
    assert found == {f"Model/blocks/{i}{name}" for i in range(2) for name in block} | {
        "Model/head",
        "Model/head/layers/0",
    }


def test_modules_that_a_function_calls_are_named_by_the_model_that_holds_them() -> None:
    def call(model: Model, x: jax.Array) -> jax.Array:
        for block in model.blocks:
            x = block.mlp(x)
        return x

    inner = ("", "/up", "/down")
    assert scopes(call, model(), X) == {f"blocks/{i}/mlp{name}" for i in range(2) for name in inner}


def test_a_module_that_nothing_holds_is_named_by_its_class() -> None:
    assert scopes(lambda x: linear()(x) * jnp.sin(x), X) >= {"Linear"}
    merged = nnx.split(model())
    assert "Model/blocks/1/mlp/up" in scopes(lambda state, x: nnx.merge(merged[0], state)(x), merged[1], X)
    remat = nnx.remat(lambda block, x: block(x))
    assert "Block/mlp/up" in scopes(lambda model, x: remat(model.blocks[0], x), model(), X)


def test_scopes_of_the_user_stay_as_they_are() -> None:
    class Named(nnx.Module):
        def __init__(self) -> None:
            self.inside = linear()

        def __call__(self, x: jax.Array) -> jax.Array:
            with jax.named_scope("named"):
                return jnp.sin(self.inside(x))

    class Decorated(Named):
        @jax.named_scope("decorated")
        def __call__(self, x: jax.Array) -> jax.Array:
            return jnp.sin(self.inside(x))

    class Outer(nnx.Module):
        def __init__(self) -> None:
            self.named, self.other, self.decorated = Named(), Named(), Decorated()

        def __call__(self, x: jax.Array) -> jax.Array:
            return jnp.cos(self.decorated(self.other(self.named(x))))

    assert scopes(lambda model, x: model(x), Named(), X) == {"named"}
    assert scopes(lambda model, x: model(x), Outer(), X) == {
        "Outer",
        "Outer/named",
        "Outer/other/named",
        "Outer/decorated",
    }

    def step(model: Model, x: jax.Array) -> jax.Array:
        with jax.named_scope("step"):
            return model(x)

    assert "step/Model/blocks/0/mlp" in scopes(step, model(), X)


def test_a_module_that_calls_its_base_class_is_named_once() -> None:
    class Twice(Block):
        def __call__(self, x: jax.Array) -> jax.Array:
            return 2 * super().__call__(x)

    found = scopes(lambda model, x: model(x), nnx.eval_shape(lambda: Twice(nnx.Rngs(0))), X)
    assert "Twice/mlp" in found
    assert not any("Twice/Twice" in scope for scope in found)


def test_a_function_that_was_traced_before_has_scopes_all_the_same() -> None:
    jitted = jax.jit(lambda model, x: model(x))
    plain = str(jitted.trace(model(), X).jaxpr.eqns[0].source_info.name_stack)
    assert "Model/blocks/0/norm" in scopes(jitted, model(), X)
    assert str(jitted.trace(model(), X).jaxpr.eqns[0].source_info.name_stack) == plain == ""


def calls() -> list[Any]:
    return [kind.__dict__.get("__call__") for kind in (Model, Block, nnx.Linear, nnx.Sequential, nnx.RMSNorm)]


def test_classes_are_afterwards_what_they_were() -> None:
    before = calls()
    during: list[Any] = []

    def raises(model: Model, x: jax.Array) -> jax.Array:
        during.extend(calls())
        model(x)
        raise RuntimeError("no")

    with pytest.raises(CaptureError, match="RuntimeError: no"):
        scopes(raises, model(), X)
    assert len(during) == len(before)
    assert not any(now is then for now, then in zip(during, before, strict=True))
    assert calls() == before


def test_threads_that_trace_at_once_leave_the_classes_as_they_were() -> None:
    before = calls()
    first_is_in, second_is_out = threading.Event(), threading.Event()
    found: dict[str, set[str]] = {}

    def first(model: Model, x: jax.Array) -> jax.Array:
        first_is_in.set()
        assert second_is_out.wait(60)
        return model(x)

    def second() -> None:
        assert first_is_in.wait(60)

        class Late(nnx.Module):  # a class that the first capture has not seen
            def __call__(self, x: jax.Array) -> jax.Array:
                return jnp.sin(x)

        found["second"] = scopes(lambda x: Late()(x), X)
        second_is_out.set()

    thread = threading.Thread(target=second)
    thread.start()
    found["first"] = scopes(first, model(), X)
    thread.join()
    assert found["second"] == {"Late"}
    assert "Model/blocks/1/mlp/up" in found["first"]
    assert calls() == before


@pytest.mark.parametrize("mode", ["forward", "grad"])
def test_launches_of_a_model_have_scopes_lines_and_resources(mode: Literal["forward", "grad"], compiler: None) -> None:
    def call(model: Model, x: jax.Array) -> jax.Array:
        return model(x)

    made = capture(call, model(), X, mode=mode, autotune=None)
    files = made.require("before_optimizations").partition("FileNames")[2].partition("FunctionNames")[0]
    assert "nnx_programs.py" in files
    assert not re.search(r"/(module_scopes|patches)\.py", files)
    analysis = analyze(made)
    named = [launch for launch in analysis.launches if re.match(r"Model/(blocks/[01]|head)\b", launch.scope)]
    assert len(named) >= 0.9 * len(analysis.launches) > 10
    users = {launch.source for launch in analysis.launches} | {miss.source for miss in analysis.missed}
    assert {source.partition(":")[0] for source in users if source} == {"nnx_programs.py"}
    assert all(miss.source for miss in analysis.missed)
    kernels = [launch for launch in analysis.launches if launch.kernel]
    assert {launch.kind for launch in kernels} >= {"triton_gemm", "loop"}
    for launch in kernels:
        assert launch.registers is not None
        assert launch.occupancy is not None
        assert 0 < launch.occupancy <= 1
        assert (launch.occupancy_limiter is None) == (launch.occupancy == 1)


def test_lines_of_a_program_without_modules_are_the_users(compiler: None) -> None:
    def program(x: jax.Array, y: jax.Array) -> jax.Array:
        product = x @ y
        return jax.nn.softmax(product) @ jnp.tanh(product).T

    matrix = jax.ShapeDtypeStruct((512, 512), jnp.bfloat16)
    analysis = analyze(capture(program, matrix, matrix))
    first = program.__code__.co_firstlineno
    lines = {f"test_module_scopes.py:{first + 1}", f"test_module_scopes.py:{first + 2}"}
    assert analysis.missed
    assert {miss.source for miss in analysis.missed} <= lines
    assert {launch.source for launch in analysis.launches} == lines
