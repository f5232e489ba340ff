"""Process that measures: `python -m xlafuse.bench.worker FOLDER`, started by `xlafuse.bench.supervisor`.

FOLDER holds request.json. The worker writes results.json after every shape, the current operation into progress.txt,
and error.txt if it cannot carry out the request. It exits with 0 when everything was measured, with 2 after writing
error.txt, and with 3 when the GPU no longer answers this process.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from itertools import repeat
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from pydantic import TypeAdapter

from pallas_kernels import get_op
from xlafuse.bench.block import BlockSettings, bench_block
from xlafuse.bench.choice import ChoiceSettings, bench_choice, compile_ahead
from xlafuse.bench.environment import Sampler, environment, sampling
from xlafuse.bench.kernels import Settings, bench_operation, require_gpu
from xlafuse.bench.mesh import MeshSettings, bench_mesh, mesh_lines
from xlafuse.bench.model import ModelSettings, bench_model, model_lines
from xlafuse.bench.results import Results, Run, ShapeResult, write
from xlafuse.bench.text import block_lines, choice_lines, kernel_lines, problem_lines
from xlafuse.errors import XlafuseError

DONE, REFUSED, GPU_LOST = 0, 2, 3
AnySettings = Settings | BlockSettings | ChoiceSettings | MeshSettings | ModelSettings
_KINDS: Mapping[str, type[AnySettings]] = {
    "kernels": Settings,
    "block": BlockSettings,
    "choice": ChoiceSettings,
    "mesh": MeshSettings,
    "model": ModelSettings,
}


def main(folder: Path) -> int:
    """Carries out the request in `folder`; returns the exit status."""
    request = json.loads((folder / "request.json").read_text())
    try:
        settings = TypeAdapter(_KINDS[request["benchmark"]]).validate_python(request["settings"])
        require_gpu()
        with sampling() as sampler:
            return measure(request["operations"], settings, folder, sampler)
    except XlafuseError as error:
        (folder / "error.txt").write_text(str(error))
        return REFUSED


def measure(operations: Sequence[str], settings: AnySettings, folder: Path, sampler: Sampler | None = None) -> int:
    """Measures operations, block shapes or calls one after another; prints each result and writes it into `folder`."""
    run: dict[str, Any] = {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "environment": environment(),
        "settings": _finite(asdict(settings)),
    }
    shapes: list[ShapeResult] = []
    left_out: list[str] = []
    ahead = zip(compile_ahead(operations, settings)) if isinstance(settings, ChoiceSettings) else repeat(())
    results, lines = _benchmark(settings)
    for name in operations:
        (folder / "progress.txt").write_text(name)
        print(name, flush=True)
        for result in results(name, settings, sampler, *next(ahead)):
            if isinstance(result, str):
                left_out.append(result)
                continue
            shapes.append(result)
            print("\n".join((*lines(result), *problem_lines(result))), flush=True)
            write(
                folder / "results.json",
                Results(runs=(Run(**run, shapes=tuple(shapes), left_out=tuple(left_out)),)),
            )
            if result.problems and not gpu_answers():
                return GPU_LOST
    write(folder / "results.json", Results(runs=(Run(**run, shapes=tuple(shapes), left_out=tuple(left_out)),)))
    return DONE


def _benchmark(settings: AnySettings) -> tuple[Callable[..., Iterator[ShapeResult | str]], Callable[..., list[str]]]:
    """Returns what yields the results of an item, and what formats one."""
    match settings:
        case BlockSettings():
            return bench_block, block_lines
        case ChoiceSettings():
            return bench_choice, choice_lines
        case MeshSettings():
            return bench_mesh, mesh_lines
        case ModelSettings():
            return bench_model, model_lines
        case Settings():
            return lambda name, *more: bench_operation(get_op(name), *more), kernel_lines


def gpu_answers() -> bool:
    """Tells whether this process can still use the GPU, which an illegal access makes unusable."""
    try:
        return float(jnp.sum(jax.device_put(jnp.ones(8)))) == 8
    except Exception:
        return False


def _finite(settings: dict[str, Any]) -> dict[str, Any]:
    return {name: None if value == float("inf") else value for name, value in settings.items()}


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
