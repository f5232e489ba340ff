"""Times collectives that products hide, and those that they do not, on all attached GPUs.

    python scripts/time_overlap.py [-o RESULTS.json] [--kinds gather,scatter,repeat,block,fsdp]

gather, scatter: a product whose operand is gathered along rows, or whose result is summed and scattered: by XLA, with
this package's kernel after or before the collective, in a ring (`overlapped_collectives`), and alone. Results are
compared with float64 first. repeat: the rings again and again, one device later than the other by a drawn time; results
must stay equal. block: llama3-8b layers, sequence parallel. fsdp: the gradient of MLPs whose weights are gathered, and
from a profile the time of NCCL's kernels during which nothing else runs. example: JAX's own kernel for the gather, with
Mosaic's remote references.
"""

from __future__ import annotations

import argparse
import gzip
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
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
from pallas_kernels.primitives.overlapped import moved
from xlafuse.models import block_function
from xlafuse.models.shardings import layout_of
from xlafuse.strategies import get_strategy

AXIS = "tensor"
Calls = dict[str, Callable[[], Any]]


def product(x: jax.Array, w: jax.Array) -> jax.Array:
    """Multiplies with this package's kernel."""
    return gemm([x], [w], config=choose_config(x.shape[0], w.shape[1], is_even=True))[0]


def gathered(multiply: Callable[..., jax.Array], x: jax.Array, w: jax.Array) -> jax.Array:
    """Gathers x, then multiplies."""
    return multiply(lax.all_gather(x, AXIS, axis=0, tiled=True), w)


def scattered(multiply: Callable[..., jax.Array], x: jax.Array, w: jax.Array) -> jax.Array:
    """Multiplies, then adds up and scatters."""
    return lax.psum_scatter(multiply(x, w), AXIS, scatter_dimension=0, tiled=True)


def copied_to_place(x: jax.Array, w: jax.Array) -> jax.Array:
    """A ring whose results are copied to their places after all products."""
    own, parts, count = x, [], lax.axis_size(AXIS)
    for step in range(count):
        following = moved(own, (AXIS,), -1) if step < count - 1 else None
        parts.append(product(own, w))
        if following is not None:
            own, parts[-1] = lax.optimization_barrier((following, parts[-1]))
    return jnp.roll(jnp.concatenate(parts), lax.axis_index(AXIS) * x.shape[0], axis=0)


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


MANUAL = {
    "gather": {
        "gather, then product, XLA": partial(gathered, jnp.matmul),
        "gather, then product, kernel": partial(gathered, product),
        "ring, copied to place": copied_to_place,
    },
    "example": {"JAX's example": example},
    "scatter": {
        "product, then scatter, XLA": partial(scattered, jnp.matmul),
        "product, then scatter, kernel": partial(scattered, product),
    },
}
"""Functions of one device's parts. "ring" is `linear` under `overlapped_collectives`."""


def drawn(mesh: Mesh, shape: tuple[int, ...], spec: P, seed: int, scale: float = 1.0) -> jax.Array:
    """Draws an array in bfloat16."""

    def draw(key: jax.Array) -> jax.Array:
        return (scale * jax.random.normal(key, shape, jnp.float32)).astype(jnp.bfloat16)

    return jax.jit(draw, out_shardings=NamedSharding(mesh, spec))(jax.random.key(seed))


