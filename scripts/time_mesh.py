"""Times the gradient of llama3-8b layers on the attached GPUs, under three shardings, by XLA and by the operations.

    python scripts/time_mesh.py [--layers 2] [--modes fsdp tp dp] [--tiny]

Of each sharding: plain XLA, XLA with cuDNN's attention, and the operations; a batch of four sequences of 4096 tokens.
Programs take turns; medians of the wall clock of one call, and the largest distance of a gradient from that of plain
XLA on one GPU. --tiny: small sizes, to rehearse on devices of the CPU, where nothing runs by cuDNN; they are as many as
XLA_FLAGS=--xla_force_host_platform_device_count=4 says.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the machine with the GPUs need not have the package

from pallas_kernels import Norm, Rope, attention, gated_linear, linear, qkv_projection, rms_norm

REAL = {"batch": 4, "tokens": 4096, "width": 4096, "hidden": 14336, "heads": 32, "key_heads": 8, "size": 128}
TINY = {"batch": 4, "tokens": 128, "width": 256, "hidden": 512, "heads": 4, "key_heads": 4, "size": 64}
MODES = {
    "dp": (P("d"), P(None, None), P(None, None)),
    "fsdp": (P("d"), P("d", None), P("d", None)),
    "tp": (P(), P(None, "d"), P("d", None)),
}
"""Shardings of the rows, of weights whose outputs tensor parallelism cuts, and of those whose features it cuts."""
BY_OUTPUTS, BY_FEATURES = ("query", "key", "value", "gate", "up"), ("output", "down")


def shapes(sizes: dict[str, int]) -> dict[str, tuple[int, ...]]:
    """The shapes of a layer's weights."""
    width, hidden = sizes["width"], sizes["hidden"]
    heads, key_heads = (sizes[name] * sizes["size"] for name in ("heads", "key_heads"))
    return {
        "query": (width, heads), "key": (width, key_heads), "value": (width, key_heads), "output": (heads, width),
        "gate": (width, hidden), "up": (width, hidden), "down": (hidden, width), "norm": (width,), "mlp_norm": (width,),
    }  # fmt: skip


def layer(x: jax.Array, weights: dict[str, jax.Array], *, size: int, kind: str) -> jax.Array:
    """One layer: "xla", "cudnn" (attention alone) or "ours"."""
    by: dict[str, Any] = {"implementation": None if kind == "ours" else "xla"}
    batch, tokens, _ = x.shape
    norm, rope = Norm(scale=weights["norm"], epsilon=1e-5), Rope(positions=jnp.arange(tokens), theta=5e5)
    products = [weights[name] for name in BY_OUTPUTS[:3]]
    query, key, value = qkv_projection(x, *products, head_size=size, norm=norm, rope=rope, **by)
    if kind == "cudnn":
        mixed = jax.nn.dot_product_attention(query, key, value, is_causal=True, implementation="cudnn")
    else:
        mixed = attention(query, key, value, is_causal=True, **by)
    x = linear(mixed.reshape(batch, tokens, -1), weights["output"], residual=x, **by)
    normed = rms_norm(x, weights["mlp_norm"], epsilon=1e-5, **by)
    return linear(gated_linear(normed, weights["gate"], weights["up"], **by), weights["down"], residual=x, **by)


def gradients(layers: list[dict[str, jax.Array]], x: jax.Array, cotangent: jax.Array, *, size: int, kind: str) -> Any:
    """The gradients of all weights and of x."""

    def stack(layers: list[dict[str, jax.Array]], x: jax.Array) -> jax.Array:
        for weights in layers:
            x = layer(x, weights, size=size, kind=kind)
        return x

    return jax.vjp(stack, layers, x)[1](cotangent)


def compiled(kind: str, mode: str, devices: list[Any], arguments: Any, size: int) -> tuple[Callable[..., Any], Any]:
    """The program of a sharding over these devices, and its arguments there."""
    rows, by_outputs, by_features = MODES[mode]
    mesh = jax.make_mesh((len(devices),), ("d",), axis_types=(AxisType.Auto,), devices=devices)
    specs = {**dict.fromkeys(BY_OUTPUTS, by_outputs), **dict.fromkeys(BY_FEATURES, by_features)}
    of_layer = {name: NamedSharding(mesh, specs.get(name, P())) for name in arguments[0][0]}
    shardings = ([of_layer] * len(arguments[0]), *[NamedSharding(mesh, rows)] * 2)
    step = jax.jit(partial(gradients, size=size, kind=kind), in_shardings=shardings, out_shardings=shardings[:2])
    return step.lower(*arguments).compile(), jax.device_put(arguments, shardings)


def distance(got: Any, expected: Any) -> float:
    """The largest distance of an array from what is expected, relative to its norm."""
    pairs = zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True)
    wide = ((np.float32(a), np.float32(b)) for a, b in pairs)
    return max(float(np.linalg.norm(a - b) / np.linalg.norm(b)) for a, b in wide)


def main() -> None:
    """Prints a line a sharding."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--rounds", type=int, default=12)
    options = parser.parse_args()
    sizes, rng = TINY if options.tiny else REAL, np.random.default_rng(0)

    def drawn(shape: tuple[int, ...], deviation: float) -> jax.Array:
        return jnp.asarray(rng.standard_normal(shape, np.float32) * deviation, jnp.bfloat16)

    def weights() -> dict[str, jax.Array]:
        return {
            name: jnp.ones(shape, jnp.bfloat16) if len(shape) == 1 else drawn(shape, shape[0] ** -0.5)
            for name, shape in shapes(sizes).items()
        }

    rows = (sizes["batch"], sizes["tokens"], sizes["width"])
    arguments = jax.device_get(([weights() for _ in range(options.layers)], drawn(rows, 1.0), drawn(rows, 1.0)))
    devices, kinds = jax.devices(), ("xla", "ours") if options.tiny else ("xla", "cudnn", "ours")
    print(f"{len(devices)} x {devices[0].device_kind}, {options.layers} layers, {sizes}", flush=True)
    step, placed = compiled("xla", "dp", devices[:1], arguments, sizes["size"])
    expected = jax.device_get(step(*placed))
    for mode in options.modes:
        programs = {kind: compiled(kind, mode, devices, arguments, sizes["size"]) for kind in kinds}
        times: dict[str, list[float]] = {kind: [] for kind in kinds}
        far = {kind: distance(jax.device_get(step(*placed)), expected) for kind, (step, placed) in programs.items()}
        for _ in range(options.rounds + 3):
            for kind, (step, placed) in programs.items():
                start = time.perf_counter()
                jax.block_until_ready(step(*placed))
                times[kind].append((time.perf_counter() - start) * 1e3)
        print(mode, *(f"{kind} {median(times[kind][3:]):.2f} ms, {far[kind]:.1e} off;" for kind in kinds), flush=True)


if __name__ == "__main__":
    main()
