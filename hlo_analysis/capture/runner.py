"""Runs a compiled program in the worker process: its wall clock, a profile of it, memory, and the GPU's state.

The worker loads this file by its path, with nothing of this package imported, where a capture is to be measured. So
what is measured is the very executable that the capture describes, with the same choices of autotuning.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

PROFILE = "profile.xplane.pb"
ARGUMENTS = "arguments.npz"
"""Values of arguments, by position. The others are drawn."""
_PROFILED_CALLS = 10
_WARM_UP_SECONDS, _TURN_SECONDS, _TURNS = 0.5, 0.03, 15
# Arguments take turns, so that a small program does not find them in the L2 cache (60 MB of an H200), in at most so
# many copies.
_ROTATED_BYTES, _MOST_COPIES = 120 << 20, 8
_DTYPES = (
    "bool", "bfloat16", "float16", "float32", "float64", "complex64", "complex128",
    "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu", "float4_e2m1fn",
    "int4", "int8", "int16", "int32", "int64", "uint4", "uint8", "uint16", "uint32", "uint64",
)  # fmt: skip
_GPU_STATE = {
    "driver_version": "driver",
    "clocks.sm": "sm_clock_mhz",
    "clocks.max.sm": "max_sm_clock_mhz",
    "power.draw": "power_watts",
    "power.limit": "power_limit_watts",
    "temperature.gpu": "temperature_celsius",
}


def run(executable: Any, argument_types: list[tuple[tuple[int, ...], str]], devices: list[Any], folder: Path) -> dict:
    """Runs an executable with the arguments in `folder`, or drawn ones; leaves the profile there, returns the rest.

    Floats are random normal: those of two dimensions of a weight's deviation (rows**-0.5), those of one dimension
    around 1. Integers of more than eight bits count up along the last dimension; others are drawn. Several devices draw
    their parts by themselves: whole arrays may be too large for one.
    """
    import jax
    import numpy as np
    from jax._src.sharding_impls import GSPMDSharding

    jax.config.update("jax_enable_x64", True)
    if len(devices) > 1:
        places = [GSPMDSharding(tuple(devices), cut) for cut in executable.get_parameter_shardings()]
    else:
        places = [jax.sharding.SingleDeviceSharding(devices[0])] * len(argument_types)
    parts = [(place.shard_shape(shape), name) for place, (shape, name) in zip(places, argument_types, strict=True)]
    draw = jax.jit(lambda: [_draw(jax.random.key(i), *each) for i, each in enumerate(parts)])
    given: dict[int, Any] = {}
    if (folder / ARGUMENTS).is_file():
        with np.load(folder / ARGUMENTS) as file:
            given = {int(i): file[i].astype(jax.numpy.dtype(argument_types[int(i)][1])) for i in file}

    def drawn() -> list[Any]:
        on_each = []
        for device in devices:
            with jax.default_device(device):
                on_each.append(draw())
        made = [
            jax.make_array_from_single_device_arrays(shape, place, list(own))
            for (shape, _), place, own in zip(argument_types, places, zip(*on_each, strict=True), strict=True)
        ]
        for i, values in given.items():
            made[i] = jax.device_put(values, places[i])
        return jax.block_until_ready(made)

    first = drawn()
    size = sum(each.addressable_data(0).nbytes for each in first)
    before = _peak_bytes(devices)
    jax.block_until_ready(_call(executable, first))
    peak = _peak_bytes(devices)
    copies = max(1, min(_MOST_COPIES, -(-_ROTATED_BYTES // max(1, size))))
    sets = [first, *(drawn() for _ in range(copies - 1))]
    at = 0

    def call() -> Any:
        nonlocal at
        at = (at + 1) % len(sets)
        return _call(executable, sets[at])

    walls, gpu = _time(call)
    try:
        _profile(call, folder)
        problem = None
    except Exception as error:  # the wall clock is known
        problem = f"{type(error).__name__}: {error}"
    # A peak that was there before is that of autotuning.
    return {
        "device": devices[0].device_kind,
        "devices": len(devices),
        "walls_us": walls,
        "peak_bytes": peak if peak > before else None,
        "gpu": gpu,
        "profile_error": problem,
    }


def argument_types(module: Any) -> list[tuple[tuple[int, ...], str]]:
    """Shape and NumPy's name of the dtype of each argument of a StableHLO module, those that are used."""
    import jax.numpy as jnp
    from jax._src.interpreters import mlir
    from jaxlib.mlir import ir

    names = {str(mlir.dtype_to_ir_type(jnp.dtype(name))): name for name in _DTYPES}
    functions = (each for each in module.body.operations if each.operation.name == "func.func")
    main = next(each for each in functions if each.name.value == "main")
    types = [ir.RankedTensorType(each) for each in main.type.inputs]
    return [(tuple(each.shape), names[str(each.element_type)]) for each in types]