def microseconds(calls: Calls, rounds: int, repeats: int) -> dict[str, float]:
    """Returns the median time of each call by the wall clock, of `repeats` back to back, in turns."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        jax.block_until_ready([call() for _ in range(2)])
    for _ in range(rounds):
        for name, call in calls.items():
            start = time.perf_counter()
            jax.block_until_ready([call() for _ in range(repeats)][-1])
            times[name].append((time.perf_counter() - start) / repeats * 1e6)
    return {name: round(statistics.median(each), 1) for name, each in times.items()}


def made(starts: dict[str, Callable[[], Callable[[], Any]]], row: dict[str, Any]) -> Calls:
    """Compiles at the same time; notes errors in the row."""

    def one(name: str) -> Any:
        try:
            return starts[name]()
        except Exception as error:
            row[name] = f"{type(error).__name__}: {str(error)[:300]}"
            print(name, row[name], flush=True)
            return None

    with ThreadPoolExecutor(8) as pool:
        return {name: call for name, call in zip(starts, pool.map(one, starts), strict=True) if call is not None}


def of_products(mesh: Mesh, kind: str, size: tuple[int, ...], seed: int) -> tuple[Calls, Calls, Any, dict[str, Any]]:
    """Returns calls of products and of products alone, and the float64 rows of some places.

    size: rows, features and outputs of one device's product.
    """
    (rows, features, outputs), count = size, mesh.size
    is_gather = kind != "scatter"
    wide = (features, outputs * count) if is_gather else (features * count, outputs)
    x_spec, w_spec, out = (P(AXIS), P(None, AXIS), P(None, AXIS)) if is_gather else (P(None, AXIS), P(AXIS), P(AXIS))
    x = drawn(mesh, (rows, wide[0]), x_spec, seed)
    w = drawn(mesh, wide, w_spec, seed + 1, wide[0] ** -0.5)
    whole = jax.jit(lambda x: x, out_shardings=NamedSharding(mesh, P()))(x) if is_gather else x

    def manual(function: Any, x: Any, spec: P, out: P) -> Any:
        mapped = jax.shard_map(function, mesh=mesh, in_specs=(spec, w_spec), out_specs=out, check_vma=False)
        return partial(jax.jit(mapped, compiler_options=dict(BY_COPY_ENGINES)).lower(x, w).compile(), x, w)

    def ring() -> Any:
        step = overlapped_collectives()(lambda x, w: linear(x, w))
        jitted = jax.jit(step, out_shardings=NamedSharding(mesh, out), compiler_options=dict(BY_COPY_ENGINES))
        compiled = jitted.lower(x, w).compile()
        assert "collective-permute" in str(compiled.as_text()), "no ring"
        return partial(compiled, x, w)

    row: dict[str, Any] = {}
    starts: dict[str, Callable[[], Any]] = {
        name: partial(manual, function, x, x_spec, out) for name, function in MANUAL[kind].items()
    }
    if kind != "example":
        starts["ring"] = ring
    calls = made(starts, row)
    apart = (P(), P(None, AXIS)) if is_gather else (x_spec, P(AXIS))
    functions = {"product alone, XLA": jnp.matmul, "product alone, kernel": product}
    alone = made({name: partial(manual, function, whole, *apart) for name, function in functions.items()}, row)
    places = np.random.default_rng(seed).choice(rows, min(rows, 48), replace=False)
    expected = np.asarray(x[places], np.float64) @ np.asarray(w, np.float64)
    return calls, alone, (places, expected), row


def timed_products(mesh: Mesh, kind: str, size: tuple[int, ...], args: Any) -> dict[str, Any]:
    """Checks and times products with their collectives."""
    calls, alone, (places, expected), row = of_products(mesh, kind, size, args.seed)
    for name, call in calls.items():
        error = np.abs(np.asarray(call()[places], np.float64) - expected).max() / np.abs(expected).max()
        row[f"{name}: error of the largest"] = float(error)
        assert error < 0.01, f"{name} is wrong by {error}"
    if kind == "gather":
        row["ring equals product alone"] = bool(jnp.array_equal(calls["ring"](), alone["product alone, kernel"]()))
    return row | microseconds(alone | calls, args.rounds, 10)


def repeated(mesh: Mesh, size: tuple[int, ...], args: Any) -> dict[str, Any]:
    """Calls rings many times, each device delayed by other work of a drawn length."""
    row: dict[str, Any] = {}
    for kind in ("gather", "scatter"):
        calls, _, _, _ = of_products(mesh, kind, size, args.seed)
        first = calls["ring"]()

        def delayed(count: jax.Array, y: jax.Array) -> jax.Array:
            return lax.fori_loop(0, count[0], lambda _, y: jnp.sin(y), y)

        delay = jax.jit(jax.shard_map(delayed, mesh=mesh, in_specs=(P(AXIS), P(AXIS)), out_specs=P(AXIS)))
        place = NamedSharding(mesh, P(AXIS))
        work = jax.device_put(jnp.ones((mesh.size, 1 << 22)), place)
        equal = jax.jit(lambda a, b, so_far: so_far & jnp.array_equal(a, b))
        counts = np.random.default_rng(args.seed).integers(0, 40, (args.steps, mesh.size)).astype(np.int32)
        is_equal = jnp.array(True)
        for count in counts:
            delay(jax.device_put(count, place), work)
            is_equal = equal(first, calls["ring"](), is_equal)
        row[f"{kind}: {args.steps} rings are equal"] = bool(is_equal)
    return row


def layers(names: list[str], args: Any) -> dict[str, Any]:
    """Times llama3-8b layers forward and their gradient, sequence parallel; the first strategy is the baseline."""
    batch, length, count = map(int, args.shape.split("x"))
    shape = batch, length
    layout = layout_of({AXIS: jax.device_count()}, "sp", jax.devices())
    _, (params, x, positions) = block_function("llama3-8b", shape, layout=layout)
    placed = jax.tree.map(lambda each: each.sharding, ((params,) * count, x))

    def draw(key: jax.Array) -> Any:
        keys = iter(jax.random.split(key, 2 + count * len(jax.tree.leaves(params))))

        def weight(like: Any) -> jax.Array:
            if like.ndim == 1:
                return jnp.ones(like.shape, like.dtype)
            return (like.shape[-2] ** -0.5 * jax.random.normal(next(keys), like.shape)).astype(like.dtype)

        return tuple(jax.tree.map(weight, params) for _ in range(count)), jax.random.normal(
            next(keys), x.shape, x.dtype
        )

    weights, rows = jax.jit(draw, out_shardings=placed)(jax.random.key(args.seed))
    tokens = jax.device_put(jnp.broadcast_to(jnp.arange(shape[1], dtype=jnp.int32), shape), positions.sharding)

    def start(name: str, has_gradient: bool) -> Any:
        strategy = get_strategy(name)
        function, _ = block_function("llama3-8b", shape, plan=strategy.plan, layout=layout)

        def stack(weights: Any, x: Any) -> Any:
            for own in weights:
                x = function(own, x, tokens)
            return x

        stack = strategy.rewritten(stack)

        def gradient(weights: Any, x: Any) -> Any:
            y, pullback = jax.vjp(stack, weights, x)
            return y, pullback(y)

        out = (placed[1], placed) if has_gradient else placed[1]
        options = dict(strategy.compiler_options)
        step = jax.jit(gradient if has_gradient else stack, out_shardings=out, compiler_options=options)
        return partial(step.lower(weights, rows).compile(), weights, rows)

    row: dict[str, Any] = {"layers": count, "shape": shape}
    kinds = {"forward": False, "gradient": True}
    starts = {f"{kind}, {name}": partial(start, name, has) for kind, has in kinds.items() for name in names}
    calls = made(starts, row)
    norm = jax.jit(lambda a, b: jnp.linalg.norm((a - b).astype(jnp.float32)) / jnp.linalg.norm(b.astype(jnp.float32)))
    for kind in kinds:
        own = [name for name in calls if name.startswith(kind)]
        expected = jax.tree.leaves(calls[own[0]]())
        for name in own[1:]:
            errors = [float(norm(a, b)) for a, b in zip(jax.tree.leaves(calls[name]()), expected, strict=True)]
            row[f"{name}: difference"] = round(max(errors), 4)
            assert max(errors) < 0.1, (name, errors)
        del expected
    return row | microseconds(calls, args.rounds, 4)


FSDP: dict[str, dict[str, Any] | None] = {
    "weights whole, no sums": None,
    "fsdp": {},
    "fsdp, no latency hiding": {"xla_gpu_enable_latency_hiding_scheduler": False},
    "fsdp, nothing combined": {
        "xla_gpu_all_gather_combine_threshold_bytes": 0,
        "xla_gpu_reduce_scatter_combine_threshold_bytes": 0,
    },
}
"""Options of XLA by name; None for weights that every device has."""


def fsdp(mesh: Mesh, args: Any) -> dict[str, Any]:
    """Times the gradient of MLPs."""
    rows, features, hidden, count = map(int, args.mlp.split("x"))
    x = drawn(mesh, (rows, features), P(AXIS), args.seed)
    sizes = ((features, hidden), (hidden, features))
    cut = [[drawn(mesh, size, P(AXIS), args.seed + i, size[0] ** -0.5) for size in sizes] for i in range(count)]
    whole = jax.jit(lambda tree: tree, out_shardings=NamedSharding(mesh, P()))(cut)

    def stack(weights: Any, x: jax.Array) -> jax.Array:
        for up, down in weights:
            x = x + jax.nn.gelu(x @ up) @ down
        return x

    def gradient(weights: Any, x: jax.Array) -> Any:
        y, pullback = jax.vjp(stack, weights, x)
        return y, pullback(x)

    places = jax.tree.map(lambda each: each.sharding, (x, (cut, x)))

    def start(options: dict[str, Any] | None) -> Any:
        if options is None:
            specs = (P(), P(AXIS)), (P(AXIS), (P(), P(AXIS)))
            mapped = jax.shard_map(gradient, mesh=mesh, in_specs=specs[0], out_specs=specs[1], check_vma=False)
            return partial(jax.jit(mapped).lower(whole, x).compile(), whole, x)
        step = jax.jit(gradient, out_shardings=places, compiler_options=options)
        return partial(step.lower(cut, x).compile(), cut, x)

    row: dict[str, Any] = {"layers": count}
    calls = made({name: partial(start, options) for name, options in FSDP.items()}, row)
    row |= microseconds(calls, args.rounds, 4)
    for name in ("fsdp", "fsdp, no latency hiding"):
        row[f"{name}: us of NCCL, exposed"] = exposed(calls[name], 3)
    return row


def exposed(call: Callable[[], Any], repeats: int) -> list[tuple[str, float, float]]:
    """Returns the name of each of NCCL's kernels on the first GPU, its time a call and the part that nothing hides."""
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, create_perfetto_trace=False):
            jax.block_until_ready([call() for _ in range(repeats)])
        (path,) = Path(folder).rglob("*.trace.json.gz")
        events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    names = {each["pid"]: each["args"]["name"] for each in events if each.get("name") == "process_name"}
    first = min(pid for pid, name in names.items() if "GPU" in name)
    streams = {
        each["tid"] for each in events
        if each.get("name") == "thread_name" and each["pid"] == first and "Stream" in each["args"]["name"]
    }  # fmt: skip
    spans: dict[str, list[tuple[float, float]]] = {}
    for each in events:
        if each.get("ph") == "X" and each["pid"] == first and each["tid"] in streams:
            name = each["name"].split("(")[0] if each["name"].startswith("nccl") else ""
            spans.setdefault(name, []).append((each["ts"], each["ts"] + each["dur"]))
    busy = sorted(spans.pop("", []))
    found = []
    for name, own in spans.items():
        hidden = sum(max(0.0, min(a[1], b[1]) - max(a[0], b[0])) for a in own for b in busy)
        total = sum(end - begin for begin, end in own)
        found.append((name, round(total / repeats, 1), round((total - hidden) / repeats, 1)))
    return found


