"""Remedies tried by compiling the program again, and the strategy `fused`."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import pytest

import xlafuse
from hlo_analysis import analyze, capture
from hlo_analysis.errors import UnknownTargetError
from hlo_analysis.records import Analysis
from hlo_analysis.targets import load_target
from xlafuse.catalogue import KERNELS, catalogue_of
from xlafuse.findings import find
from xlafuse.fusion.program import FusedProgram

X = jax.ShapeDtypeStruct((8192, 2048), jnp.bfloat16)
SCALE = jax.ShapeDtypeStruct((2048,), jnp.float32)
WEIGHT = jax.ShapeDtypeStruct((2048, 2048), jnp.bfloat16)


def norm(x, scale):
    wide = x.astype(jnp.float32)
    return (wide * jax.lax.rsqrt(jnp.mean(wide**2, axis=-1, keepdims=True) + 1e-6) * scale).astype(x.dtype)


def gated(x, scale, w_gate, w_up):
    normed = norm(x, scale)
    return jax.nn.silu(normed @ w_gate) * (normed @ w_up)


def loss(x, scale):
    return jnp.sum(norm(x, scale).astype(jnp.float32) ** 2)


pytestmark = pytest.mark.slow  # each test compiles three programs or so


@pytest.fixture(scope="module")
def plain() -> Analysis:
    return analyze(capture(gated, X, SCALE, WEIGHT, WEIGHT), catalogue=KERNELS)


def _asking(analysis: Analysis, *remedies: dict) -> Analysis:
    """The analysis with a missed fusion for each remedy in place of its own."""
    first = dataclasses.replace(analysis.missed[0], options=(), kernel=None)
    missed = tuple(dataclasses.replace(first, **each) for each in remedies)
    return dataclasses.replace(analysis, missed=missed, hotspots=())


def _try(analysis: Analysis, **options):
    return xlafuse.try_remedies(analysis, gated, X, SCALE, WEIGHT, WEIGHT, **options)


def test_equal_changes_are_compiled_once_and_effects_are_differences(plain):
    option, other = ("xla_gpu_dot_merger_threshold_mb", "0"), ("xla_gpu_enable_triton_gemm", "False")
    asked = _asking(
        plain, {"kernel": "gated_linear"}, {"options": (option,)}, {"kernel": "gated_linear"}, {"options": (other,)}
    )
    told: list[tuple[str, str]] = []
    kernel, merged, again, untried = (
        each.trial for each in _try(asked, count=2, progress=lambda *news: told.append(news)).missed
    )
    assert sorted(told) == [
        ("compiler option xla_gpu_dot_merger_threshold_mb=0", "compiling"),
        ("compiler option xla_gpu_dot_merger_threshold_mb=0", "done"),
        ("gated_linear by xlafuse.fuse", "compiling"),
        ("gated_linear by xlafuse.fuse", "done"),
    ]
    assert untried is None
    assert kernel == again
    fused = analyze(capture(xlafuse.fuse(gated, ops=["gated_linear"]), X, SCALE, WEIGHT, WEIGHT), catalogue=KERNELS)
    assert kernel.saved_launches == plain.launch_count - fused.launch_count > 0
    assert kernel.saved_bytes == plain.traffic.bytes - fused.traffic.bytes > 0
    assert kernel.saved_us == pytest.approx(plain.estimated_us - fused.estimated_us)
    assert kernel.helps
    apart = analyze(capture(gated, X, SCALE, WEIGHT, WEIGHT, compiler_options=dict([option])), catalogue=KERNELS)
    assert merged.saved_launches == plain.launch_count - apart.launch_count == -1  # two products in place of one
    assert merged.saved_us == pytest.approx(plain.estimated_us - apart.estimated_us)


def test_what_cannot_be_tried_says_why(plain):
    asked = _asking(
        plain,
        {"kernel": "softmax"},
        {"options": (("xla_gpu_no_such_thing", "1"),)},
        {"kernel": "embedding_bag"},
        {},
    )
    missing, unknown, unsought, rewrite = (each.trial for each in _try(asked).missed)
    assert missing.error.startswith("fuse takes no site")
    assert "xla_gpu_no_such_thing" in unknown.error
    assert not missing.helps
    assert not unknown.helps
    assert unsought is rewrite is None


def test_an_operation_that_is_refused_is_tried_with_what_it_needs_allowed():
    def program(x, scale):
        return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * scale

    arguments = jax.ShapeDtypeStruct((4096, 1024), jnp.bfloat16), jax.ShapeDtypeStruct((1024,), jnp.bfloat16)
    analysis = analyze(capture(program, *arguments), catalogue=KERNELS)
    base = analyze(capture(gated, X, SCALE, WEIGHT, WEIGHT), catalogue=KERNELS).missed[0]
    missed = dataclasses.replace(base, kernel="rms_norm", options=(), source="test_trials.py:1")
    asked = dataclasses.replace(analysis, missed=(missed,), hotspots=())
    (tried,) = (each.trial for each in xlafuse.try_remedies(asked, program, *arguments).missed)
    assert tried.change == "rms_norm by xlafuse.fuse, allow={'rounding'}"
    assert not tried.error


def test_the_gradient_is_taken_of_the_fused_function():
    analysis = analyze(capture(loss, X, SCALE, mode="grad"), catalogue=KERNELS)
    assert any(each.kernel == "rms_norm" for each in analysis.missed)
    tried = xlafuse.try_remedies(analysis, loss, X, SCALE, count=1)
    (trial,) = {each.trial for each in (*tried.missed, *tried.hotspots) if each.kernel == "rms_norm"}
    assert trial.saved_launches > 0


def test_bad_input(plain):
    with pytest.raises(ValueError, match="expected 0 or more, got -1"):
        _try(plain, count=-1)
    with pytest.raises(UnknownTargetError, match="h2000"):
        _try(plain, target="h2000")
    dump = dataclasses.replace(plain, provenance=dataclasses.replace(plain.provenance, mode="unknown"))
    with pytest.raises(ValueError, match="mode 'unknown', as of a dump"):
        _try(dump)
    assert _try(plain, count=0) == plain


def test_fused_is_a_strategy_with_its_sites():
    def partly(x, scale):
        centred = norm(x, scale)
        return centred, jnp.exp(x.astype(jnp.float32))

    comparison = xlafuse.compare(partly, (X, SCALE), strategies=["xla", "fused"], tries=1)
    fused = comparison["fused"]
    assert fused.analysis.launches_by_kind["mosaic"] == 1
    (site,) = (each for each in fused.sites if each.outcome == "taken")
    assert (site.operation, site.implementation, site.reason) == ("rms_norm", "mosaic", "")
    assert site.source.rpartition("/")[2].startswith("test_trials.py:")
    assert comparison["xla"].sites == ()


def test_fused_is_refused_where_it_would_be_xla():
    train = jax.grad(loss)
    comparison = xlafuse.compare(train, (X, SCALE), strategies=["xla", "fused"], target="h200")
    assert comparison["fused"].analysis is None
    assert "differentiated already" in comparison["fused"].error
    told: list[tuple[str, str]] = []
    comparison = xlafuse.compare(
        jnp.tanh, (SCALE,), strategies=["xla", "fused"], progress=lambda *news: told.append(news)
    )
    assert "takes no site of tanh" in comparison["fused"].error
    assert ("fused", "not applicable") in told
    comparison = xlafuse.compare(norm, (X, SCALE), strategies=["xla", "fused"], target="a100")
    assert "Choose the target h100 or h200" in comparison["fused"].error


def test_a_jitted_function_keeps_its_static_and_donated_arguments():
    def scaled(x, scale, power):
        return norm(x, scale) * 2**power

    program = FusedProgram(jax.jit(scaled, static_argnums=2, donate_argnums=0))
    traced = program.function.trace(X, SCALE, 3)
    assert [argument.donated for argument in traced.args_info[0]] == [True, False]
    assert traced.out_info.shape == X.shape
    assert [site.operation for site in program.sites] == ["rms_norm"]


def experts(x, gate, up, down, sizes):
    gated, rows = jax.lax.ragged_dot(x, gate, sizes), jax.lax.ragged_dot(x, up, sizes)
    return jax.lax.ragged_dot(jax.nn.silu(gated) * rows, down, sizes)


@pytest.mark.drawn(1 / 2)
@pytest.mark.parametrize("mode", ["forward", "grad"])
def test_experts_by_grouped_products_save_what_xla_multiplies_by_zeros(mode):
    def struct(*shape, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(shape, dtype)

    weights = struct(8, 512, 768), struct(8, 512, 768), struct(8, 768, 512)
    shapes = struct(4096, 512), *weights, struct(8, dtype=jnp.int32)
    findings = find(experts, shapes, load_target("h200"))
    before = analyze(capture(experts, *shapes, mode=mode), catalogue=catalogue_of(findings))
    tried = xlafuse.try_remedies(before, experts, *shapes)
    found = {missed.kernel: missed for missed in tried.missed if missed.kernel}
    assert found.keys() == {"grouped_linear", "grouped_gated_linear"}
    saved = {name: missed.trial.saved_us for name, missed in found.items() if missed.trial}
    assert saved["grouped_gated_linear"] > 0.4 * before.estimated_us
    assert saved["grouped_linear"] > 0.2 * before.estimated_us
