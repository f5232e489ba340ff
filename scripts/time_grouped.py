"""Times grouped products on the attached GPU beside dense ones, XLA's, JAX's own examples and PyTorch's.

    python scripts/time_grouped.py [-o RESULTS.json] [--only ROWSxFEATURESxOUTPUTSxGROUPS ...] [--peers xla jax torch]

Sums of kernel times, in one interleaved run for each call. Results of the forward pass are compared first. XLA tunes
its own products for a minute a call. --tiny: small sizes, to rehearse in the interpreter, where nothing is timed.
--count: how much of the multiprocessors' time drawn sizes could fill; needs no GPU.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # leaves memory to PyTorch

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels import gated_activation, grouped_gated_linear, grouped_linear
from xlafuse.bench.timing import Candidate, time_candidates

MANY = ((16384, 4096, 14336, 8), (16384, 2048, 1536, 64), (65536, 2048, 768, 128))
FEW = ((64, 2048, 768, 128), (8, 2048, 768, 128), (16, 4096, 14336, 8))
TINY = ((256, 128, 256, 4), (8, 128, 128, 16))
"""Rows, features, outputs and groups. With few rows each is of a group of its own, as far as there are groups."""
BLOCKS = ((128, 128, 4), (128, 192, 4), (64, 128, 5))
"""Rows, columns and steps in flight of JAX's example; the fastest counts."""

MOST_FEW = 64
"""Up to so many rows, the forward pass alone is timed, beside a copy of the bytes."""

Calls = dict[str, tuple[Callable[..., Any], tuple[Any, ...]]]
"""Functions and arguments by name."""


