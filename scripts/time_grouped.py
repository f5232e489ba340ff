"""Times grouped products on the attached GPU beside dense ones, each call's in one interleaved run.

    python scripts/time_grouped.py [-o RESULTS.json] [--only ROWSxFEATURESxOUTPUTSxGROUPS ...]

Results are sums of kernel times. `xlafuse bench kernels --op grouped_linear` compares with XLA's grouped product.
"""

from __future__ import annotations

import argparse
import json
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import gated_activation, grouped_gated_linear, grouped_linear
from xlafuse.bench.timing import Candidate, time_candidates

MANY = ((16384, 4096, 14336, 8), (16384, 2048, 1536, 64), (65536, 2048, 768, 128))
FEW = ((64, 2048, 768, 128), (8, 2048, 768, 128), (16, 4096, 14336, 8))
"""Rows, features, outputs and groups. With few rows each is of a group of its own, as far as there are groups; the
forward pass alone is timed, beside a copy of the bytes."""

product = partial(grouped_linear, implementation="mosaic")


def few_sizes(rows: int, groups: int, turn: int) -> jax.Array:
    """Returns one row in each of so many groups, others in each turn; or the rows shared equally."""
    if rows >= groups:
        return jnp.full(groups, rows // groups, jnp.int32)
    return jnp.zeros(groups, jnp.int32).at[(np.arange(rows) + turn * rows) % groups].set(1)


def of_few(rows: int, features: int, outputs: int, groups: int, x: jax.Array, w: jax.Array) -> list[Candidate]:
    """Returns the forward pass of few rows, and a copy of as many bytes as it reads."""
    inputs = [(x, w, few_sizes(rows, groups, turn)) for turn in range(max(1, groups // rows))]
    used = min(rows, groups) * features * outputs
    halves = [jnp.full(used // 2, i, x.dtype) for i in range(max(1, min(16, 10**8 // used)))]
    return [
        Candidate(name="ours forward", kind="variant", call=jax.jit(product), inputs=inputs),
        Candidate(name="copy", kind="ceiling", call=jax.jit(jnp.negative), inputs=[(half,) for half in halves]),
    ]


def of_many(rows: int, outputs: int, groups: int, x: jax.Array, w: jax.Array) -> list[Candidate]:
    """Returns both passes with equal sizes and with some of a Dirichlet distribution, and dense products."""
    dy, up, generator = (
        jax.random.normal(jax.random.key(1), (rows, outputs), x.dtype),
        w[::-1],
        np.random.default_rng(5),
    )
    shares = generator.dirichlet(np.full(groups, 1.0 if groups <= 8 else 2.0))
    sizes = {"equal": np.full(groups, rows // groups), "drawn": generator.multinomial(rows, shares)}
    calls: dict[str, tuple[Any, tuple[Any, ...]]] = {
        "dense forward": (jnp.matmul, (x, w[0])),
        "dense dx": (lambda dy, w: dy @ w.T, (dy, w[0])),
        "dense dw": (lambda x, dy: x.T @ dy, (x, dy)),
    }
    for how, numbers in sizes.items():
        each = jnp.asarray(numbers, jnp.int32)
        calls |= {
            f"{how} ours forward": (product, (x, w, each)),
            f"{how} ours dx": (lambda x, w, n, dy: jax.vjp(lambda x: product(x, w, n), x)[1](dy)[0], (x, w, each, dy)),
            f"{how} ours dw": (lambda x, w, n, dy: jax.vjp(lambda w: product(x, w, n), w)[1](dy)[0], (x, w, each, dy)),
            f"{how} gated": (partial(grouped_gated_linear, implementation="mosaic"), (x, w, up, each)),
            f"{how} gated apart": (
                lambda x, w, up, n: gated_activation(product(x, w, n), product(x, up, n)),
                (x, w, up, each),
            ),
        }
    return [
        Candidate(name=name, kind="variant", call=jax.jit(call), inputs=[given])
        for name, (call, given) in calls.items()
    ]


def timed(rows: int, features: int, outputs: int, groups: int) -> dict[str, float]:
    """Returns the microseconds of each call; of a gradient's call all that it needs."""
    x = jax.random.normal(jax.random.key(0), (rows, features), jnp.bfloat16)
    w = jax.random.normal(jax.random.key(2), (groups, features, outputs), x.dtype) * features**-0.5
    is_few = (rows, features, outputs, groups) in FEW
    made = of_few(rows, features, outputs, groups, x, w) if is_few else of_many(rows, outputs, groups, x, w)
    run = time_candidates(made, rounds=4, calls=4)
    print(dict(run.failures) or "", flush=True)
    return {name: round(each.median_us, 1) for name, each in run.timings.items()}


def main() -> None:
    """Prints the times of each call, and writes them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path)
    parser.add_argument("--only", nargs="+")
    options = parser.parse_args()
    results = {}
    for call in (*FEW, *MANY):
        name = "x".join(map(str, call))
        if options.only is None or name in options.only:
            results[name] = timed(*call)
            print(name, results[name], flush=True)
        if options.output:
            text = json.dumps({"gpu": jax.devices()[0].device_kind, "us": results}, indent=2)
            options.output.write_text(text + "\n")


if __name__ == "__main__":
    main()
