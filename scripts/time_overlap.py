"""Times products beside their collectives, and layers whose weights are gathered, on all attached GPUs.

    python scripts/time_overlap.py -o RESULTS.json [--kinds gather,scatter,fsdp]

gather, scatter: a product whose operand is gathered along rows, or whose result is summed and scattered: by XLA, with
this package's kernel after or before the collective, in a ring (`overlapped_collectives`), by JAX's own kernel with
Mosaic's remote references, and alone. fsdp: the gradient of MLPs whose weights are gathered, under options of XLA.
Blocks in rings are times of `xlafuse bench mesh --parallel sp --strategies xla_cudnn,best,pallas_overlap`.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_kernels import BY_COPY_ENGINES, linear, overlapped_collectives
from pallas_kernels.primitives.gemm.config import choose_config
from pallas_kernels.primitives.gemm.kernel import gemm
from xlafuse.bench.candidates import checked, timed
from xlafuse.bench.results import Problem, ShapeResult
from xlafuse.bench.timing import Candidate
from xlafuse.bench.worker import write_each

AXIS = "tensor"
Programs = Mapping[str, tuple[Callable[..., Any], tuple[Any, ...], bool]]
"""By name: a jitted function, its arguments, and whether its results are to be those of the first program."""


def product(x: jax.Array, w: jax.Array) -> jax.Array:
    """Multiplies with this package's kernel."""
    return gemm([x], [w], config=choose_config(x.shape[0], w.shape[1], is_even=True))[0]


def gathered(multiply: Callable[..., jax.Array], x: jax.Array, w: jax.Array) -> jax.Array:
    """Gathers x, then multiplies."""
    return multiply(lax.all_gather(x, AXIS, axis=0, tiled=True), w)


def scattered(multiply: Callable[..., jax.Array], x: jax.Array, w: jax.Array) -> jax.Array:
    """Multiplies, then adds up and scatters."""
    return lax.psum_scatter(multiply(x, w), AXIS, scatter_dimension=0, tiled=True)


def example(x: jax.Array, w: jax.Array) -> jax.Array:
    """JAX's kernel: tiles of x go on to the next device from the shared memory of the first that reads them."""
    from jax.experimental.pallas.ops.gpu import collective_matmul_mgpu as published
    from jax.experimental.pallas.ops.gpu.hopper_matmul_mgpu import MatmulDimension

    config = published.TuningConfig(
        tile_m=128,
        tile_n=128,
        tile_k=64,
        max_concurrent_steps=4,
        grid_minor_dim=MatmulDimension.N,
        grid_tile_width=8,
        wg_dimension=MatmulDimension.N,
    )
    return published.all_gather_lhs_matmul(x, w, AXIS, config=config, dtype=x.dtype)


def drawn(mesh: Mesh, shape: tuple[int, ...], spec: P, seed: int, scale: float = 1.0) -> jax.Array:
    """Draws an array in bfloat16."""

    def draw(key: jax.Array) -> jax.Array:
        return (scale * jax.random.normal(key, shape, jnp.float32)).astype(jnp.bfloat16)

    return jax.jit(draw, out_shardings=NamedSharding(mesh, spec))(jax.random.key(seed))


def products(kind: str, mesh: Mesh, size: tuple[int, ...], seed: int) -> Programs:
    """Returns products with and without their collectives. size: rows, features and outputs of one device's product."""
    (rows, features, outputs), is_gather = size, kind == "gather"
    weights = (features, outputs * mesh.size) if is_gather else (features * mesh.size, outputs)
    x_spec, w_spec, y_spec = (P(AXIS), P(None, AXIS), P(None, AXIS)) if is_gather else (P(None, AXIS), P(AXIS), P(AXIS))
    x = drawn(mesh, (rows, weights[0]), x_spec, seed)
    w = drawn(mesh, weights, w_spec, seed + 1, weights[0] ** -0.5)
    whole = jax.jit(lambda x: x, out_shardings=NamedSharding(mesh, P()))(x) if is_gather else x
    alone = (P(), P(None, AXIS)) if is_gather else (x_spec, P(AXIS))
    collective = gathered if is_gather else scattered
    options = dict(BY_COPY_ENGINES) if jax.default_backend() == "gpu" else {}

    def manual(function: Callable[..., jax.Array], x_spec: P, y_spec: P) -> Callable[..., Any]:
        mapped = jax.shard_map(function, mesh=mesh, in_specs=(x_spec, w_spec), out_specs=y_spec, check_vma=False)
        return jax.jit(mapped, compiler_options=options)

    ring = overlapped_collectives()(lambda x, w: linear(x, w))
    ring = jax.jit(ring, out_shardings=NamedSharding(mesh, y_spec), compiler_options=options)
    multiply = {"XLA": jnp.matmul, "kernel": product}
    return {
        **{
            f"{kind}, {name}": (manual(partial(collective, f), x_spec, y_spec), (x, w), True)
            for name, f in multiply.items()
        },
        "ring": (ring, (x, w), True),
        **({"JAX's example": (manual(example, x_spec, y_spec), (x, w), True)} if is_gather else {}),
        **{f"alone, {name}": (manual(f, *alone), (whole, w), is_gather) for name, f in multiply.items()},
    }


