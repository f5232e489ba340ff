"""Times grouped products on the attached GPU beside dense ones, XLA's, JAX's own examples and PyTorch's.

    python scripts/time_grouped.py -o RESULTS.json [--only ROWSxFEATURESxOUTPUTSxGROUPS ...] [--peers xla jax torch]

Of each size the forward pass, the two gradients and the gated product, for equal and for drawn sizes of groups; of few
rows the forward pass alone, beside a copy of the bytes. The candidates of a case take turns, after their results were
compared. A gradient's call computes all that it needs. XLA tunes its own products for a minute a call. --only may name
other sizes; small ones run in the interpreter, to rehearse.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # leaves memory to PyTorch

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels import Traffic, gated_activation, grouped_gated_linear, grouped_linear
from xlafuse.bench.candidates import checked, timed
from xlafuse.bench.ceiling import ceiling_candidates
from xlafuse.bench.results import Problem, ShapeResult
from xlafuse.bench.timing import Candidate
from xlafuse.bench.worker import write_each

SIZES = (
    *("64x2048x768x128", "8x2048x768x128", "16x4096x14336x8"),
    *("16384x4096x14336x8", "16384x2048x1536x64", "65536x2048x768x128"),
)
"""Rows, features, outputs and groups. With few rows each is of a group of its own, as far as there are groups."""
MOST_FEW = 64
BLOCKS = ((128, 128, 4), (128, 192, 4), (64, 128, 5))
"""Rows, columns and steps in flight of JAX's example; the fastest counts."""

Arrays = Mapping[str, jax.Array]
"""x, w, up, dy and the sizes of groups."""

ours = partial(grouped_linear, implementation="mosaic")


