"""Times grouped products on the attached GPU beside dense ones of the same size, for equal and for drawn group sizes.

python scripts/time_grouped.py [-o RESULTS.json]
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import grouped_linear
from xlafuse.bench.timing import Candidate, time_candidates

CALLS = ((16384, 4096, 14336, 8), (16384, 2048, 1536, 64), (65536, 2048, 768, 128), (64, 2048, 768, 128))
"""Rows, features, outputs and groups."""


def sizes_of(rows: int, groups: int) -> Mapping[str, jax.Array]:
    """Returns equal sizes, and some of a Dirichlet distribution, flat for up to 8 groups, else with parameter 2."""
    generator = np.random.default_rng(5)
    shares = generator.dirichlet(np.full(groups, 1.0 if groups <= 8 else 2.0))
    sizes = {"equal": np.full(groups, rows // groups), "drawn": generator.multinomial(rows, shares)}
    return {name: jnp.asarray(each, jnp.int32) for name, each in sizes.items()}


def timed(rows: int, features: int, outputs: int, groups: int) -> dict[str, float]:
    """Returns the sum of kernel times of each pass in microseconds; the gradients' with what the call needs besides."""
    keys, dtype = jax.random.split(jax.random.key(0), 3), jnp.bfloat16
    x, dy = (jax.random.normal(key, (rows, size), dtype) for key, size in zip(keys, (features, outputs), strict=False))
    w = jax.random.normal(keys[2], (groups, features, outputs), dtype) * features**-0.5
    candidates = []

    def add(name, function, *arguments):
        call = jax.jit(function).lower(*arguments).compile()
        candidates.append(Candidate(name=name, kind="variant", call=call, inputs=[arguments]))

    def add_passes(name, product, *more):
        add(f"{name} forward", product, x, w, *more)
        add(f"{name} dx", lambda x, w, dy, *more: jax.vjp(lambda x: product(x, w, *more), x)[1](dy), x, w, dy, *more)
        add(f"{name} dw", lambda x, w, dy, *more: jax.vjp(lambda w: product(x, w, *more), w)[1](dy), x, w, dy, *more)

    add("dense forward", jnp.matmul, x, w[0])
    add("dense dx", lambda dy, w: dy @ w.T, dy, w[0])
    add("dense dw", lambda x, dy: x.T @ dy, x, dy)
    for name, sizes in sizes_of(rows, groups).items():
        add_passes(name, lambda x, w, sizes: grouped_linear(x, w, sizes, implementation="mosaic"), sizes)
    run = time_candidates(candidates, rounds=5, calls=3)
    return {name: round(each.median_us, 1) for name, each in run.timings.items()}


def main() -> None:
    """Prints the times of each call, and writes them."""
    parser = argparse.ArgumentParser(description="Times grouped products on the attached GPU.")
    parser.add_argument("-o", "--output", type=Path)
    output = parser.parse_args().output
    results = {}
    for call in CALLS:
        results["x".join(map(str, call))] = found = timed(*call)
        print(call, found, flush=True)
    if output:
        output.write_text(json.dumps({"gpu": jax.devices()[0].device_kind, "us": results}, indent=2) + "\n")


if __name__ == "__main__":
    main()
