"""The interpreter that the other tests rely on: what is wrong with a kernel is seen, and stays with that kernel."""

from __future__ import annotations

import interpreter_gpu
import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax


@pytest.fixture
def interpreted(monkeypatch):
    """As the fixture `interpreter`, with the races left to the test."""
    interpreter_gpu.extend(monkeypatch)
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=True)):
        yield interpreter_gpu.launches


def two_warpgroups(body, shape=(128,)):
    """A kernel of one block of two warpgroups, `body(ref, result, barrier, warpgroup)`."""

    def kernel(ref, result_ref, shared_ref, barrier_ref):
        body(ref, result_ref, shared_ref, barrier_ref, lax.axis_index("warpgroup"))

    return plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct(shape, jnp.float32),
        num_threads=2,
        thread_name="warpgroup",
        scratch_types=[plgpu.SMEM((2, *shape), jnp.float32), plgpu.Barrier()],
    )


def swap_halves(waits):
    def body(ref, result_ref, shared_ref, barrier_ref, warpgroup):
        @pl.when(warpgroup == 0)
        def _():
            shared_ref[0] = ref[...]
            if waits:
                plgpu.barrier_arrive(barrier_ref)

        @pl.when(warpgroup == 1)
        def _():
            if waits:
                plgpu.barrier_wait(barrier_ref)
            result_ref[...] = shared_ref[0] + 1

    return two_warpgroups(body)


def test_a_race_is_found_whatever_runs_after_it(interpreted, capfd):
    x = jnp.arange(128, dtype=jnp.float32)
    jax.block_until_ready(swap_halves(waits=False)(x))
    np.testing.assert_array_equal(swap_halves(waits=True)(x), x + 1)
    assert (interpreted.kernels, interpreted.with_races) == (2, 1)
    assert "RACE DETECTED" in capfd.readouterr().out


def test_a_kernel_that_fails_leaves_the_next_alone(interpreted):
    x = jnp.arange(128, dtype=jnp.float32)

    def beyond(ref, result_ref, shared_ref, barrier_ref, warpgroup):
        result_ref[...] = shared_ref[2 + warpgroup]

    with pytest.raises(Exception, match="out"):
        jax.block_until_ready(two_warpgroups(beyond)(x))
    np.testing.assert_array_equal(swap_halves(waits=True)(x), x + 1)
    assert not interpreted.with_races


def test_devices_at_different_kernels_do_not_meet(interpreted):
    if len(jax.devices("cpu")) < 2:
        pytest.skip("needs two simulated CPU devices; run this folder by itself")
    x, kernel = jnp.arange(128, dtype=jnp.float32), jax.jit(swap_halves(waits=True))
    results = [kernel(jax.device_put(x + i, device)) for device in jax.devices("cpu")[:2] for i in range(4)]
    for result, i in zip(results, list(range(4)) * 2, strict=True):
        np.testing.assert_array_equal(result, x + i + 1)
    assert (interpreted.kernels, interpreted.with_races) == (8, 0)
