"""Every operation in JAX's interpreter as users have it, without what the other tests add to it.

A kernel computes the right numbers there, or says what the interpreter lacks; then `implementation=None` takes "xla".
"""

from __future__ import annotations

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import pytest

from pallas_kernels import REGISTRY, attention, linear, recorded_choices, testing

WHOLE = {
    "batch_norm": "1x256-float32",
    "norm_linear": "4-128-128-float16-layer",
    "softmax": "2x256-float16",
    "linear": "40-64-128-float16-residual-to-float32",
}
"""Cases that are smaller than the first."""
RAGGED = {
    "linear": "130-192-320-bfloat16",
    "gated_linear": "70-192-128-float16-gelu_tanh",
    "linear_residual_norm": "2x5-64-320-bfloat16-bias",
    "lora_linear": "2x12-128-192-rank8-bfloat16-bias",
    "linear_cross_entropy": "2x6-64-320-bfloat16-label_smoothing_0.1-z_loss_0.01",
    "rms_norm": "4x1000-bfloat16-residual",
    "layer_norm": "3x1000-float32",
    "softmax": "2x1000-bfloat16",
}
"""Sizes that kernels take, though they are no multiple of a tile; of the other operations, the first ragged case."""
LACKING = {"attention", "decode_attention", "dot_interaction", "quantized_linear"}
"""Operations with a kernel that stores to accumulators or has operands of wgmma in registers."""


def case_of(op, names, tag):
    ordinary = [spec for spec in op.tagged("test") if ("ragged" in spec.tags) == (tag == "ragged")]
    named = [spec for spec in op.tagged("test") if spec.name == names.get(op.name)]
    return next(iter((*named, *ordinary, *op.tagged("test"))))


CASES = [
    pytest.param(op, case_of(op, names, tag), id=f"{op.name}-{tag}")
    for op in REGISTRY.values()
    for tag, names in (("whole", WHOLE), ("ragged", RAGGED))
]


@pytest.mark.drawn(1 / 2, of_each="op")
@pytest.mark.parametrize(("op", "spec"), CASES)
def test_kernels_are_right_or_say_what_is_missing(op, spec, seed):
    def draw(seed, implementation: str | None = "mosaic"):
        case = testing.make_case(op, spec, seed)

        @jax.jit
        def run(arguments, cotangents):
            own = testing.Case(op=op, arguments=arguments, cotangents=cotangents)
            return {**testing.forward(own, implementation), **testing.gradient(own, implementation)}

        with plgpu.force_gpu_interpret_mode():
            return testing.reports(case, testing.finished(run(case.arguments, case.cotangents)))

    try:
        testing.assert_draws_within(draw, seed, f"{op.name} {spec.name}")
        refused = None
    except NotImplementedError as error:
        refused = str(error)
        testing.assert_draws_within(lambda seed: draw(seed, None), seed, f"{op.name} {spec.name} None")
    if "ragged" not in spec.tags:
        assert ("interpreter for Mosaic GPU lacks" in str(refused)) == (op.name in LACKING)


def test_the_choice_says_what_the_interpreter_lacks():
    heads = jnp.ones((1, 128, 2, 64), jnp.bfloat16)
    with plgpu.force_gpu_interpret_mode(), recorded_choices() as choices:
        jax.eval_shape(attention, heads, heads, heads)
        with pytest.raises(NotImplementedError, match="'mosaic': the kernel needs stores to accumulators, which"):
            attention(heads, heads, heads, implementation="mosaic")
    assert [choice.taken for choice in choices] == ["xla", None]
    assert "stores to accumulators" in str(choices[0].reasons["mosaic"])


def test_a_gradient_that_lacks_something_says_so():
    """None asks for both passes; a kernel asked for by name runs as far as it can."""
    hidden, w = jnp.ones((8, 64), jnp.bfloat16), jnp.ones((64, 512), jnp.bfloat16)
    op = REGISTRY["linear_cross_entropy"]
    labels = jnp.zeros(8, jnp.int32)

    def loss(hidden, implementation):
        return op.function(hidden, w, labels, reduction="sum", implementation=implementation)

    with plgpu.force_gpu_interpret_mode():
        jax.eval_shape(lambda hidden: loss(hidden, "mosaic"), hidden)
        with pytest.raises(NotImplementedError, match="TMA copies that add, which JAX's interpreter"):
            jax.eval_shape(jax.grad(lambda hidden: loss(hidden, "mosaic")), hidden)
        jax.eval_shape(jax.grad(lambda hidden: loss(hidden, None)), hidden)


def test_rows_that_fill_no_group_of_eight_are_no_numbers_of_uninitialized_memory():
    x, w = jnp.ones((129, 64), jnp.bfloat16), jnp.ones((64, 128), jnp.bfloat16)
    with plgpu.force_gpu_interpret_mode():
        assert jnp.all(linear(x, w, implementation="mosaic") == 64)
