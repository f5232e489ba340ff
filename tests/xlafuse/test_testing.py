"""`assert_fused`: passes, fails with the launches and the reason, refuses."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from hlo_analysis.errors import CaptureError
from xlafuse.testing import assert_fused

X = jax.ShapeDtypeStruct((256, 1024), jnp.float32)


def _scaled_softmax(x: jax.Array) -> jax.Array:
    return jax.nn.softmax(2 * x)


def _sorted_softmax(x: jax.Array) -> jax.Array:
    return jnp.sort(jax.nn.softmax(x), axis=0)


def test_one_launch_that_reads_once_and_writes_once() -> None:
    analysis = assert_fused(_scaled_softmax, X, max_launches=1, max_hbm_bytes=2 * 256 * 1024 * 4)
    assert analysis.launch_count == 1


def test_the_failure_names_launches_lines_and_reasons() -> None:
    with pytest.raises(AssertionError) as failed:
        assert_fused(_sorted_softmax, X, max_launches=1, max_hbm_bytes=10**9)
    message = str(failed.value)
    assert "_sorted_softmax on h200: 2 launches, at most 1 (max_launches):" in message
    assert f"test_testing.py:{_sorted_softmax.__code__.co_firstlineno + 1}" in message
    assert "apart from #0: " in message
    assert "HBM traffic" not in message


def test_a_value_between_launches_is_limited_by_its_size() -> None:
    size = 256 * 1024 * 4
    assert_fused(_sorted_softmax, X, max_value_bytes=size, max_peak_bytes=4 * size)
    with pytest.raises(AssertionError, match=r"between launches, .* f32\[256,1024\] .* \(1,048,575; max_value_bytes\)"):
        assert_fused(_sorted_softmax, X, max_value_bytes=size - 1)


def test_without_a_limit_there_is_nothing_to_assert() -> None:
    with pytest.raises(ValueError, match="or no_all_gather, got none"):
        assert_fused(_scaled_softmax, X)


def test_what_does_not_trace_is_no_failure_of_fusion() -> None:
    with pytest.raises(CaptureError):
        assert_fused(_scaled_softmax, "x", max_launches=1)


def test_what_goes_to_other_gpus_is_limited() -> None:
    """Four GPUs with rows of x and parts of w each: w is gathered, three of its four parts from others."""
    mesh = AbstractMesh((4,), ("data",), axis_types=(AxisType.Auto,))
    spread = NamedSharding(mesh, PartitionSpec("data"))
    x, w = (jax.ShapeDtypeStruct(shape, jnp.float32, sharding=spread) for shape in ((1 << 16, 1024), (1024, 1024)))
    sent = 3 * 256 * 1024 * 4
    assert_fused(jnp.matmul, x, w, max_collective_bytes=sent)
    with pytest.raises(AssertionError) as failed:
        assert_fused(jnp.matmul, x, w, max_collective_bytes=sent - 1, no_all_gather=True)
    message = str(failed.value)
    assert f"3.1 MB sent to other GPUs ({sent:,} bytes), at most 3.1 MB ({sent - 1:,}; max_collective_bytes)" in message
    assert "1 all-gather, expected none (no_all_gather)" in message
    assert "(collective)" in message
    assert f"sends {sent:,} bytes to other GPUs" in message
