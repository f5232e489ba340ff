"""Measures in a process of its own, which `xlafuse.bench.supervisor` starts, and sends each result to that."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from importlib import import_module
from itertools import repeat
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import get_op
from xlafuse.bench.block import bench_block
from xlafuse.bench.choice import bench_choice, compile_ahead
from xlafuse.bench.environment import environment, sampling
from xlafuse.bench.kernels import bench_operation, require_gpu
from xlafuse.bench.mesh import bench_mesh
from xlafuse.bench.model import bench_model
from xlafuse.bench.results import Results, Run, ShapeResult, write
from xlafuse.bench.settings import PublicSettings
from xlafuse.bench.text import result_lines
from xlafuse.errors import XlafuseError

GPU_LOST = 3
_PYTORCH_PEERS = ("torch", "liger", "fa4", "quack")
"""Names of peers that run in PyTorch start with one of these."""
BENCHMARKS: Mapping[str, Callable[..., Iterator[ShapeResult | str]]] = {
    "kernels": lambda name, *more: bench_operation(get_op(name), *more),
    "block": bench_block,
    "choice": bench_choice,
    "mesh": bench_mesh,
    "model": bench_model,
    "public": lambda *given: import_module("xlafuse.bench.public.bench").bench_public(*given),
}
"""What yields the results of an item by benchmark, or a str for one that it leaves out."""


class BenchError(XlafuseError, RuntimeError):
    """Nothing could be measured; the message gives the reason."""


def main(sender: Connection, benchmark: str, items: Sequence[str], settings: Any) -> None:
    """Measures the items, or sends why it cannot."""
    os.environ.update(worker_environment(settings, os.environ))
    try:
        require_gpu()
        measure(sender.send, benchmark, items, settings)
    except XlafuseError as error:
        sender.send(BenchError(str(error)))


def measure(send: Callable[[Any], None], benchmark: str, items: Sequence[str], settings: Any) -> None:
    """Measures items one after another; prints each result.

    It sends the environment, then for each item its name as ("begun", item), and what the benchmark yields of it. It
    ends the process if the GPU no longer answers.
    """
    ahead = zip(compile_ahead(items, settings)) if benchmark == "choice" else repeat(())
    send(environment())
    with sampling() as sampler:
        for item in items:
            send(("begun", item))
            print(item, flush=True)
            for result in BENCHMARKS[benchmark](item, settings, sampler, *next(ahead)):
                send(result)
                if isinstance(result, ShapeResult):
                    print("\n".join(result_lines(result)), flush=True)
                    if result.problems and not gpu_answers():
                        sys.exit(GPU_LOST)


def write_each(results: Iterable[ShapeResult], output: Path, settings: Mapping[str, Any]) -> None:
    """Prints the results that a script measures in its own process, and writes the file again after each."""
    run = Run(started=datetime.now(UTC).isoformat(timespec="seconds"), environment=environment(), settings=settings)
    for result in results:
        print("\n".join(result_lines(result)), flush=True)
        run = replace(run, shapes=(*run.shapes, result))
        write(output, Results(runs=(run,)))


def worker_environment(settings: Any, environment: Mapping[str, str]) -> dict[str, str]:
    """Returns the environment variables of a process that measures.

    If PyTorch or another case runs beside JAX, JAX must not preallocate the memory.
    """
    has_pytorch = any(name.startswith(_PYTORCH_PEERS) for name in getattr(settings, "peers", ()))
    is_shared = has_pytorch or (isinstance(settings, PublicSettings) and settings.jobs > 1)
    return {**({"XLA_PYTHON_CLIENT_PREALLOCATE": "false"} if is_shared else {}), **environment}


def gpu_answers() -> bool:
    """Tells whether this process can still use the GPU, which an illegal access makes unusable."""
    try:
        return float(jnp.sum(jax.device_put(jnp.ones(8)))) == 8
    except Exception:
        return False