def sizes_of(rows: int, groups: int) -> Mapping[str, jax.Array]:
    """Returns equal sizes, and some of a Dirichlet distribution, flat for up to 8 groups, else with parameter 2."""
    generator = np.random.default_rng(5)
    shares = generator.dirichlet(np.full(groups, 1.0 if groups <= 8 else 2.0))
    sizes = {"equal": np.full(groups, rows // groups), "drawn": generator.multinomial(rows, shares)}
    return {name: jnp.asarray(each, jnp.int32) for name, each in sizes.items()}


def touched(rows: int, groups: int, turn: int) -> jax.Array:
    """Returns sizes of few rows: one in each of so many groups, others in each turn; or the rows shared equally."""
    if rows >= groups:
        return jnp.full(groups, rows // groups, jnp.int32)
    return jnp.zeros(groups, jnp.int32).at[(np.arange(rows) + turn * rows) % groups].set(1)


def dx(product: Callable[..., jax.Array], x: jax.Array, w: jax.Array, sizes: jax.Array, dy: jax.Array) -> jax.Array:
    """Returns the gradient of x."""
    return jax.vjp(lambda x: product(x, w, sizes), x)[1](dy)[0]


def dw(product: Callable[..., jax.Array], x: jax.Array, w: jax.Array, sizes: jax.Array, dy: jax.Array) -> jax.Array:
    """Returns the gradient of w."""
    return jax.vjp(lambda w: product(x, w, sizes), w)[1](dy)[0]


"""Our kernel."""
ours = partial(grouped_linear, implementation="mosaic")


def gated(x: jax.Array, w: jax.Array, up: jax.Array, sizes: jax.Array) -> jax.Array:
    """Returns the gated product by one kernel."""
    return grouped_gated_linear(x, w, up, sizes, implementation="mosaic")


def gated_apart(x: jax.Array, w: jax.Array, up: jax.Array, sizes: jax.Array) -> jax.Array:
    """Returns the same by two grouped products, and their gating apart."""
    return gated_activation(ours(x, w, sizes), ours(x, up, sizes))


def examples(outputs: int, features: int) -> Calls:
    """Returns JAX's own examples for Hopper in several tilings."""
    from jax.experimental.pallas.ops.gpu import ragged_dot_mgpu, transposed_ragged_dot_mgpu

    found: Calls = {}
    for rows, columns, steps in BLOCKS:
        across = next((each for each in (8, 4, 2, 1) if outputs % (each * columns) == 0), 0)
        options = {"block_k": 64, "max_concurrent_steps": steps, "block_n": columns, "grid_block_n": across}
        if across:
            name = f"jax {rows}x{columns}"
            forward = partial(_example, ragged_dot_mgpu.ragged_dot, options | {"block_m": rows})
            found[f"{name} forward"] = forward, ("x", "w", "sizes")
            if features % rows == 0:
                back = partial(_example, transposed_ragged_dot_mgpu.transposed_ragged_dot, options | {"block_m": rows})
                found[f"{name} dw"] = back, ("x", "dy", "sizes")
    return found


def _example(function, options, left, right, sizes):
    return function(left, right, group_sizes=sizes, **options)


def torch_candidates(arrays: Mapping[str, jax.Array], sizes: list[jax.Array], how: str) -> list[Candidate]:
    """Returns PyTorch's grouped products, where it is installed; gradients only of many rows."""
    if importlib.util.find_spec("torch") is None or jax.default_backend() != "gpu":
        return []
    import torch  # pyright: ignore[reportMissingImports]

    from xlafuse.bench.peers.tensors import candidate_of, to_torch

    x, w, dy = (to_torch(arrays[name]) for name in ("x", "w", "dy"))
    ends = [to_torch(jnp.cumsum(each).astype(jnp.int32)) for each in sizes]
    calls = {"forward": (x, w), "dx": (dy, w.transpose(1, 2)), "dw": (x.t(), dy)}
    found = []
    for name, (left, right) in calls.items() if x.shape[0] > MOST_FEW else (("forward", (x, w)),):
        call, inputs = (lambda *each: (torch._grouped_mm(*each[:2], offs=each[2]),)), [(left, right, e) for e in ends]
        found.append(candidate_of(f"{how}torch {name}", call, inputs)[0])
    return found


def timed(
    rows: int, features: int, outputs: int, groups: int, *, peers: Sequence[str] = (), has_times: bool = True
) -> dict[str, float]:
    """Returns the sum of kernel times of each call in microseconds; of a gradient's call all that it needs."""
    keys, dtype = jax.random.split(jax.random.key(0), 3), jnp.bfloat16
    x, dy = (jax.random.normal(key, (rows, size), dtype) for key, size in zip(keys, (features, outputs), strict=False))
    w = jax.random.normal(keys[2], (groups, features, outputs), dtype) * features**-0.5
    up = jnp.flip(w)
    is_few = rows <= MOST_FEW
    turns = [touched(rows, groups, turn) for turn in range(max(1, groups // rows))]
    sizes = {"": turns} if is_few else {f"{name} ": [each] for name, each in sizes_of(rows, groups).items()}
    calls: Calls = {"ours forward": (ours, ("x", "w", "sizes"))}
    if "xla" in peers:
        calls["xla forward"] = lax.ragged_dot, ("x", "w", "sizes")
    if "jax" in peers:
        calls |= {name: call for name, call in examples(outputs, features).items() if "dw" not in name or not is_few}
    if not is_few:
        calls |= {
            "ours dx": (partial(dx, ours), ("x", "w", "sizes", "dy")),
            "ours dw": (partial(dw, ours), ("x", "w", "sizes", "dy")),
            "gated": (gated, ("x", "w", "up", "sizes")),
            "gated apart": (gated_apart, ("x", "w", "up", "sizes")),
        }
        if "xla" in peers:
            calls["xla dx"] = partial(dx, lax.ragged_dot), ("x", "w", "sizes", "dy")
        if "xla" in peers and groups <= 64:  # more need more memory than there is
            calls["xla dw"] = partial(dw, lax.ragged_dot), ("x", "w", "sizes", "dy")
    elif not has_times:
        calls |= {"ours dw": (partial(dw, ours), ("x", "w", "sizes", "dy"))}
    arrays, candidates, results = {"x": x, "w": w, "dy": dy, "up": up}, [], {}

    def add(name: str, call: Any, inputs: Any, kind: Any = "variant") -> None:
        candidates.append(Candidate(name=name, kind=kind, call=call, inputs=inputs))

    for name, (function, takes) in calls.items():
        try:
            call = None
            for how, several in sizes.items():
                inputs = [tuple({**arrays, "sizes": each}[key] for key in takes) for each in several]
                call = call or jax.jit(function).lower(*inputs[0]).compile()
                if "forward" in name:
                    results[how + name] = call(*inputs[0])
                add(how + name, call, inputs, "variant" if name.startswith(("ours", "gated")) else "peer")
        except Exception as error:  # a peer may not take this call
            print(f"{name} failed: {type(error).__name__}: {str(error)[:200]}", flush=True)
    for how, several in sizes.items():
        try:
            candidates += torch_candidates(arrays, several, how) if "torch" in peers else []
        except Exception as error:
            print(f"torch failed: {type(error).__name__}: {str(error)[:200]}", flush=True)
    if is_few:
        used = min(rows, groups) * features * outputs
        halves = [jax.random.normal(keys[2], (used // 2,), dtype) + i for i in range(max(1, min(16, 10**8 // used)))]
        add("copy", jax.jit(jnp.negative).lower(halves[0]).compile(), [(each,) for each in halves], "ceiling")
    else:
        for name, function, arguments in (
            ("dense forward", jnp.matmul, (x, w[0])),
            ("dense dx", lambda dy, w: dy @ w.T, (dy, w[0])),
            ("dense dw", lambda x, dy: x.T @ dy, (x, dy)),
        ):
            add(name, jax.jit(function).lower(*arguments).compile(), [arguments])
    check(results)
    if not has_times:
        return {}
    run = time_candidates(candidates, rounds=4, calls=4)
    print({name: error[:150] for name, error in run.failures.items()} or "", flush=True)
    return {name: round(each.median_us, 1) for name, each in run.timings.items()}


def check(results: Mapping[str, jax.Array]) -> None:
    """Prints which results are not those of our kernel for the same sizes."""
    for name, result in results.items():
        how = name.split(" ")[0] + " " if name.startswith(("equal", "drawn")) else ""
        want, got = (np.asarray(each, np.float32) for each in (results[f"{how}ours forward"], result))
        if not np.abs(want - got).max() <= 0.02 * np.abs(want).max():
            print(f"{name}: differs by {np.abs(want - got).max():.3f} of {np.abs(want).max():.3f}", flush=True)


def filled(rows: int, outputs: int, groups: int, *, cores: int = 132) -> dict[str, float]:
    """Returns the share of the tiles' time that rows of groups fill, by tiling: the mean of 200 draws of sizes.

    A tile of 128 × 256 takes 1, others as their area. Balanced: as if any multiprocessor could take any part of a tile.
    """
    found: dict[str, list[float]] = {}
    for seed in range(200):
        generator = np.random.default_rng(seed)
        sizes = generator.multinomial(rows, generator.dirichlet(np.full(groups, 1.0 if groups <= 8 else 2.0)))

        def tiles(height: int, width: int, sizes: np.ndarray = sizes) -> int:
            return int(np.sum(-(-sizes // height))) * -(-outputs // width)

        wide, rest = tiles(128, 256), tiles(128, 256) % cores
        times = {f"{h}x{w}": -(-tiles(h, w) // cores) * h * w / 32768 for h, w in ((128, 256), (128, 192), (192, 192))}
        times["128x256, last wave of half tiles"] = wide // cores + (0.5 if 0 < 2 * rest <= cores else float(rest > 0))
        times["128x256, balanced"] = wide / cores
        times["64x256, balanced"] = tiles(64, 256) / 2 / cores
        for name, time in times.items():
            found.setdefault(name, []).append(rows * outputs / (cores * 32768) / time)
    return {name: round(float(np.mean(each)), 3) for name, each in found.items()}


def main() -> None:
    """Prints the times of each call, and writes them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path)
    parser.add_argument("--only", nargs="+")
    parser.add_argument("--peers", nargs="*", default=["xla", "jax", "torch"])
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--count", action="store_true")
    options = parser.parse_args()
    if options.count:
        for rows, _, outputs, groups in MANY:
            print(rows, outputs, groups, filled(rows, outputs, groups))
        return
    results = {}
    for call in TINY if options.tiny else (*FEW, *MANY):
        name = "x".join(map(str, call))
        if options.only is None or name in options.only:
            results[name] = timed(*call, peers=options.peers, has_times=not options.tiny)
            print(name, results[name], flush=True)
        if options.output:
            text = json.dumps({"gpu": jax.devices()[0].device_kind, "us": results}, indent=2)
            options.output.write_text(text + "\n")


if __name__ == "__main__":
    main()
