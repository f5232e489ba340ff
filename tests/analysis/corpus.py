"""Small programs that make XLA:GPU emit every sort of launch, compiled for an H200 with no GPU in the machine.

`python corpus.py FOLDER` writes XLA's dump of each program to FOLDER/<name>. All compile in one process (some
twenty seconds), since starting one for each would take most of the time.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Program:
    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    options: dict[str, Any] = field(default_factory=dict)


def programs() -> dict[str, Program]:
    """The single-device programs by name; JAX is imported on call."""
    import jax
    import jax.experimental.mosaic.gpu  # brings the symbols that Mosaic kernels link to
    import jax.numpy as jnp
    from jax import lax
    from jax.experimental.pallas import mosaic_gpu as plgpu
    from odd_programs import odd_programs

    bf16, f32, s32 = jnp.bfloat16, jnp.float32, jnp.int32
    made: dict[str, Program] = {}

    def shape(*sizes: int, dtype: Any = f32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(sizes, dtype)

    def add(*arguments: Any, **options: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        def register(function: Callable[..., Any]) -> Callable[..., Any]:
            made[function.__name__] = Program(function=function, arguments=arguments, options=options)
            return function

        return register

    @add(shape(64, 64))
    def scan(x):
        def body(carry, step):
            return jnp.tanh(carry @ carry) + step, carry.sum()

        return lax.scan(body, x, jnp.arange(5.0))

    @add(shape(32, 256, 64))
    def scan_outputs(x):
        return lax.scan(lambda carry, row: (carry + row, jnp.tanh(carry * row)), jnp.zeros((256, 64)), x)

    @add(shape(128, 128))
    def nested_loops(x):
        def inner(_, carry):
            return jnp.sin(carry @ carry)

        return lax.fori_loop(0, 3, lambda _, carry: lax.fori_loop(0, 4, inner, carry), x)

    @add(shape(64, 64))
    def while_dynamic(x):
        return lax.while_loop(lambda carry: carry.sum() < 10.0, lambda carry: jnp.sin(carry) * 2, x)

    @add(shape(), shape(64, 64))
    def conditional(flag, x):
        return lax.cond(flag > 0, lambda x: jnp.sin(x) @ x, lambda x: jnp.cumsum(x, 0), x)

    @add(shape(dtype=s32), shape(64, 64))
    def switch_in_loop(count, x):
        branches = [jnp.sin, lambda x: x @ x, jnp.cos]
        return lax.fori_loop(0, count, lambda step, carry: lax.switch(step, branches, carry), x)

    @add(shape(4096, 256))
    def sort(x):
        return jnp.sort(x, axis=0), jnp.argsort(x, axis=1)

    @add(shape(1 << 16))
    def sort_passes(x):
        return jnp.sort(x)

    @add(shape(1000000))
    def top_k(x):
        return lax.top_k(x, 5)

    @add(shape(8, 3, 224, 224), shape(64, 3, 7, 7))
    def convolution(x, weights):
        return jax.nn.relu(lax.conv_general_dilated(x, weights, (2, 2), "SAME"))

    @add(
        shape(512, 1024, dtype=bf16),
        shape(1024, 2048, dtype=bf16),
        shape(2048, dtype=bf16),
        xla_gpu_enable_triton_gemm=False,
    )
    def cublas_bias_gelu(x, weights, bias):
        return jax.nn.gelu(x @ weights + bias)

    @add(shape(8, 512, 1024), shape(8, 1024, 64), xla_gpu_enable_triton_gemm=False)
    def cublas_batch(x, y):
        return x @ y

    @add(shape(2, 512, 8, 64, dtype=bf16), shape(2, 512, 2, 64, dtype=bf16), shape(2, 512, 2, 64, dtype=bf16))
    def cudnn_attention(query, key, value):
        def attend(query, key, value):
            return jax.nn.dot_product_attention(query, key, value, is_causal=True, implementation="cudnn")

        out, pullback = jax.vjp(attend, query, key, value)
        return out, pullback(out)

    @add(shape(128, 128))
    def mosaic(x):
        def body(x_ref, out_ref):
            row = lax.axis_index("block") * 64
            out_ref[pl_ds(row, 64)] = x_ref[pl_ds(row, 64)] + 1.0

        from jax.experimental.pallas import ds as pl_ds

        out_type = jax.ShapeDtypeStruct((128, 128), f32)
        return plgpu.kernel(body, out_type=out_type, grid=(2,), grid_names=("block",))(jnp.sin(x)) * 2

    @add(shape(256, 1024), shape(64))
    def copies(x, unused):
        return x, x.T, jnp.zeros((1000, 1000)), x + 1

    @add(shape(1024, 128), shape(64, dtype=s32), shape(64, 128))
    def gather_scatter(x, rows, updates):
        return x[rows], x.at[rows].add(updates)

    @add(shape(16, 1024, 128), shape(1, 1024, 128), shape(dtype=s32))
    def update_slice(cache, update, index):
        return lax.dynamic_update_slice(cache, update, (index, 0, 0))

    @add(shape(16, 1024, 128), shape(dtype=s32))
    def read_slice(cache, index):
        return lax.dynamic_index_in_dim(cache, index, 0) * 2

    @add(shape(1024, 1024))
    def softmax(x):
        return jax.nn.softmax(x, -1)

    @add(shape(65536, 32))
    def column_sums(x):
        return x.sum(0), jnp.argmax(x, 0)

    @add(shape(1024, 1024), shape(1024))
    def many_results(x, bias):
        y = jnp.exp(x + bias)
        return y, y.sum(0), y.sum(1)

    @add(shape(1024, 1024), shape(1024, 1024))
    def concatenate(x, y):
        return jnp.concatenate([jnp.sin(x), y.T], 0)

    @add(shape(256, 256))
    def fft(x):
        return jnp.fft.rfft(x)

    @add(shape(64, 64))
    def linear_algebra(x):
        return jnp.linalg.cholesky(x @ x.T), jax.scipy.linalg.solve_triangular(x, x)

    @add(shape(2, dtype=jnp.uint32))
    def random_normal(key):
        return jax.random.normal(jax.random.wrap_key_data(key), (1024, 1024))

    @add(shape(1024, 1024, dtype=jnp.int8), shape(1024, 1024, dtype=jnp.int8))
    def int8_product(x, y):
        return lax.dot(x, y, preferred_element_type=s32)

    @add(shape(1024, 1024, dtype=jnp.int4))
    def int4(x):
        return x.astype(bf16) * 2

    @add(*(shape(*sizes, dtype=bf16) for sizes in ((2, 512, 256), (256,), (256, 896), (896, 256))))
    def mlp_gradient(x, scale, up, down):
        def mlp(x, scale, up, down):
            with jax.named_scope("norm"):
                wide = x.astype(f32)
                wide = wide * lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + 1e-6) * scale
            with jax.named_scope("mlp"):
                return x + jax.nn.silu(wide.astype(x.dtype) @ up) @ down

        out, pullback = jax.vjp(mlp, x, scale, up, down)
        return pullback(out)

    parts = {name: Program(function=part, arguments=given) for name, (part, given) in odd_programs().items()}
    return made | parts


def write_dumps(folder: Path) -> None:
    """Compile every program and write its dump."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax import lax
    from jax._src.cudnn import fused_attention_stablehlo as cudnn
    from jax.experimental import topologies
    from jax.sharding import AbstractDevice, AbstractMesh, AxisType, Mesh, SingleDeviceSharding
    from jax.sharding import PartitionSpec as P

    from hlo_analysis.targets import load_target

    # What lowering asks of cuDNN and the GPU, answered for an H200.
    cudnn.check_cudnn_version = lambda *_, **__: 91000
    cudnn.check_compute_capability = lambda *_, **__: None
    cudnn.is_cuda_compute_capability_equal = lambda *_, **__: False
    config = load_target("h200").config_text

    def options(name: str, **extra: Any) -> dict[str, Any]:
        return {
            "xla_dump_to": str(folder / name),
            "xla_dump_hlo_as_text": True,
            "xla_dump_hlo_pass_re": "priority-fusion|multi_output_fusion|rename_fusions",
            "xla_gpu_collect_cost_model_stats": True,
            **extra,
        }

    device = topologies.get_topology_desc(platform="cuda", topology="1x1x1", target_config=config).devices[0]
    one = SingleDeviceSharding(device)
    described = AbstractDevice(device_kind=device.device_kind, num_cores=132, platform="gpu")
    mesh = AbstractMesh((1,), ("_",), axis_types=(AxisType.Auto,), abstract_device=described)
    for name, program in programs().items():
        with jax.sharding.use_abstract_mesh(mesh):
            jitted = jax.jit(program.function, in_shardings=one, out_shardings=one, keep_unused=True)
            lowered = jitted.trace(*program.arguments).lower(lowering_platforms=("cuda",))
        lowered.compile(compiler_options=options(name, **program.options))

    devices = topologies.get_topology_desc(platform="cuda", topology="1x4x1", target_config=config).devices
    ring = Mesh(np.array(devices), ("x",))

    def collectives(x, weights):
        y = lax.psum(x @ weights, "x")
        turned = lax.ppermute(x, "x", [(step, (step + 1) % 4) for step in range(4)])
        scattered = lax.psum_scatter(jnp.cos(x), "x", tiled=True)
        return y, lax.all_gather(jnp.sin(y), "x"), scattered, turned, lax.all_to_all(x, "x", 0, 0, tiled=True)

    out_specs = (P(), P(None), P("x"), P("x"), P("x"))
    mapped = jax.shard_map(collectives, mesh=ring, in_specs=(P("x"), P(None)), out_specs=out_specs, check_vma=False)
    arguments = (jax.ShapeDtypeStruct((4096, 512), jnp.float32), jax.ShapeDtypeStruct((512, 512), jnp.float32))
    lowered = jax.jit(mapped).trace(*arguments).lower(lowering_platforms=("cuda",))
    lowered.compile(compiler_options=options("collectives"))


if __name__ == "__main__":
    os.environ["JAX_PLATFORMS"] = "cpu"
    write_dumps(Path(sys.argv[1]))
