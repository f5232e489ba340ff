"""The catalogue of `pallas_kernels`' operations."""

from __future__ import annotations

import pytest

import pallas_kernels
from hlo_analysis.catalogue import PATTERNS, kernels_for
from xlafuse.catalogue import KERNELS


def test_every_pattern_has_an_operation_of_that_name():
    assert {kernel.pattern for kernel in KERNELS} == set(PATTERNS)
    assert {kernel.name for kernel in KERNELS} <= set(pallas_kernels.__all__)


@pytest.mark.parametrize(
    ("capability", "is_named"), [((9, 0), True), ((0, 0), True), ((8, 0), False), ((10, 0), False)]
)
def test_kernels_are_named_for_the_gpus_that_they_run_on(capability: tuple[int, int], is_named: bool):
    """A capability of 0 is not known."""
    assert bool(kernels_for(KERNELS, capability)) == is_named
