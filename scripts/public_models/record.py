"""Measures public models launch by launch on the attached GPU, for the estimates to be checked against.

    python scripts/public_models/record.py -o OUT --checkouts FOLDER [--only bert/step ...] [--layers 2] [--at-once 6]

OUT/<GPU>/<model>-<part>.zip is what XLA made of the program, and .json beside it the times of its launches: copy OUT
over scripts/public_models/recordings. Where the profile could not be read, only the .zip is written, with the profile.
Programs compile side by side; a program runs alone, after all that compile. Sizes are the real ones, with fewer layers,
since equal layers tell nothing new.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]  # the machine with the GPU need not have the package installed

PARTS = ("step", "forward", "gradient")
TIMES = ("run", "profile")
KEPT = ("final_hlo", "thunk_sequence", "thunk_metadata", "buffer_assignment", "autotune_results", "ptx_resources",
        "target_config", *TIMES)  # fmt: skip


def slim(captured: Any, keys: Sequence[str] = KEPT) -> Any:
    """The capture with nothing but what the launch table and the times are read from: a tenth of the bytes.

    Of each kernel's PTX it keeps the number of instructions, beside its registers.
    """
    from hlo_analysis.costs.resources import count_instructions, ptx_by_kernel

    if resources := captured.file("ptx_resources"):
        kernels, sources = json.loads(resources.read_text(encoding="utf-8")), ptx_by_kernel(captured.ptx())
        for kernel in kernels:
            if text := sources.get(name := kernel["kernel"]):
                kernel["instructions"] = count_instructions(text, name)
        resources.write_text(json.dumps(kernels), encoding="utf-8")
    kept = {key: name for key, name in captured.manifest.files.items() if key in keys}
    for file in captured.path.rglob("*"):
        if file.is_file() and file.relative_to(captured.path).as_posix() not in kept.values():
            file.unlink()
    captured.manifest = replace(captured.manifest, files=kept)
    return captured


def record(name: str, part: str, layers: int, timeout: float, checkouts: Path, output: Path) -> str:
    """Compiles, runs and saves a part of a model; returns a line of its times.

    Raises:
        RuntimeError: no launch was measured; says why.
    """
    import jax
    import jax.numpy as jnp
    from record_measured import line

    from hlo_analysis import analyze, capture
    from xlafuse.bench.public.programs import part_of, shapes_of
    from xlafuse.bench.public.sources import MODELS
    from xlafuse.measurements import Measurements, to_json

    model = next(each for each in MODELS if each.name == name)
    program = model.build(checkouts, jnp.bfloat16, "real", layers)
    fn, outer = part_of(program, part)
    step = jax.jit(outer(fn), donate_argnums=(0, 1) if part == "step" else ())
    captured = capture(step, *shapes_of(program, part), target="attached", measure=True, timeout=timeout)
    analysis = analyze(captured)
    measured, told = analysis.measured, line(f"{name}/{part} {program.size}", analysis)
    folder = output / analysis.device.description.split()[1].lower()
    folder.mkdir(exist_ok=True)
    if measured is None or not measured.launches:
        slim(captured).save(folder / f"{name}-{part}.zip")
        raise RuntimeError(told)
    recorded = Measurements(title=f"{name}/{part}", strategies={"xla": measured})
    (folder / f"{name}-{part}.json").write_text(to_json(recorded), encoding="utf-8")
    slim(captured, [key for key in KEPT if key not in TIMES]).save(folder / f"{name}-{part}.zip")
    return told


def main() -> int:
    """Records the programs; 1 when one was not measured."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--checkouts", type=Path, required=True, help="folder of the repositories")
    parser.add_argument("--only", nargs="+", metavar="MODEL/PART", help="default: all parts of all models")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--at-once", type=int, default=6, help="programs that compile side by side")
    parser.add_argument(
        "--timeout", type=float, default=500.0, help="seconds for a program: measuring waits for all that compile"
    )
    options = parser.parse_args()
    os.environ["JAX_PLATFORMS"] = "cpu"  # tracing needs no GPU, and would take memory of the measured program's
    from xlafuse.bench.public.sources import MODELS

    wanted = options.only or [f"{model.name}/{part}" for part in PARTS for model in MODELS]
    options.output.mkdir(parents=True, exist_ok=True)
    began, failed, waiting = time.perf_counter(), 0, {}
    with ProcessPoolExecutor(options.at_once, mp_context=get_context("spawn"), max_tasks_per_child=1) as pool:
        for each in wanted:
            work = (*each.split("/"), options.layers, options.timeout, options.checkouts, options.output)
            waiting[pool.submit(record, *work)] = each
        for done in as_completed(waiting):
            error = done.exception()  # the others are worth having
            failed += error is not None
            result = f"{waiting[done]} {type(error).__name__}: {error}"[:600] if error else done.result()
            print(f"{time.perf_counter() - began:4.0f} s  {result}", flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    raise SystemExit(main())
