"""What the shared base cannot say of the gated linear layer."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import gated_linear


def arrays(rows=8, features=64, outputs=128, dtype=jnp.bfloat16):
    shapes = ((rows, features), (features, outputs), (features, outputs))
    return tuple(
        jax.random.normal(jax.random.key(i), shape, jnp.float32).astype(dtype) for i, shape in enumerate(shapes)
    )


def test_without_a_gpu_none_is_xla():
    operands = arrays()
    np.testing.assert_array_equal(gated_linear(*operands), gated_linear(*operands, implementation="xla"))
    with pytest.raises(NotImplementedError, match="Hopper"):
        gated_linear(*operands, implementation="mosaic")


@pytest.mark.parametrize(
    ("changed", "error", "words"),
    [
        ({"w_gate": jnp.ones((65, 128), jnp.bfloat16)}, ValueError, r"features of x \(8, 64\), got \(65, 128\)"),
        ({"w_up": jnp.ones((64, 192), jnp.bfloat16)}, ValueError, r"like w_gate \(64, 128\), got \(64, 192\)"),
        ({"w_up": jnp.ones((64, 128), jnp.float16)}, TypeError, "w_up must have x's dtype bfloat16, got float16"),
        ({"w_up": jnp.ones((64, 128), jnp.int8)}, TypeError, "w_up must be floating, got int8"),
        ({"activation": "silo"}, ValueError, "Did you mean 'silu'"),
    ],
)
def test_errors_say_what_is_wrong(changed, error, words):
    x, w_gate, w_up = arrays()
    with pytest.raises(error, match=words):
        gated_linear(**{"x": x, "w_gate": w_gate, "w_up": w_up, **changed})


@pytest.mark.usefixtures("interpreter")
def test_gate_and_linear_branch_are_not_exchanged():
    x, w_gate, w_up = arrays()
    got = gated_linear(x, w_gate, w_up, activation="relu", implementation="mosaic")
    wide = [np.asarray(array, np.float64) for array in (x, w_gate, w_up)]
    exact = np.maximum(wide[0] @ wide[1], 0) * (wide[0] @ wide[2])
    np.testing.assert_allclose(np.asarray(got, np.float64), exact, rtol=2**-7, atol=1e-4 * np.abs(exact).max())
