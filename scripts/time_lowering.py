"""Times lowering a public model's gradient for an H200, as it is or after `fuse`, and again from an exported file.

    python scripts/time_lowering.py llama --layers 32 --checkouts FOLDER [--fuse]

Prints CPU seconds, which of them are the search and the lowering of kernels, how many kernels are lowered, and the
seconds to read the lowered program and lower it again. See docs/public-models.md for the packages and checkouts.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import argparse
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
from jax._src.pallas.mosaic_gpu import lowering

import xlafuse
from hlo_analysis.capture.lowering import answers_of, mesh_of_one, under_mesh_of_one
from hlo_analysis.targets import load_target
from xlafuse.bench.public.programs import shapes_of
from xlafuse.bench.public.sources import MODELS
from xlafuse.fusion import cache


def main() -> None:
    """Prints a line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=[model.name for model in MODELS], metavar="MODEL")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--checkouts", type=Path, default=Path(), help="folder of the repositories")
    parser.add_argument("--fuse", action="store_true")
    options = parser.parse_args()
    model = next(each for each in MODELS if each.name == options.model)
    sizes = {**model.sizes, "real": replace(model.sizes["real"], layers=options.layers)}
    program = replace(model, sizes=sizes).build(options.checkouts, jnp.bfloat16, "real", options.layers)
    parts: dict[str, list[float]] = defaultdict(list)

    def timed(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            started = time.thread_time()
            result = function(*args, **kwargs)
            parts[name].append(time.thread_time() - started)
            return result

        return call

    cache.make_plan = timed("search", cache.make_plan)
    lowering.lower_unpipelined_jaxpr_to_module = timed("kernels", lowering.lower_unpipelined_jaxpr_to_module)
    step = jax.jit(jax.value_and_grad(xlafuse.fuse(program.loss) if options.fuse else program.loss))
    shapes, target = shapes_of(program, "gradient"), load_target("h200")
    started = time.thread_time()
    with answers_of(target):
        exported = under_mesh_of_one(mesh_of_one(target), lambda: jax.export.export(step, platforms=["cuda"])(*shapes))
    seconds, kernels = time.thread_time() - started, parts["kernels"]
    print(f"{seconds:.1f} s, search {sum(parts['search']):.1f}, {len(kernels)} kernels {sum(kernels):.1f}")
    kept = exported.serialize()
    started = time.thread_time()
    jax.jit(jax.export.deserialize(kept).call).trace(*shapes).lower(lowering_platforms=("cuda",))
    print(f"{time.thread_time() - started:.2f} s from {len(kept) / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