OPTIONS: Mapping[str, dict[str, Any]] = {
    "gathered": {},
    "no latency hiding": {"xla_gpu_enable_latency_hiding_scheduler": False},
    "nothing combined": {
        "xla_gpu_all_gather_combine_threshold_bytes": 0,
        "xla_gpu_reduce_scatter_combine_threshold_bytes": 0,
    },
}
"""Options of XLA for weights that are gathered."""


def fsdp(mesh: Mesh, size: tuple[int, ...], seed: int) -> Programs:
    """Returns the gradient of MLPs. size: rows, features, hidden features and layers."""
    rows, features, hidden, count = size
    x = drawn(mesh, (rows, features), P(AXIS), seed)
    sizes = ((features, hidden), (hidden, features))
    cut = [[drawn(mesh, each, P(AXIS), seed + i, each[0] ** -0.5) for each in sizes] for i in range(count)]
    whole = jax.jit(lambda tree: tree, out_shardings=NamedSharding(mesh, P()))(cut)
    places = jax.tree.map(lambda each: each.sharding, (x, (cut, x)))

    def gradient(weights: Any, x: jax.Array) -> Any:
        def stack(weights: Any, x: jax.Array) -> jax.Array:
            for up, down in weights:
                x = x + jax.nn.gelu(x @ up) @ down
            return x

        y, pullback = jax.vjp(stack, weights, x)
        return y, pullback(x)

    specs = {"in_specs": (P(), P(AXIS)), "out_specs": (P(AXIS), (P(), P(AXIS)))}
    alone = jax.jit(jax.shard_map(gradient, mesh=mesh, check_vma=False, **specs))
    steps = {name: jax.jit(gradient, out_shardings=places, compiler_options=each) for name, each in OPTIONS.items()}
    return {
        **{name: (step, (cut, x), True) for name, step in steps.items()},
        "weights whole, no sums": (alone, (whole, x), False),
    }


KINDS: Mapping[str, Callable[[Mesh, tuple[int, ...], int], Programs]] = {
    "gather": partial(products, "gather"),
    "scatter": partial(products, "scatter"),
    "fsdp": fsdp,
}


def candidates(programs: Callable[[], Programs], problems: list[Problem]) -> list[Candidate]:
    """Returns the programs that run and agree with the first; failures go into `problems`."""

    def made(name: str, function: Any, arguments: tuple[Any, ...], is_checked: bool) -> tuple[Candidate, Any]:
        call = function.lower(*arguments).compile()
        if name == "ring" and "collective-permute" not in str(call.as_text()):
            raise AssertionError("the program has no ring")
        results = jax.tree.leaves(call(*arguments))
        return Candidate(name=name, kind="peer", call=call, inputs=[arguments]), results if is_checked else None

    return checked({name: partial(made, name, *each) for name, each in programs().items()}, problems)


def measured(options: argparse.Namespace) -> Iterator[ShapeResult]:
    """Yields the times of each kind at each size."""
    mesh = Mesh(np.array(jax.devices()), (AXIS,))
    for kind in options.kinds.split(","):
        for text in [options.mlp] if kind == "fsdp" else options.sizes.split(","):
            rows, features, outputs, *layers = map(int, text.split("x"))
            size = (rows, outputs, features) if kind == "scatter" else (rows, features, outputs, *layers)
            make = partial(candidates, partial(KINDS[kind], mesh, size, options.seed))
            result = ShapeResult(op="linear", phase=kind, spec=f"{'x'.join(map(str, size))} on {mesh.size}")
            yield timed(result, make, options, None, baseline=kind, by_gpu=False)


def main() -> None:
    """Times the kinds that were asked for, and writes the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--kinds", default="gather,scatter,fsdp")
    parser.add_argument("--sizes", default="16384x4096x7168,8192x4096x3584", help="rows, features, outputs of a device")
    parser.add_argument("--mlp", default="16384x4096x14336x4", help="rows, features, hidden features, layers of fsdp")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--calls", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    settings = {"rounds": options.rounds, "calls": options.calls, "seed": options.seed}
    write_each(measured(options), options.output, settings)


if __name__ == "__main__":
    main()
