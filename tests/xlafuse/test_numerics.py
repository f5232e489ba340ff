"""The rule that a plan's error is held to, and the float64 reference behind it."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hlo_analysis.records import Numerics
from pallas_kernels.ops.norms.reference import rms_norm_reference
from xlafuse import numerics
from xlafuse.models import FusionPlan, get_preset
from xlafuse.numerics import check_plans, isolate, judge, reduced
from xlafuse.strategies import get_strategy

EPS = float(jnp.finfo(jnp.bfloat16).eps)


def tree(value: float) -> dict:
    return {"w": jnp.asarray([1.0, value], jnp.bfloat16)}


def exact(value: float) -> dict:
    return {"w": np.asarray([1.0, value], np.float64)}


def test_baseline_is_judged_against_itself():
    assert judge(tree(0.5), tree(0.5), exact(0.5)) == (0.0, 0.0, True)


@pytest.mark.parametrize(("ulps", "passed"), [(0.5, True), (0.99, True), (1.5, False)])
def test_an_exact_baseline_leaves_one_ulp(ulps, passed):
    reference = {"w": np.asarray([1.0 - ulps * EPS])}
    plain = {"w": jnp.asarray([1.0 - ulps * EPS], jnp.float32)}
    ours = {"w": jnp.asarray([1.0], jnp.bfloat16)}
    assert judge(ours, plain, reference)[2] is passed


@pytest.mark.parametrize(("error", "passed"), [(0.25, True), (0.375, False)])
def test_error_may_be_twice_the_baselines_plus_an_ulp(error, passed):
    found, baseline_error, verdict = judge(tree(0.5 + error), tree(0.5 + 0.125), exact(0.5))
    assert (found, baseline_error, verdict) == (error, 0.125, passed)


def test_every_array_is_held_to_its_own_bound():
    # The bad array is small beside the good one: a common scale would hide it.
    reference = {"large": np.full(4, 1000.0), "small": np.full(4, 0.001)}
    plain = jax.tree.map(lambda a: jnp.asarray(a, jnp.bfloat16), reference)
    ours = plain | {"small": plain["small"] * 2}
    error, baseline_error, passed = judge(ours, plain, reference)
    assert not passed
    assert error == pytest.approx(1.0, rel=0.02)
    assert baseline_error < EPS


def test_an_array_that_cancels_to_zero_is_measured_against_the_others():
    reference = {"a": np.asarray([2.0]), "zero": np.asarray([1e-17])}
    plain = {"a": jnp.asarray([2.0], jnp.bfloat16), "zero": jnp.asarray([1e-3], jnp.bfloat16)}
    error, _, passed = judge(plain, jax.tree.map(lambda a: a / 2, plain) | {"a": plain["a"]}, reference)
    assert error == pytest.approx(0.5e-3, rel=0.01)
    assert passed


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_nan_and_infinity_fail(bad):
    error, _, passed = judge(tree(bad), tree(0.5), exact(0.5))
    assert (error, passed) == (np.inf, False)


@pytest.mark.parametrize("preset", ["llama3-8b", "gpt2-medium", "tiny"])
def test_reduced_block_keeps_its_kind(preset):
    config = get_preset(preset)
    small = reduced(config)
    assert small.num_heads // small.num_kv_heads == config.num_heads // config.num_kv_heads
    assert (small.norm, small.mlp, small.rope_theta) == (config.norm, config.mlp, config.rope_theta)
    assert small.hidden_size == 256


@pytest.mark.parametrize("mode", ["forward", "grad"])
@pytest.mark.parametrize("preset", ["llama3-8b", "gpt2-medium"])
def test_plain_plan_has_the_error_of_bfloat16(preset, mode):
    found = check_plans(get_preset(preset), {"xla": FusionPlan()}, mode=mode)["xla"]
    assert isinstance(found, Numerics)
    assert found.passed
    assert found.error == found.baseline_error
    assert EPS / 16 < found.error < 16 * EPS
    assert "do not change on a CPU" in found.note


def test_float32_is_far_nearer_to_the_reference_than_bfloat16():
    config = dataclasses.replace(get_preset("tiny"), dtype="float32", param_dtype="float32")
    found = check_plans(config, {"xla": FusionPlan()})["xla"]
    # Only a reference of higher precision still, fed the same weights, can tell.
    assert isinstance(found, Numerics)
    assert 0 < found.error < 1e-5


def test_cudnn_is_said_not_to_be_checked():
    found = check_plans(get_preset("tiny"), {"xla_cudnn": FusionPlan(attention="cudnn")})
    assert found == {"xla_cudnn": "Numerics not checked: cuDNN attention runs on a GPU only."}


def test_precision_of_the_process_is_left_alone():
    before = jax.config.jax_enable_x64
    check_plans(get_preset("tiny"), {"xla": FusionPlan()}, shape=(1, 2))
    assert jax.config.jax_enable_x64 == before
    assert jnp.asarray(np.float64(1)).dtype == (jnp.float64 if before else jnp.float32)


def test_our_attention_is_said_to_be_left_out():
    found = check_plans(get_preset("tiny"), {"a": FusionPlan(attention="mosaic"), "xla": FusionPlan()}, shape=(1, 2))
    assert found["a"].error == found["xla"].error
    assert "all but attention, which is plain here" in found["a"].note


NORMS = FusionPlan(attention_norm="mosaic", mlp_norm="mosaic")


@pytest.mark.slow
@pytest.mark.drawn(1 / 2)
@pytest.mark.parametrize("mode", ["forward", "grad"])
@pytest.mark.parametrize("preset", ["llama3-8b", "gpt2-medium"])
def test_pallas_plan_keeps_the_bound(preset, mode):
    config = get_preset(preset)
    found = check_plans(config, {"pallas": get_strategy("pallas").plan}, mode=mode, shape=(1, 8))["pallas"]
    assert isinstance(found, Numerics)
    assert found.passed, found
    assert "interpret mode" in found.note


def test_a_wrong_kernel_is_caught(monkeypatch):
    def forgets_the_scale(x, scale, *, residual=None, returns_total=False, epsilon, implementation):
        x = x if residual is None else x + residual
        y = rms_norm_reference(x, jnp.ones_like(scale), epsilon=epsilon)
        return (y, x) if returns_total or residual is not None else y

    monkeypatch.setattr("pallas_kernels.rms_norm", forgets_the_scale, raising=False)
    found = check_plans(get_preset("tiny"), {"pallas": NORMS})["pallas"]
    assert isinstance(found, Numerics)
    assert not found.passed
    assert found.error > 4 * found.baseline_error


def test_a_right_kernel_in_its_place_passes(monkeypatch):
    def plain(x, scale, *, residual=None, returns_total=False, epsilon, implementation):
        x = x if residual is None else x + residual
        y = rms_norm_reference(x, scale, epsilon=epsilon)
        return (y, x) if returns_total or residual is not None else y

    monkeypatch.setattr("pallas_kernels.rms_norm", plain, raising=False)
    found = check_plans(get_preset("tiny"), {"pallas": NORMS})["pallas"]
    assert isinstance(found, Numerics)
    assert found.passed


def test_a_kernel_that_cannot_run_here_is_told(monkeypatch):
    def refuses(*args, **kwargs):
        raise NotImplementedError("needs a GPU of compute capability 9.0")

    monkeypatch.setattr("pallas_kernels.rms_norm", refuses, raising=False)
    found = check_plans(get_preset("tiny"), {"pallas": NORMS, "xla": FusionPlan()})
    assert found["pallas"] == "Numerics not checked: needs a GPU of compute capability 9.0"
    assert isinstance(found["xla"], Numerics)


def test_gradients_cover_weights_and_input(monkeypatch):
    seen = []

    def watch(output, baseline, reference):
        seen.append(jax.tree.map(np.shape, output))
        return judge(output, baseline, reference)

    monkeypatch.setattr(numerics, "judge", watch)
    check_plans(get_preset("tiny"), {"xla": FusionPlan()}, mode="grad", shape=(2, 4))
    weights, x = seen[0]
    assert x == (2, 4, 256)
    assert set(weights) == {"attention_norm", "query", "key", "value", "output", "mlp_norm", "gate", "up", "down"}


def test_isolate_names_the_wrong_operand():
    def reference(x, scale, bias):
        return x * scale + bias

    values = np.random.default_rng(0).standard_normal((3, 64)).astype(np.float32)
    arguments = dict(zip(("x", "scale", "bias"), values, strict=True))
    neutral = {"scale": np.ones(64, np.float32), "bias": np.zeros(64, np.float32)}
    wrong = {
        "": lambda x, scale, bias: 1.01 * x * scale + bias,
        "scale": lambda x, scale, bias: x * np.roll(scale, 1) + bias,
        "bias": lambda x, scale, bias: x * scale - bias,
    }
    for operand, function in wrong.items():
        checks = isolate(function, reference, arguments, neutral)
        assert next(check.operand for check in checks if not check.passed) == operand
    assert all(check.passed for check in isolate(reference, reference, arguments, neutral))
    with pytest.raises(ValueError, match="weight"):
        isolate(reference, reference, arguments, {"weight": values[0]})
