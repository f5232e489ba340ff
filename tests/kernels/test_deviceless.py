"""Every kernel of the registry, compiled to H200 machine code with no GPU: nothing spills, no product waits unasked,
lanes agree on sums."""

from __future__ import annotations

import importlib.util
import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, TimeoutError
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from typing import Any

import compile_deviceless
import jax
import jax.experimental.mosaic.gpu as mgpu
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import pytest
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import nvvm

from pallas_kernels import REGISTRY
from pallas_kernels.ops.norms.forward import norm_forward
from pallas_kernels.ops.norms.norm import StaticNorm

SECONDS = 550
"""That a part of an operation's calls may take."""

PARTS = {"attention": 4}
"""Of operations' calls, that are compiled apart: other processes may take the next one."""

PRODUCTS = (
    *("linear", "gated_linear", "norm_linear", "qkv_projection", "linear_residual_norm", "quantized_linear"),
    *("lora_linear", "linear_cross_entropy", "attention", "decode_attention", "dot_interaction"),
    *("grouped_linear", "grouped_gated_linear"),
)
"""Operations whose kernels multiply matrices, by wgmma."""

BACKWARD_BY_XLA = ("lora_linear", "quantized_linear")
"""Operations whose gradients have no kernel of ours by default."""
FORWARD_BY_XLA = ("embedding",)
"""Operations of which only the gradient has kernels."""

TILED = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("jax_plugins.xla_cuda13") is None, reason="needs the extra 'deviceless'"
    ),
]


PTXAS = """\
ptxas info    : (C7514) Potential Performance Loss: wgmma.mma_async instructions are serialized due to non \
wgmma instructions reading accumulator registers of  a wgmma between start and end of the pipeline stage in the \
function 'linear'
ptxas info    : (C7512) Potential Performance Loss: wgmma.mma_async instructions are serialized due to insufficient \
register resources for the function 'wide'
ptxas info    : (C7519) warpgroup.arrive is injected in around line 94 by compiler to allow use of registers in GMMA \
in function 'linear'
ptxas info    : (C7517) warpgroup.wait is injected in around line 112 by compiler to allow use of registers defined by \
GMMA in function 'linear'
"""


def test_what_waits_is_read_from_what_ptxas_prints():
    assert compile_deviceless.waits(PTXAS) == (
        "linear: wgmma.mma_async instructions are serialized due to non wgmma instructions reading accumulator "
        "registers of a wgmma between start and end of the pipeline stage",
        "wide: wgmma.mma_async instructions are serialized due to insufficient register resources",
        "linear: warpgroup.wait is injected to allow use of registers defined by GMMA",
    )


