"""The process that measures: `python -m xlafuse.bench.worker FOLDER`, started by `xlafuse.bench.supervisor`.

FOLDER holds request.json; here come results.json, written anew after every shape, progress.txt with the operation at
hand, and error.txt where the request cannot be carried out. Exits with 0 when all was measured, 2 with an error.txt, 3
when the GPU no longer answers this process.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from pydantic import TypeAdapter

from pallas_kernels import get_op
from xlafuse.bench import block_lines
from xlafuse.bench.block import BlockSettings, bench_block
from xlafuse.bench.environment import environment
from xlafuse.bench.kernels import Settings, bench_operation, require_gpu
from xlafuse.bench.lines import problem_lines, result_lines
from xlafuse.bench.results import Results, Run, ShapeResult, write
from xlafuse.bench.sampling import Sampler, sampling
from xlafuse.errors import XlafuseError

DONE, REFUSED, GPU_LOST = 0, 2, 3


def main(folder: Path) -> int:
    """Carries out the request in `folder`; returns the exit status."""
    request = json.loads((folder / "request.json").read_text())
    try:
        kind = BlockSettings if request["benchmark"] == "block" else Settings
        settings = TypeAdapter(kind).validate_python(request["settings"])
        require_gpu()
        with sampling() as sampler:
            return measure(request["operations"], settings, folder, sampler)
    except XlafuseError as error:
        (folder / "error.txt").write_text(str(error))
        return REFUSED


def measure(
    operations: Sequence[str], settings: Settings | BlockSettings, folder: Path, sampler: Sampler | None = None
) -> int:
    """Measures operations, or a block's shapes, one after another; tells what it finds on stdout and in `folder`."""
    run: dict[str, Any] = {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "environment": environment(),
        "settings": _finite(asdict(settings)),
    }
    shapes: list[ShapeResult] = []
    left_out: list[str] = []
    for name in operations:
        (folder / "progress.txt").write_text(name)
        print(name, flush=True)
        for result in _results(name, settings, sampler):
            if isinstance(result, str):
                left_out.append(result)
                continue
            shapes.append(result)
            lines = block_lines.result_lines if isinstance(settings, BlockSettings) else result_lines
            print("\n".join((*lines(result), *problem_lines(result))), flush=True)
            write(
                folder / "results.json",
                Results(runs=(Run(**run, shapes=tuple(shapes), left_out=tuple(left_out)),)),
            )
            if result.problems and not gpu_answers():
                return GPU_LOST
    write(folder / "results.json", Results(runs=(Run(**run, shapes=tuple(shapes), left_out=tuple(left_out)),)))
    return DONE


def _results(name: str, settings: Settings | BlockSettings, sampler: Sampler | None) -> Iterator[ShapeResult | str]:
    if isinstance(settings, BlockSettings):
        return bench_block(name, settings, sampler)
    return bench_operation(get_op(name), settings, sampler)


def gpu_answers() -> bool:
    """Whether this process can still use the GPU: after an illegal access nothing works any more."""
    try:
        return float(jnp.sum(jax.device_put(jnp.ones(8)))) == 8
    except Exception:
        return False


def _finite(settings: dict[str, Any]) -> dict[str, Any]:
    return {name: None if value == float("inf") else value for name, value in settings.items()}


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
