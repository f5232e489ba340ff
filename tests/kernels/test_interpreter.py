"""The interpreter that the other tests rely on: what is wrong with a kernel is seen, and stays with that kernel."""

from __future__ import annotations

import sys
import types
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import interpreter_gpu
import interpreter_overlaps
import interpreter_programs
import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax._src.pallas.mosaic.interpret import vector_clock
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P


@pytest.fixture
def interpreted(monkeypatch):
    """As the fixture `interpreter`, with the races left to the test."""
    interpreter_gpu.extend(monkeypatch)
    with plgpu.force_gpu_interpret_mode(interpreter_gpu.RACES):
        yield interpreter_gpu.launches


def two_warpgroups(body, shape=(128,)):
    """A kernel of one block of two warpgroups, `body(ref, result_ref, shared_ref, barrier_ref, warpgroup)`."""

    def kernel(ref, result_ref, shared_ref, barrier_ref):
        body(ref, result_ref, shared_ref, barrier_ref, lax.axis_index("warpgroup"))

    return plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct(shape, jnp.float32),
        num_threads=2,
        thread_name="warpgroup",
        scratch_types=[plgpu.SMEM((2, *shape), jnp.float32), plgpu.Barrier()],
    )


def handed_over(*, waits, step=1):
    """x + step, by one warpgroup from what another put into shared memory."""

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
            result_ref[...] = shared_ref[0] + step

    return two_warpgroups(body)


def test_a_race_is_found_whatever_runs_after_it(interpreted, capfd, caplog):
    x = jnp.arange(128, dtype=jnp.float32)
    jax.block_until_ready(handed_over(waits=False)(x))
    np.testing.assert_array_equal(handed_over(waits=True)(x), x + 1)
    assert (interpreted.kernels, interpreted.with_races) == (2, 1)
    assert "RACE DETECTED" in capfd.readouterr().out + caplog.text  # printed by jax 0.11.2, logged by 0.12


@pytest.mark.parametrize("same", [True, False])
def test_two_blocks_may_write_the_same_values(interpreter, same):
    def kernel(ref, result_ref):
        block = lax.axis_index("block")
        columns = pl.ds(block * 64, 128)
        result_ref[columns] = ref[columns] + (0 if same else block)

    x = jnp.arange(192, dtype=jnp.float32)
    call = plgpu.kernel(kernel, out_type=jax.ShapeDtypeStruct((192,), jnp.float32), grid=(2,), grid_names=("block",))
    result = jax.block_until_ready(call(x))
    assert interpreter_gpu.launches.with_races == (0 if same else 1)
    if same:
        np.testing.assert_array_equal(result, x)
    interpreter_gpu.launches.reset()  # the race that was wanted


def test_many_warpgroups_may_repeat_a_write_at_once(monkeypatch):
    """Eight threads rewrite an earlier block's rows with no barrier between: no race is reported."""
    interpreter_overlaps.extend(monkeypatch)
    monkeypatch.setattr(gpu_callbacks, "_get_shared_memory", lambda: types.SimpleNamespace(written={}))
    switch_interval = sys.getswitchinterval()

    def clock(thread):
        clock = vector_clock.NpVectorClock(9)
        clock.inc(thread)
        return clock

    def found_races():
        make_races: Any = gpu_callbacks.GPURaceDetectionState
        races = make_races("warn")  # `on_race` of jax 0.12; of 0.11.2 the number of cores, which it does not use
        races.writes["result"] = [("before", clock(8), (row, slice(0, 128, 1)), "") for row in range(8)]

        def write(warpgroup):
            for _ in range(20):
                interpreter_overlaps.now.repeats = True
                access = types.SimpleNamespace(range=(warpgroup, slice(2, 130, 1)))
                races.check_write(warpgroup, clock(warpgroup), "result", access)

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(write, range(8)))
        return races.races_found

    sys.setswitchinterval(1e-6)
    try:
        assert not any(found_races() for _ in range(20))
    finally:
        sys.setswitchinterval(switch_interval)


def test_only_the_same_kernel_shares_a_program(interpreted):
    x = jnp.arange(128, dtype=jnp.float32)
    for step in (1, 2, 1):
        np.testing.assert_array_equal(handed_over(waits=True, step=step)(x), x + step)
    jax.block_until_ready(handed_over(waits=False)(x))
    assert (interpreted.kernels, interpreted.with_races, interpreter_programs.count()) == (4, 1, 3)


def test_a_kernel_that_fails_leaves_the_next_alone(interpreted):
    x = jnp.arange(128, dtype=jnp.float32)

    def beyond(ref, result_ref, shared_ref, barrier_ref, warpgroup):
        result_ref[...] = shared_ref[2 + warpgroup]

    with pytest.raises(Exception, match="out"):
        jax.block_until_ready(two_warpgroups(beyond)(x))
    np.testing.assert_array_equal(handed_over(waits=True)(x), x + 1)
    assert not interpreted.with_races


def test_two_devices_with_kernels_that_do_not_wait_for_one_another(interpreted):
    if len(jax.devices("cpu")) < 2:
        pytest.skip("needs two simulated CPU devices; run this folder by itself")
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices("cpu")[:2])

    def local(x):
        kernels = [handed_over(waits=True, step=step) for step in (1, 2, 3)]
        return lax.psum(kernels[0](x[0]), "data")[None], kernels[1](x[0])[None], kernels[2](x[0])[None]

    x = jnp.arange(256, dtype=jnp.float32).reshape(2, 128)
    sharded = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=P("data"), out_specs=P("data"), check_vma=False))
    for _ in range(5):
        total, second, third = sharded(x)
        np.testing.assert_array_equal(total, np.broadcast_to((x + 1).sum(0), x.shape))
        np.testing.assert_array_equal(second, x + 2)
        np.testing.assert_array_equal(third, x + 3)
    assert (interpreted.kernels, interpreted.with_races) == (30, 0)