def main() -> None:
    """Times the kinds that were asked for, and writes the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path)
    parser.add_argument("--kinds", default="gather,scatter,repeat,block,fsdp")
    parser.add_argument("--sizes", default="16384x4096x7168,8192x4096x3584", help="rows, features, outputs of a device")
    parser.add_argument("--mlp", default="16384x4096x14336x4", help="rows, features, hidden features, layers of fsdp")
    parser.add_argument("--shape", default="4x4096x2", help="batch, tokens and layers of the block")
    parser.add_argument("--strategies", default="xla_cudnn,best,pallas_overlap")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=1000, help="of repeat")
    parser.add_argument("--seed", type=int, default=time.time_ns() % 10**6)
    args = parser.parse_args()
    mesh, found, started = Mesh(np.array(jax.devices()), (AXIS,)), [], time.time()
    products = [tuple(map(int, size.split("x"))) for size in args.sizes.split(",")]
    for kind in args.kinds.split(","):
        for size in products if kind in MANUAL else products[:1]:
            rows, features, outputs = size
            own = size if kind != "scatter" else (rows, outputs, features)
            if kind == "fsdp":
                row = fsdp(mesh, args)
            elif kind == "block":
                row = layers(args.strategies.split(","), args)
            else:
                row = repeated(mesh, own, args) if kind == "repeat" else timed_products(mesh, kind, own, args)
            found.append({"kind": kind, "size": own, "devices": mesh.size, **row})
            print(f"{kind} {own} on {mesh.size}, {time.time() - started:.0f} s", flush=True)
            for name, value in row.items():
                print(f"  {name:50s} {value}", flush=True)
            if args.output:
                args.output.write_text(json.dumps({"device": jax.devices()[0].device_kind, "rows": found}, indent=1))


if __name__ == "__main__":
    main()
