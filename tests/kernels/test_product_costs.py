"""Which products of many rows take the kernel, as measured on an H200."""

from __future__ import annotations

import pytest

from pallas_kernels.ops.gated_linear import config as gated_linear
from pallas_kernels.ops.linear import config as linear
from pallas_kernels.primitives.gradients import is_faster_summed


@pytest.mark.parametrize(
    ("sizes", "more", "is_best"),
    [
        ((8192, 14336, 4096), {"has_activation": True}, True),
        ((640, 14336, 14336), {"has_activation": True}, False),  # five waves of narrow tiles
        ((18301, 1280, 384), {"has_activation": False, "residual_bytes": 4, "out_bytes": 4}, False),  # bytes
        ((22592, 320, 64), {"has_activation": True, "residual_bytes": 2}, True),
    ],
)
def test_linear(sizes, more, is_best):
    assert linear.is_preferred(*sizes, **more) == is_best


@pytest.mark.parametrize(
    ("sizes", "is_best"), [((8192, 14336, 4096), True), ((1621, 5248, 5248), False), ((36864, 128, 128), True)]
)
def test_gated_linear(sizes, is_best):
    assert gated_linear.is_preferred(*sizes) == is_best


@pytest.mark.parametrize(
    ("sizes", "is_best"),
    [
        ((8192, 4096, 14336), True),
        ((29280, 384, 15232), False),
        ((11958, 256, 64), True),
        ((211, 13824, 128), True),
        ((77, 4096, 4096), False),
        ((41, 4096, 4096), True),
        ((20, 4096, 4096), False),
    ],
)
def test_linear_residual_norm(sizes, is_best):
    assert linear.is_preferred_with_squares(*sizes) == is_best


@pytest.mark.parametrize(
    ("sizes", "is_best"),
    [
        ((4922, 4416, 2 * 4416), False),
        ((18816, 320, 2 * 3392), False),
        ((3000, 2048, 2 * 5504), False),
        ((1500, 1536, 2 * 4096), False),
        ((6000, 4096, 2 * 11008), True),
        ((2048, 1024, 2 * 2752), True),
        ((1000, 4096, 2 * 1024), True),
        ((6790, 1024, 1024 + 256 + 256), True),
    ],
)
def test_input_gradient(sizes, is_best):
    assert is_faster_summed(*sizes) == is_best
