"""README's table of sizes asks the operations themselves."""

from __future__ import annotations

import jax
import pytest

from pallas_kernels import REGISTRY
from pallas_kernels.ops._norms import apply
from pallas_kernels.specs import plain
from xlafuse.bench.coverage import DTYPES, FEATURES, implementations, markdown, resized, row_operations


def chosen(op, features, dtype="bfloat16"):
    return implementations(REGISTRY[op], resized(REGISTRY[op], features, dtype))


def test_the_rule_of_the_operation_decides(monkeypatch):
    assert chosen("rms_norm", 127) == ("xla",)
    assert chosen("rms_norm", 4097) == ("mosaic", "xla", "triton")
    assert chosen("rms_norm", 262144) == ("mosaic", "xla")
    monkeypatch.setattr(apply, "mosaic_unsupported", lambda x, scale, bias: "odd" if x.shape[-1] % 2 else None)
    assert chosen("rms_norm", 4097) == ("xla", "triton")


@pytest.mark.parametrize("op", row_operations(), ids=lambda op: op.name)
def test_resized_specs_are_calls_of_the_operation(op):
    """Each size and dtype is one that the operation computes, here with XLA."""
    for features in FEATURES[:4]:
        for dtype in DTYPES:
            spec = resized(op, features, dtype, rows=4)
            call = jax.eval_shape(lambda arguments: op.function(**plain(arguments)), spec.structs())
            assert jax.tree.leaves(call)[0].shape[0] == 4
            arrays = [value for value in plain(spec.structs()).values() if hasattr(value, "shape")]
            assert {array.shape[-1] for array in arrays} <= {features, 4, 2}
            assert arrays[0].dtype == dtype


def test_tables_have_every_operation_and_size():
    text = markdown()
    rows = [line.split(" | ") for line in text.splitlines() if line.startswith("| `")]
    assert {row[0].split("`")[1] for row in rows} == {op.name for op in row_operations()} | {"rope"}
    (norm,) = [row for row in rows if row[0] == "| `rms_norm`"]
    assert norm[1] == "xla"
    assert norm[-1] == "mosaic |"
    assert len(norm) == 1 + len(FEATURES)
