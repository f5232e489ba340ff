"""The catalogue of `pallas_kernels`' operations."""

from __future__ import annotations

import pallas_kernels
from hlo_analysis.catalogue import PATTERNS
from xlafuse.catalogue import KERNELS


def test_every_pattern_has_an_operation_of_that_name():
    assert {kernel.pattern for kernel in KERNELS} == set(PATTERNS)
    assert {kernel.name for kernel in KERNELS} <= set(pallas_kernels.__all__)
