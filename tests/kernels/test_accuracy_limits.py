"""What docs/correctness.md says of the limits of accuracy, by `scripts/accuracy_limits.py`."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts/accuracy_limits.py"


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("accuracy_limits", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_row_sums_of_the_stored_output_cost_accuracy(script):
    xla, stored, exact = script.key_gradient_errors(script.SEED)
    assert xla < exact < stored < 4 * xla


def test_one_long_sum_is_less_accurate_than_sixteen(script):
    assert 10 < script.sum_error(1) / script.sum_error(16) < 40
