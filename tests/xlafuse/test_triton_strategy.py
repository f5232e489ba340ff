"""The strategy `triton` without Triton: which operation each site calls, with the plain implementation in its place."""

from __future__ import annotations

import dataclasses
import types

import jax
import numpy as np
import pytest

import pallas_kernels
from xlafuse.bench.block import case_maker
from xlafuse.models import BlockConfig, block, block_function
from xlafuse.numerics import check_plans
from xlafuse.strategies import get_strategy

SMALL = BlockConfig(
    name="small", hidden_size=128, mlp_size=96, num_heads=4, num_kv_heads=2, head_dim=8, dtype="float32",
    param_dtype="float32",
)  # fmt: skip
GPT = dataclasses.replace(SMALL, num_kv_heads=4, norm="layer_norm", mlp="gelu", rope_theta=None, use_bias=True)
LINEAR = "linear"
CALLS = {
    "small": ["rms_norm", *3 * [LINEAR], "softmax", "linear + residual", "rms_norm", "linear silu", LINEAR,
              "linear + residual"],
    "gpt": ["layer_norm", *3 * [LINEAR], "softmax", "linear + residual", "layer_norm", "linear gelu_tanh",
            "linear + residual"],
}  # fmt: skip


@pytest.fixture
def calls(monkeypatch) -> list[str]:
    called: list[str] = []

    def imitation(name):
        def call(*arrays, implementation, activation=None, residual=None, **rest):
            assert "triton" in implementation
            called.append(f"{name}{f' {activation}' * bool(activation)}{' + residual' * (residual is not None)}")
            if name == "linear":
                rest |= {"activation": activation, "residual": residual}
            return getattr(pallas_kernels, name)(*arrays, implementation="xla", **rest)

        return call

    names = ("rms_norm", "layer_norm", "linear", "softmax")
    fused = pallas_kernels.MOST_FUSED_NORM_ROWS
    operations = types.SimpleNamespace(MOST_FUSED_NORM_ROWS=fused, **{name: imitation(name) for name in names})
    monkeypatch.setattr(block, "pallas_kernels", operations)
    return called


@pytest.mark.parametrize(("name", "config"), [("small", SMALL), ("gpt", GPT)])
def test_each_site_is_the_block_s(name, config, calls):
    strategy = get_strategy("triton")
    case = case_maker(config, (2, 6), "forward")(jax.random.key(0))

    def run(plan):
        function, _ = block_function(config, (2, 6), plan=plan)

        def loss(params, x, *rest):
            y = function(params, x, *rest)
            return (y**2).sum(), y

        (_, y), gradients = jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))(*case)
        return jax.tree.leaves((y, gradients))

    plain = run(None)
    assert calls == []
    ours = run(strategy.plan)
    assert calls == CALLS[name]
    for one, other in zip(ours, plain, strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-4, atol=2e-4 * float(np.abs(other).max()))


def test_its_numerics_are_not_checked_on_the_cpu():
    told = check_plans(SMALL, {"triton": get_strategy("triton").plan})["triton"]
    assert isinstance(told, str)
    assert "Numerics not checked" in told
