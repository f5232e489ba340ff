"""The order in which a program's operations reach XLA: post-order, as for an attached GPU.

That it is the H200's order is held by tests/xlafuse/test_replay.py: every recorded choice finds its fusion again.
"""

import jax
import jax.numpy as jnp
from jax._src.interpreters import mlir
from jaxlib.mlir import ir

from hlo_analysis.capture.ordering import in_post_order

SQUARE = jax.ShapeDtypeStruct((8, 8), jnp.float32)


def lowered(fn, count):
    return mlir.module_to_bytecode(jax.jit(fn).lower(*[SQUARE] * count).compiler_ir("stablehlo"))


def main_operations(bytecode):
    """The name of each operation of @main."""
    with mlir.make_ir_context():
        module = ir.Module.parse(bytecode)
        assert module.operation.verify()
        (main,) = (f for f in module.body.operations if f.attributes["sym_name"].value == "main")
        return [operation.operation.name.rpartition(".")[2] for operation in main.regions[0].blocks[0]]


def uses_last_first(x):
    first, second, third = jnp.sin(x), jnp.cos(x), jnp.tanh(x)
    return third + (second * first)


def test_operands_come_right_before_their_users_first_operand_first():
    traced = lowered(uses_last_first, 1)
    assert main_operations(traced) == ["sine", "cosine", "tanh", "multiply", "add", "return"]
    assert main_operations(in_post_order(traced)) == ["tanh", "cosine", "sine", "multiply", "add", "return"]


def test_sorting_twice_changes_nothing():
    once = in_post_order(lowered(uses_last_first, 1))
    assert main_operations(in_post_order(once)) == main_operations(once)


def test_what_nobody_needs_comes_after_what_it_reads():
    """As in JAX's lowering of an SVD of which only the singular values are used."""
    with mlir.make_ir_context():
        module = ir.Module.parse("""
            func.func public @main(%x: tensor<4xf32>) -> tensor<4xf32> {
              %needed = stablehlo.sine %x : tensor<4xf32>
              %dropped = stablehlo.cosine %needed : tensor<4xf32>
              return %needed : tensor<4xf32>
            }""")
        bytecode = mlir.module_to_bytecode(module)
    assert main_operations(in_post_order(bytecode)) == ["sine", "cosine", "return"]


def test_values_captured_by_a_loop_stay_in_front_of_it():
    def fn(x, y):
        step = jnp.exp(y)
        start = jnp.sin(x)
        return jax.lax.fori_loop(0, 3, lambda _, carry: carry @ step, start)

    names = main_operations(in_post_order(lowered(fn, 2)))  # verification fails if a use comes before its definition
    assert names.index("exponential") < names.index("while")
    assert names.index("sine") < names.index("while")
