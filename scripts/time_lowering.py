"""Times tracing and lowering a training step of a public model for an H200, with `fuse` and without.

    python scripts/time_lowering.py llama --layers 32 [--folder FOLDER]

Prints CPU seconds, which of them are the search and the lowering of kernels, and how many kernels are lowered. Each
step has a process of its own, so that nothing is cached. See scripts/public_models for the packages and checkouts.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import argparse
import multiprocessing
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent / "public_models"))


def main() -> None:
    """Prints a line for each step."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--folder", type=Path, default=Path(), help="of the checkouts")
    given = parser.parse_args()
    for fused in (False, True):
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            print(pool.apply(seconds_of, (given.model, given.layers, given.folder, fused)), flush=True)


def seconds_of(model: str, layers: int, folder: Path, fused: bool) -> str:
    """Returns a line of the CPU seconds that a step takes to trace and lower."""
    import jax
    import jax.numpy as jnp
    from jax._src.pallas.mosaic_gpu import lowering
    from sources import MODELS

    import xlafuse
    from hlo_analysis.capture.lowering import lower
    from hlo_analysis.targets import load_target
    from xlafuse.fusion import cache

    parts: dict[str, list[float]] = defaultdict(list)

    def timed(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            started = time.thread_time()
            result = function(*args, **kwargs)
            parts[name].append(time.thread_time() - started)
            return result

        return call

    found = next(each for each in MODELS if each.name == model)
    sizes = {**found.sizes, "real": replace(found.sizes["real"], layers=layers)}
    program = replace(found, sizes=sizes).build(folder, jnp.bfloat16, "real", layers)
    arguments = jax.eval_shape(lambda: (program.init(jax.random.key(0)), *program.batch))
    cache.make_plan = timed("search", cache.make_plan)
    lowering.lower_unpipelined_jaxpr_to_module = timed("kernels", lowering.lower_unpipelined_jaxpr_to_module)
    step = jax.value_and_grad(xlafuse.fuse(program.loss) if fused else program.loss)
    started = time.thread_time()
    lower(step, arguments, target=load_target("h200"))
    seconds = time.thread_time() - started
    search, kernels = parts["search"], parts["kernels"]
    name = "with fuse" if fused else "without"
    return f"{name:<10} {seconds:5.1f} s, search {sum(search):4.1f}, {len(kernels):2} kernels {sum(kernels):5.1f}"


if __name__ == "__main__":
    main()
