"""Integer weights in registers: their loads, their conversion to 16 bits, and the packed order of int8.

Packed integers are sign and magnitude, in the order in which the tensor cores' lanes hold them. Of every 16 values
along the depth, a lane multiplies two pairs that are eight apart. The packed order puts a lane's four values into one
32-bit word, so that lanes exchange nothing. A 7-bit magnitude is already a subnormal 16-bit number. A mask extracts the
first pair from a word; a byte swap and the mask extract the second pair. Multiplying by a power of two makes the values
normal numbers. Two values that share 16 bits store each other's sign, so that after the mask each sign bit is in front
of its own magnitude.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.typing import DTypeLike
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm

from pallas_kernels.primitives.platform import is_interpreted

SPAN = 16
"""The number of consecutive values along the depth that packing reorders."""
_SIGN = 128
_SHAPE = (2, 4, 2)
"""The axes of those 16 values: pair, lane, member of the pair."""
FORMS = {"bfloat16": ("bf16x2", 0x7F00, 2.0**-6), "float16": ("f16x2", 0x7800, 2.0**-9)}
"""For each dtype: the instruction's type suffix, the power of two as bits, and the widened value of 1."""


def pack(values: jax.Array) -> jax.Array:
    """Packs integers from -127 to 127, (..., depth) with depth a multiple of 16, as uint8 in the lanes' order."""
    pairs = jnp.moveaxis(_grouped(values.astype(jnp.int8), _SHAPE), -3, -1)
    signs = jnp.where(jnp.flip(pairs, -1) < 0, jnp.uint8(_SIGN), jnp.uint8(0))
    return (jnp.abs(pairs).astype(jnp.uint8) | signs).reshape(values.shape)


def unpack(values: jax.Array) -> jax.Array:
    """Restores the int8 integers from the result of `pack`."""
    pairs = _grouped(values, (*_SHAPE[1:], _SHAPE[0]))
    magnitudes = (pairs & jnp.uint8(_SIGN - 1)).astype(jnp.int8)
    signed = jnp.where(jnp.flip(pairs, -1) < _SIGN, magnitudes, -magnitudes)
    return jnp.moveaxis(signed, -1, -3).reshape(values.shape)


def is_packed_dtype(dtype: DTypeLike) -> bool:
    """Whether weights of this dtype are packed; uint8 is used for packed weights only."""
    return jnp.dtype(dtype) == jnp.uint8


def unit(integers: DTypeLike, dtype: jnp.dtype) -> float:
    """Returns the value that `widened` gives for 1, a power of two."""
    return FORMS[dtype.name][2] if is_packed_dtype(integers) else 1.0


def load_integers(ref: Any) -> jax.Array:
    """Loads integers (64 columns, depth) to registers, in a layout with wide loads."""
    layouts = {"uint8": plgpu.Layout.WGMMA_8BIT, "int8": plgpu.Layout.WGMMA_UPCAST_2X}
    return plgpu.load(ref, layout=layouts.get(ref.dtype.name, plgpu.Layout.WGMMA_UPCAST_4X))


def widened(values: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Returns loaded integers times `unit`, in a 16-bit dtype and their original order, as a product's left operand."""
    if not is_packed_dtype(values.dtype):
        # By way of bfloat16, for which Mosaic GPU has a fast conversion.
        return plgpu.layout_cast(values, plgpu.Layout.WGMMA).astype(jnp.bfloat16).astype(dtype)
    if is_interpreted():
        return (unpack(values).astype(jnp.float32) * FORMS[dtype.name][2]).astype(dtype)
    kind, factor, _ = FORMS[dtype.name]
    result = plgpu.ShapeDtypeStruct(values.shape, dtype, layout=plgpu.Layout.WGMMA)
    halves = (
        "and.b32 t, $1, 0x807f807f;",
        "prmt.b32 t, $1, 0, 0x2301; and.b32 t, t, 0x807f807f;",
    )

    @plgpu.inline_mgpu(arg_types=(plgpu.Layout.WGMMA_8BIT,), return_type=result)
    def widen(_, array):
        i32 = ir.IntegerType.get_signless(32)
        element = ir.BF16Type.get() if dtype == jnp.bfloat16 else ir.F16Type.get()
        pair = ir.VectorType.get((2,), element)
        layout = plgpu.Layout.WGMMA.to_mgpu()
        registers = np.empty(layout.registers_shape(values.shape), dtype=object)
        words = array.registers
        for place in np.ndindex(*words.shape):
            word = llvm.bitcast(i32, words[place])
            for half, asm in enumerate(halves):
                asm = f"{{ .reg .b32 t; {asm} mul.{kind} $0, t, $2; }}"
                bits = llvm.inline_asm(i32, [word, mgpu.c(factor * 0x10001, i32)], asm, "=r,r,r")
                registers[0, 2 * place[1] + half, *place[2:]] = llvm.bitcast(pair, bits)
        return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)

    return widen(values)  # pyright: ignore[reportCallIssue]: JAX gives the first argument


def _grouped(values: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    return values.reshape(*values.shape[:-1], values.shape[-1] // SPAN, *shape)
