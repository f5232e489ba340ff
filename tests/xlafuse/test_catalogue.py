"""The catalogues of `pallas_kernels`' operations: what launches show, and what `fuse` finds in the function."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import pytest

import pallas_kernels
from hlo_analysis import analyze, capture
from hlo_analysis.capture import Capture
from hlo_analysis.catalogue import PATTERNS, Catalogue, kernels_for
from hlo_analysis.records import MissedFusion
from hlo_analysis.targets import load_target
from xlafuse.catalogue import KERNELS, _choice, catalogue_of
from xlafuse.findings import Finding, find
from xlafuse.fusion.spellings import OTHERS


def test_every_pattern_has_an_operation_of_that_name():
    assert {kernel.pattern for kernel in KERNELS} == set(PATTERNS)
    assert {kernel.name for kernel in KERNELS} <= set(pallas_kernels.__all__) | OTHERS


@pytest.mark.parametrize(
    ("capability", "is_named"), [((9, 0), True), ((0, 0), True), ((8, 0), False), ((10, 0), False)]
)
def test_kernels_are_named_for_the_gpus_that_they_run_on(capability: tuple[int, int], is_named: bool):
    """A capability of 0 is not known."""
    assert bool(kernels_for(KERNELS, capability)) == is_named


def adapted(x, w, a, b):
    return jax.nn.silu(x @ w + (x @ a) @ b)


def normed(x, scale, w):
    """A product in complex64 beside a norm in float32."""
    mean = x.mean(-1, keepdims=True)
    y = (x - mean) * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) - mean * mean + 1e-6) * scale
    return ((y.astype(jnp.complex64) @ w).real + y).sum()


def struct(*shape: int, dtype: object = jnp.bfloat16) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


ADAPTED = struct(2048, 1024), struct(1024, 4096), struct(1024, 16), struct(16, 4096)
NORMED = struct(8, 2048, 256, dtype=jnp.float32), struct(256, dtype=jnp.float32), struct(256, 256, dtype=jnp.complex64)


@pytest.fixture(scope="module")
def adapted_capture() -> Capture:
    return capture(adapted, *ADAPTED, target="h200")


def missed(captured: Capture, catalogue: Catalogue = KERNELS) -> Sequence[MissedFusion]:
    return analyze(captured, catalogue=catalogue).missed


def test_of_several_products_none_is_guessed_to_be_the_weights(adapted_capture: Capture):
    found = missed(adapted_capture)
    assert any(each.kernel == "lora_linear" for each in found)
    assert not any("does not take this" in each.remedy for each in found)


def test_a_dtype_that_only_another_array_has_is_no_reason():
    found = missed(capture(normed, *NORMED, target="h200"))
    assert any(each.kernel == "layer_norm" for each in found)
    assert not any("int8" in each.remedy for each in found)


def test_a_dtype_that_no_kernel_takes_has_the_programs_name():
    with jax.enable_x64(True):
        wide = [struct(*each.shape, dtype=jnp.float64) for each in NORMED[:2]]
        found = missed(capture(lambda x, s: x + normed(x, s, jnp.ones((256, 1))), *wide, target="h200"))
    assert any("layer_norm does not take this: x is float64" in each.remedy for each in found)


def test_where_fuse_takes_a_site_the_remedy_has_its_call(adapted_capture: Capture):
    findings = find(adapted, ADAPTED, load_target("h200"))
    assert findings is not None
    (taken,) = [each for each in findings if each.outcome == "taken"]
    named = [each for each in missed(adapted_capture, catalogue_of(findings)) if each.kernel == "lora_linear"]
    assert named
    assert all(each.code == f"from xlafuse.kernels import lora_linear\n\n{taken.text}" for each in named)
    assert taken.text.startswith("lora_linear(x, w, a, b, alpha=")
    assert "# w: bfloat16[1024,4096]" in taken.text


@pytest.mark.parametrize(
    ("outcome", "text", "said"),
    [
        ("refused", "it drops elements", "lora_linear does not take this: it drops elements"),
        ("left", "x is small", "lora_linear does not take this: the operation itself leaves it to XLA: x is small"),
        ("refused", "it rounds; allow={'rounding'} takes it", "fuse needs an allowance: it rounds; allow={'rounding'}"),
    ],
)
def test_what_fuse_says_of_the_lines_is_the_reason(adapted_capture: Capture, outcome, text: str, said: str):
    lines = frozenset(each.source for each in missed(adapted_capture) if each.kernel == "lora_linear" and each.source)
    finding = Finding(operation="lora_linear", outcome=outcome, text=text, lines=lines)
    found = missed(adapted_capture, catalogue_of([finding]))
    assert any(said in each.remedy for each in found)
    assert any(each.kernel == "lora_linear" for each in found) == finding.is_allowed
    elsewhere = Finding(operation="lora_linear", outcome=outcome, text=text, lines=frozenset({"other.py:1"}))
    assert missed(adapted_capture, catalogue_of([elsewhere])) == missed(adapted_capture)


def test_a_written_call_fits_the_operations_signature():
    def added(x, residual, scale):
        total = (x + residual).astype(jnp.float32)
        y = total * jax.lax.rsqrt(jnp.mean(total * total, axis=-1, keepdims=True) + 1e-6) * scale
        return y.astype(x.dtype)

    found = find(added, (struct(2048, 1024), struct(2048, 1024), struct(1024)), load_target("h200"))
    assert found is not None
    (call,) = [ast.parse(each.text).body[0].value for each in found if each.outcome == "taken"]  # pyright: ignore
    named = {each.arg: each.value for each in call.keywords}
    inspect.signature(pallas_kernels.rms_norm).bind(*call.args, **named)
    assert named.keys() >= {"residual", "epsilon"}


def test_what_fuse_does_not_search_has_no_findings():
    assert find(jax.grad(lambda x: (x @ x).sum()), (struct(128, 128),), load_target("h200")) is None
    assert catalogue_of(None) is KERNELS


def test_reasons_are_the_operations_own_whatever_mesh_is_set():
    captured = capture(normed, *NORMED, target="h200")
    _choice.cache_clear()
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((2,), ("data",))):
        found = missed(captured)
    assert found == missed(captured)
    made = _choice("rope", *(jax.ShapeDtypeStruct((1, 8, 4, 62), jnp.int32),) * 3)
    assert "int32" in (made if isinstance(made, str) else str(made.reasons["mosaic"]))
