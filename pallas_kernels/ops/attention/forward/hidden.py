"""Numbers that the compiler does not see through."""

from __future__ import annotations

import jax
import jax.experimental.mosaic.gpu as mgpu
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm

from pallas_kernels.primitives.platform import is_interpreted


def hidden_zero() -> jax.Array:
    """A scalar zero, int32, which LLVM takes for any number."""
    if is_interpreted():
        return jnp.int32(0)
    result = plgpu.ShapeDtypeStruct((), jnp.int32, layout=plgpu.Layout.WG_SPLAT)

    @plgpu.inline_mgpu(return_type=result)
    def zero(_):
        value = llvm.inline_asm(ir.IntegerType.get_signless(32), [], "mov.u32 $0, 0;", "=r")
        return mgpu.FragmentedArray.splat(value, (), is_signed=True)

    return zero()  # pyright: ignore[reportCallIssue]: JAX gives the first argument
