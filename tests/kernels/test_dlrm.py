"""The ways in which the DLRM study computes its model agree, the kernels interpreted."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from xlafuse.studies import dlrm
from xlafuse.studies.comparisons import UNFUSED

SMALLER = {
    "_BATCH": 3,
    "_ROWS": 40,
    "_BOTTOM_LAYERS": ((64, 128),),
    "_TOP_LAYERS": ((512, 128),),
    "_LAYERS": ((64, 128), (512, 128)),
    "_RATE": 1e4,  # so that the step's results are the gradients, and little else
}


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("number", [1, 2], ids=["forward", "training step"])
def test_ways_to_compute_the_model_agree(monkeypatch, number):
    for name, value in SMALLER.items():
        monkeypatch.setattr(dlrm, name, value)
    case = dlrm._cases()[number]
    arguments = [case.draw(struct, seed) for seed, struct in enumerate(case.arguments)]
    results = {
        name: [np.asarray(leaf, np.float32) for leaf in jax.tree.leaves(variant.function(*arguments))]
        for name, variant in case.variants.items()
        if variant.framework == "jax"
    }
    for name, found in results.items():
        for value, expected in zip(found, results[UNFUSED], strict=True):
            error = np.linalg.norm(value - expected) / np.linalg.norm(expected)
            assert error < 2e-2, f"{name}: off by {error}"
    if case.name.startswith("training"):
        table, *adapters = results[UNFUSED]
        assert len(adapters) == 4
        assert all(np.abs(each).max() > 10 for each in (table, *adapters))
