"""One GPU that interprets one kernel after another, whatever device calls it, for tests only.

The Mosaic GPU interpreter of jax 0.11.2 spreads a kernel over many host callbacks of the computation that calls it, and
has one memory for all devices, cleared when as many kernels have ended as there are devices. Two devices of a
`shard_map` that are at different kernels share it, and accumulators vanish; an all-reduce between two callbacks of one
kernel waits for a device that waits for that kernel. Here a kernel is one callback. Our kernels do not talk between
devices, so nothing is lost; and races are counted over all kernels, where the interpreter keeps those of the last one.
"""

from __future__ import annotations

import dataclasses
import functools
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import interpreter_programs
import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import numpy as np
from jax._src import callback, dispatch
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks, interpret_pallas_call

_interpret = interpret_pallas_call.interpret_pallas_call
_gpu = ThreadPoolExecutor(max_workers=1, thread_name_prefix="interpreted GPU")


RACES: Any = plgpu.InterpretGPUParams(detect_races=True)
"""Kernels go on after a race, and tell of it."""
if hasattr(RACES, "on_race"):  # from jax 0.12 on, which else ends a kernel that has one
    RACES = dataclasses.replace(RACES, on_race="warn")


class Launches:
    """What was interpreted since the last `reset`."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.kernels = 0
        self.with_races = 0


launches = Launches()


def extend(monkeypatch) -> None:
    """Adds it, until the test ends."""
    launches.reset()
    interpreter_programs.forget()
    monkeypatch.setattr(interpret_pallas_call, "interpret_pallas_call", _call)


def _call(*arguments: Any, out_avals: Any, **parameters: Any) -> Any:
    parameters["out_avals"] = out_avals
    kernel = interpreter_programs.program_of(
        lambda: jax.jit(functools.partial(_interpret, **parameters)),
        operands=tuple(map(jax.typeof, arguments)),
        **parameters,
    )
    shapes = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in out_avals]
    return callback.io_callback(functools.partial(_launch, kernel), shapes, *arguments)


def _launch(kernel: Any, *arguments: Any) -> Any:
    return _gpu.submit(_run, kernel, [np.array(argument) for argument in arguments]).result()


def _run(kernel: Any, arguments: list[np.ndarray]) -> list[np.ndarray]:
    launches.kernels += 1
    try:
        results = [np.asarray(result) for result in kernel(*arguments)]
        dispatch.runtime_tokens.block_until_ready()  # the clean-up, which no result waits for
        launches.with_races += gpu_callbacks.get_races().races_found
        return results
    finally:
        # A failed kernel leaves its memory, and a token that would fail the next kernel.
        gpu_callbacks.reset_gpu_interpret_mode_state()
        dispatch.runtime_tokens.clear()
