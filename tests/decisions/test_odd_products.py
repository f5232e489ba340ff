"""Advice about products of sizes that no cuBLAS kernel takes."""

from __future__ import annotations

import importlib.util

import jax
import jax.numpy as jnp
import pytest

from hlo_analysis import Analysis, analyze, capture
from hlo_analysis.decisions import categories
from hlo_analysis.records import MissedFusion
from xlafuse.catalogue import KERNELS

ODD, PADDED, EVEN = 30521, 30528, 16384


@pytest.fixture(scope="module")
def analysis() -> Analysis:
    """The gradient of a head of odd size, beside one of even size for an odd number of rows."""
    if importlib.util.find_spec("jax_plugins.xla_cuda13") is None:
        pytest.skip("needs the extra 'deviceless': XLA's CUDA compiler")

    def heads(w, v, x, y):
        return jnp.sum(jnp.tanh(x @ w).astype(jnp.float32)) + jnp.sum(jnp.tanh(y @ v).astype(jnp.float32))

    sizes = (1024, ODD), (1024, EVEN), (4096, 1024), (4099, 1024)
    arguments = [jax.ShapeDtypeStruct(each, jnp.bfloat16) for each in sizes]
    found = capture(jax.grad(heads, argnums=(0, 1, 2, 3)), *arguments, target="h100", autotune=None)
    return analyze(found, catalogue=KERNELS)


@pytest.fixture(scope="module")
def advice(analysis: Analysis) -> MissedFusion:
    (found,) = [each for each in analysis.missed if each.category == categories.ODD_SIZE]
    return found


def test_all_products_of_an_odd_size_are_one_piece_of_advice(analysis, advice):
    shapes = [{value.shape for value in analysis.launches[index].inputs} for index in advice.consumers]
    assert len(shapes) == 3
    assert all(any(f",{ODD}]" in shape for shape in each) for each in shapes)
    assert f"pad {ODD} to {PADDED}" in advice.remedy
    assert f"(0, {PADDED - ODD})" in advice.code
    assert advice.kernel == "padded_product"


def test_its_gain_is_what_the_estimate_charges_for_the_rows(analysis, advice):
    products = [analysis.launches[index] for index in advice.consumers]
    aligned = [each for each in analysis.launches if each.kind == "triton_gemm" and each not in products]
    rate = max(each.flops / each.estimated_us for each in aligned)
    needed = sum(each.flops / rate for each in products)
    taken = sum(each.estimated_us for each in products)
    assert advice.remaining_us == pytest.approx(taken - needed, rel=0.15)
    assert advice.rank == 1
    assert advice.bytes_at_stake == 0