def _draw(key: Any, shape: tuple[int, ...], name: str) -> Any:
    import jax
    import jax.numpy as jnp

    dtype = jnp.dtype(name)
    if jnp.issubdtype(dtype, jnp.inexact):
        values = jax.random.normal(key, shape, jnp.float32)
        if len(shape) == 2:
            values *= shape[0] ** -0.5
        return (1 + 0.1 * values if len(shape) == 1 else values).astype(dtype)
    if dtype == jnp.bool_ or jnp.iinfo(dtype).bits <= 8:
        return jax.random.bits(key, shape, jnp.uint8).astype(dtype)
    return jnp.broadcast_to(jnp.arange(shape[-1] if shape else 1, dtype=dtype), shape or (1,)).reshape(shape)


def _call(executable: Any, arguments: list[Any]) -> list[list[Any]]:
    """One call. A donated argument is replaced by a result of its shape, as a loop of training steps has it."""
    import jax

    results = executable.execute_sharded(arguments).disassemble_into_single_device_arrays()
    unused = list(results)
    for i, argument in enumerate(arguments):
        if argument.is_deleted():
            kind = (argument.sharding.shard_shape(argument.shape), argument.dtype)
            place = next(j for j, each in enumerate(unused) if (each[0].shape, each[0].dtype) == kind)
            own = unused.pop(place)
            arguments[i] = jax.make_array_from_single_device_arrays(argument.shape, argument.sharding, own)
    return results


def _profile(call: Callable[[], Any], folder: Path) -> None:
    import jax

    options = jax.profiler.ProfileOptions()
    options.host_tracer_level = options.python_tracer_level = 0
    options.enable_hlo_proto = False
    with jax.profiler.trace(folder / "profile", profiler_options=options):
        for _ in range(_PROFILED_CALLS):
            jax.block_until_ready(call())
    for file in (folder / "profile").rglob("*.xplane.pb"):
        file.replace(folder / PROFILE)
    shutil.rmtree(folder / "profile")


def _time(call: Callable[[], Any]) -> tuple[list[float], dict[str, str]]:
    """Microseconds of a call among several in flight, turn by turn, and the GPU's state meanwhile."""
    import jax

    start = time.perf_counter()
    count = 0
    while (spent := time.perf_counter() - start) < _WARM_UP_SECONDS or count < 3:
        jax.block_until_ready(call())
        count += 1
    calls = max(2, min(100, round(_TURN_SECONDS * count / spent)))
    gpu_id = os.environ.get("CUDA_VISIBLE_DEVICES", "").partition(",")[0] or "0"
    query = ["nvidia-smi", f"--query-gpu={','.join(_GPU_STATE)}", "--format=csv,noheader,nounits", f"--id={gpu_id}"]
    try:
        state = subprocess.Popen(query, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    except OSError:
        state = None
    walls: list[float] = []
    while len(walls) < _TURNS or (state is not None and state.poll() is None and len(walls) < 10 * _TURNS):
        start = time.perf_counter()
        for _ in range(calls - 1):
            call()
        jax.block_until_ready(call())
        walls.append((time.perf_counter() - start) / calls * 1e6)
    said = state.communicate()[0].strip().split(", ") if state is not None else []
    gpu = dict(zip(_GPU_STATE.values(), said, strict=True)) if len(said) == len(_GPU_STATE) else {}
    return walls, gpu


def _peak_bytes(devices: list[Any]) -> int:
    return max(int((device.memory_stats() or {}).get("peak_bytes_in_use", 0)) for device in devices)
