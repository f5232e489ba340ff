"""What the shared base cannot say of the gated linear layer."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from draws import normal

from pallas_kernels import Norm, gated_linear
from pallas_kernels.ops.gated_linear import api
from pallas_kernels.primitives.few_rows.config import FewRowsConfig


def arrays(rows=8, features=64, outputs=128, dtype=jnp.bfloat16):
    shapes = ((rows, features), (features, outputs), (features, outputs))
    return tuple(normal(i, shape, dtype) for i, shape in enumerate(shapes))


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
        ({"bias_up": jnp.ones(64)}, ValueError, r"bias_up must be one value an output, shape \(128,\), got \(64,\)"),
        ({"bias_gate": jnp.ones(128, jnp.int8)}, TypeError, "bias_gate must be floating, got int8"),
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


@pytest.mark.usefixtures("interpreter")
def test_norm_of_few_rows_in_the_products_launch(monkeypatch):
    """The gradient goes by the norm's own launch."""
    x, w_gate, w_up = arrays(features=128)
    norm = Norm(1 + 0.1 * jnp.arange(128.0) / 128, epsilon=0.1)

    def function(x, implementation):
        return gated_linear(x, w_gate, w_up, activation="relu", norm=norm, implementation=implementation)

    config = FewRowsConfig(columns=64, fuses_norm=True)
    monkeypatch.setattr(api, "default_config", lambda *_, **__: config)
    got, expected = (jax.vjp(lambda x, i=i: function(x, i), x) for i in ("mosaic", "xla"))
    for one, other in ((function(x, "mosaic"), expected[0]), (got[1](got[0])[0], expected[1](got[0])[0])):
        other = np.asarray(other, np.float64)
        np.testing.assert_allclose(np.asarray(one, np.float64), other, rtol=0.05, atol=0.02 * np.abs(other).max())