class Compiler:
    """A process of its own for all operations: Mosaic GPU reads from the environment whether to print what ptxas says,
    and starting JAX and the CUDA plugin for each operation would take a minute in all."""

    def __init__(self) -> None:
        self.executor: ProcessPoolExecutor | None = None

    def __call__(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """What a function of a module gives there; a process that died or got stuck is not used again."""
        if self.executor is None:
            context = multiprocessing.get_context("spawn")
            self.executor = ProcessPoolExecutor(1, mp_context=context, initializer=compile_deviceless.prepare)
        try:
            return self.executor.submit(function, *arguments).result(SECONDS)
        except (BrokenProcessPool, TimeoutError):
            self.end()
            raise

    def end(self) -> None:
        """Ends the process, whatever it does."""
        if self.executor is not None:
            for process in multiprocessing.active_children():
                process.kill()
            self.executor.shutdown()
        self.executor = None


@pytest.fixture(scope="module")
def compiler():
    compiler = Compiler()
    yield compiler
    compiler.end()


@pytest.mark.parametrize(
    ("op", "part"),
    [pytest.param(op, i, id=f"{op}-{i}" if op in PARTS else op) for op in REGISTRY for i in range(PARTS.get(op, 1))],
)
def test_kernels_compile_well(op, part, compiler):
    kernels = compiler(compile_deviceless.recorded_operation, op, part, PARTS.get(op, 1))
    has_backward = REGISTRY[op].differentiable and op not in BACKWARD_BY_XLA
    phases = {"forward": op not in FORWARD_BY_XLA, "backward": has_backward}
    assert {kernel["phase"] for kernel in kernels} == {phase for phase, has_kernels in phases.items() if has_kernels}
    assert all(kernel["registers"] > 0 for kernel in kernels)
    assert any(kernel["wgmmas"] for kernel in kernels) == (op in PRODUCTS)
    assert not [k for k in kernels if k["spill_store_bytes"] or k["spill_load_bytes"]]
    waits = [f"{op} {k['spec']}, {k['phase']}, {wait}" for k in kernels for wait in k["waits"]]
    assert not waits, "ptxas makes products wait for each other:\n" + "\n".join(waits)
    # What all lanes should know alike they store to one word: sanitizers call it a race, and no order decides it.
    assert not [k for k in kernels if k["fused_sums"]]


def normed(name, x):
    return norm_forward(StaticNorm(name=name, epsilon=1e-6), x, with_statistics=True)


@pytest.mark.parametrize(("name", "shape"), [("layer_norm", (512, 256)), ("rms_norm", (300, 16384))])
def test_norms_that_save_statistics_compile_well(name, shape, compiler):
    structs = jax.ShapeDtypeStruct(shape, "bfloat16")
    (kernel,) = compiler(compile_deviceless.compile_kernels, partial(normed, name), structs)
    assert (kernel["spill_store_bytes"], kernel["fused_sums"]) == (0, 0)


@pytest.mark.parametrize("columns", [2176, 9592])
def test_ragged_rows_have_wide_accesses(columns, compiler):
    """LLVM cuts an access into those of one value if it cannot prove that it is aligned."""
    for accesses in compiler(compile_deviceless.elementwise_accesses, 6272, columns):
        assert accesses and sum(accesses.values()) <= 16  # a cut access counts eight times


def planted(under_way: int | None) -> jax.Array:
    """Sums of products in a loop which doubles the sum, while as many products may still be under way (None: any)."""

    def planted(out, a, b):
        @plgpu.inline_mgpu(
            arg_types=(plgpu.RefType(TILED), plgpu.RefType(TILED)),
            return_type=plgpu.ShapeDtypeStruct((64, 64), jnp.float32, layout=plgpu.Layout.WGMMA),
        )
        def doubled_sums(_, a, b):
            @mgpu.fori(mgpu.c(8, ir.IndexType.get()), mgpu.WGMMAAccumulator.zero(64, 64))
            def loop(_, sums):
                sums = mgpu.wgmma(sums, a, b)
                nvvm.wgmma_commit_group_sync_aligned()
                if under_way is not None:
                    nvvm.wgmma_wait_group_sync_aligned(under_way)
                return mgpu.WGMMAAccumulator.from_registers(sums.value * 2.0)

            nvvm.wgmma_wait_group_sync_aligned(0)
            return loop.result.value

        out[...] = doubled_sums(a, b)

    tile = plgpu.SMEM((64, 64), jnp.bfloat16, transforms=TILED)
    return plgpu.kernel(planted, out_type=jax.ShapeDtypeStruct((64, 64), jnp.float32), scratch_types=[tile, tile])()


@pytest.mark.parametrize(
    ("under_way", "found"),
    [
        (0, None),
        (1, "are serialized due to non wgmma instructions reading accumulator registers"),
        (None, "warpgroup.wait is injected to allow use of registers defined by GMMA"),
    ],
)
def test_products_that_wait_unasked_are_found(under_way, found, compiler):
    (kernel,) = compiler(compile_deviceless.compile_kernels, partial(planted, under_way))
    assert (kernel["wgmmas"], kernel["spill_store_bytes"]) == (4, 0)
    if found is None:
        assert kernel["waits"] == ()
    else:
        (wait,) = kernel["waits"]
        assert wait.startswith("planted_mosaic_gpu_kernel: ")
        assert found in wait