def group_sizes(rows: int, groups: int) -> dict[str, list[jax.Array]]:
    """Returns the groups' sizes by name; few rows take other groups in each call, so that the L2 cache has no weights.

    Drawn sizes are of a Dirichlet distribution, flat for up to 8 groups, else with parameter 2.
    """
    if rows < groups:
        turns = [(np.arange(rows) + turn * rows) % groups for turn in range(groups // rows)]
        return {"a row a group": [jnp.zeros(groups, jnp.int32).at[turn].set(1) for turn in turns]}
    generator = np.random.default_rng(5)
    shares = generator.dirichlet(np.full(groups, 1.0 if groups <= 8 else 2.0))
    found = {"equal": np.full(groups, rows // groups)}
    if rows > MOST_FEW:
        found["drawn"] = generator.multinomial(rows, shares)
    return {name: [jnp.asarray(each, jnp.int32)] for name, each in found.items()}


def passes(product: Callable[..., jax.Array]) -> dict[str, Callable[[Arrays], jax.Array]]:
    """Returns the forward pass and the two gradients of a product of (x, w, sizes)."""
    return {
        "forward": lambda given: product(given["x"], given["w"], given["sizes"]),
        "dx": lambda given: jax.vjp(lambda x: product(x, given["w"], given["sizes"]), given["x"])[1](given["dy"])[0],
        "dw": lambda given: jax.vjp(lambda w: product(given["x"], w, given["sizes"]), given["w"])[1](given["dy"])[0],
    }


DENSE: Mapping[str, Callable[[Arrays], jax.Array]] = {
    "forward": lambda given: given["x"] @ given["w"][0],
    "dx": lambda given: given["dy"] @ given["w"][0].T,
    "dw": lambda given: given["x"].T @ given["dy"],
}
GATED: Mapping[str, Callable[[Arrays], jax.Array]] = {
    "one launch": lambda given: grouped_gated_linear(
        given["x"], given["w"], given["up"], given["sizes"], implementation="mosaic"
    ),
    "apart": lambda given: gated_activation(
        ours(given["x"], given["w"], given["sizes"]), ours(given["x"], given["up"], given["sizes"])
    ),
}


def examples(which: str, features: int, outputs: int) -> Iterator[tuple[str, Callable[[Arrays], jax.Array]]]:
    """Yields JAX's own examples for Hopper in several tilings; there is none of x's gradient."""
    from jax.experimental.pallas.ops.gpu import ragged_dot_mgpu, transposed_ragged_dot_mgpu

    for rows, columns, steps in BLOCKS:
        across = next((each for each in (8, 4, 2, 1) if outputs % (each * columns) == 0), None)
        if across is None or which not in ("forward", "dw") or (which == "dw" and features % rows):
            continue
        options = {"block_m": rows, "block_n": columns, "block_k": 64, "grid_block_n": across}
        options["max_concurrent_steps"] = steps
        function, right = (
            (ragged_dot_mgpu.ragged_dot, "w")
            if which == "forward"
            else (transposed_ragged_dot_mgpu.transposed_ragged_dot, "dy")
        )

        def call(given: Arrays, function=function, right=right, options=options) -> jax.Array:
            return function(given["x"], given[right], group_sizes=given["sizes"], **options)

        yield f"jax {rows}x{columns}", call


def of_torch(which: str, inputs: Sequence[Arrays]) -> tuple[Candidate, list[jax.Array]]:
    """Returns PyTorch's grouped product as a candidate, with its first results."""
    import torch  # pyright: ignore[reportMissingImports]

    from xlafuse.bench.peers.tensors import candidate_of, to_jax, to_torch

    x, w, dy = (to_torch(inputs[0][name]) for name in ("x", "w", "dy"))
    operands = {"forward": (x, w), "dx": (dy, w.transpose(1, 2)), "dw": (x.t(), dy)}[which]
    ends = [to_torch(jnp.cumsum(given["sizes"]).astype(jnp.int32)) for given in inputs]

    def call(left: Any, right: Any, offs: Any) -> tuple[Any]:
        return (torch._grouped_mm(left, right, offs=offs),)

    candidate, results = candidate_of("torch", call, [(*operands, each) for each in ends])
    return candidate, [to_jax(each) for each in results]


def candidates(which: str, inputs: Sequence[Arrays], peers: Sequence[str], problems: list[Problem]) -> list[Candidate]:
    """Returns what runs and agrees with our kernel, and the dense product or a copy; failures go into `problems`."""
    _, features, outputs = inputs[0]["w"].shape
    functions = dict(GATED) if which == "gated" else {"ours": passes(ours)[which]}
    if which in DENSE:
        functions |= {"xla": passes(lax.ragged_dot)[which]} if "xla" in peers else {}
        functions |= dict(examples(which, features, outputs)) if "jax" in peers else {}
        functions |= {"dense": DENSE[which]} if len(inputs[0]["x"]) > MOST_FEW else {}

    def made(name: str, function: Callable[[Arrays], jax.Array]) -> tuple[Candidate, list[jax.Array] | None]:
        call = jax.jit(function).lower(inputs[0]).compile()
        candidate = Candidate(name=name, kind="peer", call=call, inputs=[(given,) for given in inputs])
        return candidate, None if name == "dense" else [call(inputs[0])]

    makers: dict[str, Any] = {name: partial(made, name, function) for name, function in functions.items()}
    if which in DENSE and "torch" in peers:
        makers["torch"] = partial(of_torch, which, inputs)
    found = checked(makers, problems)
    if len(inputs[0]["x"]) > MOST_FEW:
        return found
    used = 2 * features * outputs * int(jnp.sum(inputs[0]["sizes"] > 0))
    return [
        *found,
        *ceiling_candidates(Traffic(read=(used // 2,), written=(used // 2,)), sets=min(16, 10**8 // used + 1)),
    ]


def measured(options: argparse.Namespace) -> Iterator[ShapeResult]:
    """Yields the times of each pass at each size, for each way to share the rows."""
    for size in options.only:
        rows, features, outputs, groups = map(int, size.split("x"))
        keys, dtype = jax.random.split(jax.random.key(0), 3), jnp.bfloat16
        w = jax.random.normal(keys[2], (groups, features, outputs), dtype) * features**-0.5
        arrays = {"w": w, "up": jnp.flip(w), "x": jax.random.normal(keys[0], (rows, features), dtype)}
        arrays["dy"] = jax.random.normal(keys[1], (rows, outputs), dtype)
        for how, turns in group_sizes(rows, groups).items():
            inputs = [{**arrays, "sizes": each} for each in turns]
            for which in (*DENSE, "gated") if rows > MOST_FEW else ("forward",):
                result = ShapeResult(op="grouped_linear", phase=which, spec=f"{size} {how}")
                make = partial(candidates, which, inputs, options.peers)
                yield timed(result, make, options, None, baseline="ours")


def main() -> None:
    """Prints the times of each case, and writes them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--only", nargs="+", default=SIZES, metavar="SIZE")
    parser.add_argument("--peers", nargs="*", default=["xla", "jax", "torch"])
    parser.set_defaults(rounds=4, calls=4)
    options = parser.parse_args()
    write_each(measured(options), options.output, {"peers": options.peers})


if __name__ == "__main__":
    main()
