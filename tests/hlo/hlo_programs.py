"""Programs that make XLA print every construct of HLO text, and a script that compiles them and keeps the text.

    python hlo_programs.py OUT cpu               # four CPU devices
    python hlo_programs.py OUT cuda TARGET_FILE  # four GPUs of a target description, without a GPU

Each program writes `OUT/<name>/`: every stage of its passes, as XLA dumps them. A script because platforms, devices and
dumping are settled once in a process, and because XLA may abort.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

Program = tuple[Callable[..., Any], tuple[jax.ShapeDtypeStruct, ...]]
DEVICES = 4


def arg(*shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def block(x, wq, wo, wg, wd):
    """A transformer-like block: norm, attention, residual, gated MLP."""

    def norm(x):
        y = x.astype(jnp.float32)
        return (y * jax.lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + 1e-6)).astype(x.dtype)

    batch, time, width = x.shape
    with jax.named_scope("block"):
        with jax.named_scope("attention"):
            q, k, v = jnp.split((norm(x) @ wq).reshape(batch, time, 12, -1), 3, axis=2)
            x = x + jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(batch, time, width) @ wo
        with jax.named_scope("mlp"):
            gate, up = jnp.split(norm(x) @ wg, 2, axis=-1)
            x = x + (jax.nn.silu(gate) * up) @ wd
    return x


BLOCK_ARGS = tuple(
    arg(*shape, dtype=jnp.bfloat16) for shape in ((2, 64, 128), (128, 384), (128, 128), (128, 512), (256, 128))
)


def block_grad(*args):
    return jax.grad(lambda *a: block(*a).astype(jnp.float32).sum(), argnums=(0, 1, 2, 3, 4))(*args)


def scan_grad(x, w):
    def layer(carry, weight):
        with jax.named_scope("layer"):
            carry = jax.checkpoint(lambda c: jnp.tanh(c @ weight))(carry)
        return carry, carry.sum()

    def loss(x, w):
        carry, sums = jax.lax.scan(layer, x, w)
        return carry.sum() + sums.sum()

    return jax.grad(loss, argnums=(0, 1))(x, w)


def while_loop(x):
    return jax.lax.while_loop(lambda c: (c[0] < 10) & (c[1].sum() < 1e6), lambda c: (c[0] + 1, c[1] * 2), (0, x))


def conditional(i, x):
    y = jax.lax.cond(x.sum() > 0, jnp.sin, lambda v: v + 1, x)
    return jax.lax.switch(i, [jnp.cos, lambda v: v * 2, lambda v: v[::-1]], y)


def sort(x, y):
    return jax.lax.sort((x, y), num_keys=1), jnp.argsort(-x), jax.lax.top_k(x, 3), jnp.median(x)


def convolution(x, w):
    y = jax.lax.conv_general_dilated(
        x, w, (2, 2), [(1, 2), (0, 1)], rhs_dilation=(2, 1), dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    return jax.lax.reduce_window(y, -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), [(0, 0), (1, 0), (0, 1), (0, 0)])


def convolution_grad(x, w):
    return jax.grad(lambda x, w: convolution(x, w).sum(), argnums=(0, 1))(x, w)


def linear_algebra(x):
    q, r = jnp.linalg.qr(x)
    return q, r, jnp.linalg.cholesky(x @ x.T + 10 * jnp.eye(8)), jnp.linalg.solve(x, x[0])


def narrow_types(a, b, c):
    low = (a.astype(jnp.int4) + jnp.int4(1)).astype(jnp.int8)
    fp8 = jnp.dot(b.astype(jnp.float8_e4m3fn), c.astype(jnp.float8_e4m3fn), preferred_element_type=jnp.float32)
    return low, fp8, b.astype(jnp.float8_e5m2), a.astype(jnp.uint4), a > 0, b.astype(jnp.float16), a.astype(jnp.uint16)


def int4_result(a):
    return a.astype(jnp.int4)


def tuples(x):
    return {"a": (x, x + 1, x * 2), "b": [x - 1, (x.sum(), x.max(), x.min())], "c": jnp.argmax(x, -1)}


def dynamic_slices(x, i, u):
    y = jax.lax.dynamic_update_slice(x, u, (i, 0))
    return jax.lax.dynamic_slice(y, (i, i), (2, 3)), y[i], y.at[i].add(1.0), y[jnp.array([1, 0, 3])], x[1:7:2, ::-1]


def complex_fft(x):
    y = jnp.fft.fft(x.astype(jnp.complex64))
    return jnp.fft.irfft(y), jnp.abs(y), jnp.conj(y) * (1 + 2j)


def random_bits(key):
    key = jax.random.wrap_key_data(key)
    return jax.random.normal(key, (8, 8)), jax.random.permutation(key, 8), jax.lax.rng_uniform(0.0, 1.0, (4,))


def constants(x):
    table = jnp.arange(4096.0).reshape(64, 64) ** 0.5
    grid = np.array([[1, 2], [3, 4]], np.int32)
    specials = np.array([np.nan, np.inf, -np.inf, -0.0, 1e-30, 3.4e38], np.float32)
    flags = np.array([True, False, True])
    return x @ table, x[0, :2].astype(jnp.int32) + grid, specials * x[0, 0], flags ^ (x[0, :3] > 0), np.uint8([7, 8])


def shapes(x):
    y = jnp.pad(x, ((1, 2), (0, 3)), constant_values=2.0)
    z = jnp.concatenate([x, x[:, ::-1]], axis=1)
    return (
        y,
        z.T.reshape(-1),
        jnp.tile(x, (2, 1)),
        jnp.cumsum(x, 0),
        jnp.clip(x, -1, 1),
        jnp.where(x > 0, x, 0),
        x.copy(),
    )


def barrier_and_precision(x):
    y = jax.lax.optimization_barrier((x, x * 2))
    return jax.lax.reduce_precision(y[0], 5, 10) + y[1] @ jnp.dot(x, x, precision="highest")


def donated(x, y):
    return x + y, y * 2


def second_order(x):
    return jax.grad(lambda x: jax.grad(lambda y: jnp.sin(y @ y).sum())(x).sum())(x)


PROGRAMS: dict[str, Program] = {
    "block": (block, BLOCK_ARGS),
    "block_grad": (block_grad, BLOCK_ARGS),
    "scan_grad": (scan_grad, (arg(4, 8), arg(3, 8, 8))),
    "while_loop": (while_loop, (arg(8, 8),)),
    "conditional": (conditional, (arg(dtype=jnp.int32), arg(8, 8))),
    "sort": (sort, (arg(64), arg(64, dtype=jnp.int32))),
    "convolution": (convolution, (arg(2, 16, 16, 4), arg(3, 3, 4, 8))),
    "convolution_grad": (convolution_grad, (arg(2, 16, 16, 4), arg(3, 3, 4, 8))),
    "linear_algebra": (linear_algebra, (arg(8, 8),)),
    "narrow_types": (narrow_types, (arg(16, 16, dtype=jnp.int8), arg(32, 32), arg(32, 32))),
    "int4_result": (int4_result, (arg(16, 16, dtype=jnp.int8),)),
    "tuples": (tuples, (arg(8, 8),)),
    "dynamic_slices": (dynamic_slices, (arg(8, 8), arg(dtype=jnp.int32), arg(2, 8))),
    "complex_fft": (complex_fft, (arg(4, 16),)),
    "random_bits": (random_bits, (arg(2, dtype=jnp.uint32),)),
    "constants": (constants, (arg(64, 64),)),
    "shapes": (shapes, (arg(8, 8),)),
    "barrier_and_precision": (barrier_and_precision, (arg(8, 8),)),
    "donated": (donated, (arg(8, 8), arg(8, 8))),
    "second_order": (second_order, (arg(8, 8),)),
}


def collectives(mesh: Mesh) -> Program:
    """Every collective, by shard_map, on a mesh of four devices."""

    def body(x):
        total = jax.lax.psum(x, "i")
        gathered = jax.lax.all_gather(x, "i", tiled=True)
        scattered = jax.lax.psum_scatter(gathered, "i", tiled=True)
        shifted = jax.lax.ppermute(x, "i", [(n, (n + 1) % DEVICES) for n in range(DEVICES)])
        exchanged = jax.lax.all_to_all(x.reshape(DEVICES, -1), "i", 0, 0)
        return total + scattered + shifted + exchanged.reshape(x.shape) * jax.lax.axis_index("i")

    return jax.shard_map(body, mesh=mesh, in_specs=P("i"), out_specs=P("i")), (arg(16, 8),)


def partitioned(mesh: Mesh) -> Program:
    """A product that the SPMD partitioner cuts up."""

    def program(x, w):
        x = jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P("i", None)))
        w = jax.lax.with_sharding_constraint(w, NamedSharding(mesh, P(None, "i")))
        return jax.lax.with_sharding_constraint(x @ w, NamedSharding(mesh, P(None, "i")))

    return program, (arg(16, 32), arg(32, 16))


def main(out: Path, platform: str, target: str | None) -> None:
    """Compile every program and keep all stages of its text."""
    if platform == "cuda":
        assert target is not None
        topology = topologies.get_topology_desc(
            platform="cuda", topology=f"1x1x{DEVICES}", target_config=Path(target).read_text()
        )
        devices = topology.devices
    else:
        jax.config.update("jax_num_cpu_devices", DEVICES)
        devices = jax.devices()
    mesh = Mesh(devices, ("i",))
    single = SingleDeviceSharding(devices[0])
    parallel = NamedSharding(mesh, P())
    cases = [(name, program, single) for name, program in PROGRAMS.items()]
    cases += [("collectives", collectives(mesh), parallel), ("partitioned", partitioned(mesh), parallel)]
    for name, (function, shapes), sharding in cases:
        donate = (0,) if name == "donated" else ()
        lowered = (
            jax.jit(function, in_shardings=sharding, donate_argnums=donate)
            .trace(*shapes)
            .lower(lowering_platforms=(platform,))
        )
        folder = out / name
        options = {
            "xla_dump_to": str(folder),
            "xla_dump_hlo_as_text": True,
            "xla_dump_hlo_pass_re": ".*" if name in ("block_grad", "partitioned") else "fusion|layout|copy",
        }
        try:
            lowered.compile(compiler_options=options)
        except Exception as error:  # the stages before the failure are text all the same
            print(f"{name}: {str(error)[:300]}", file=sys.stderr)


if __name__ == "__main__":
    assert os.environ.get("JAX_PLATFORMS") == "cpu"
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3] if len(sys.argv) > 3 else None)
