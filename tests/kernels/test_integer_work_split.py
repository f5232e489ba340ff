"""How tiles of several heights are dealt out to blocks."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.primitives.integer_gemm.config import IntegerGemmConfig
from pallas_kernels.primitives.integer_gemm.problem import PARTS, WorkSplit


@pytest.mark.parametrize(
    ("columns", "blocks"), [(112, 132), (110, 132), (113, 132), (56, 66), (17, 20), (6, 7), (5, 6)]
)
def test_each_part_of_each_column_is_dealt_once(columns, blocks):
    dealt = np.zeros((columns, PARTS), int)
    heights = []
    split = WorkSplit(columns=columns, blocks=blocks)
    assert split.is_even
    for block in range(blocks):
        height = 0
        for parts, count, place in split.turns(jnp.int32(block)):
            for n in range(int(count)):
                column, first = map(int, place(jnp.int32(n)))
                dealt[column, first : first + parts] += 1
                height += parts
        heights.append(height)
    np.testing.assert_array_equal(dealt, 1)
    assert max(heights) == PARTS - 1


@pytest.mark.parametrize(("columns", "blocks"), [(109, 132), (114, 132), (1, 2), (32, 132)])
def test_what_does_not_come_out_even(columns, blocks):
    assert not WorkSplit(columns=columns, blocks=blocks).is_even


@pytest.mark.parametrize(
    ("rows", "outputs", "has_work_split"),
    [(512, 14336, True), (449, 14080, True), (448, 14336, False), (513, 14336, False), (512, 4096, False)],
)
def test_results_that_are_dealt(rows, outputs, has_work_split):
    assert (WorkSplit.of(rows, outputs, IntegerGemmConfig(), 132) is not None) == has_work_split
