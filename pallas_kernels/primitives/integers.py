"""Integer weights in registers: packing int8, loading, and widening to 16 bits.

Packed int8 is a sign and a 7-bit magnitude. Of every 16 values along the depth, a lane of the tensor cores multiplies
two pairs that are eight apart; packing puts these four values into one 32-bit word, so that lanes exchange nothing.
`widened` takes three instructions a pair: it masks the word (for the second pair it swaps bytes first), which leaves
each magnitude as a subnormal 16-bit number, and multiplies by a power of two, which makes it a normal one. Each value
stores the sign of its neighbour in the same 16 bits, where the mask then finds it in front of the right magnitude.
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
"""Consecutive values along the depth that `pack` reorders among themselves."""
_SIGN = 128
_SHAPE = (2, 4, 2)
"""Those 16 values as (pair, lane, member of the pair)."""
FORMS = {"bfloat16": ("bf16x2", 0x7F00, 2.0**-6), "float16": ("f16x2", 0x7800, 2.0**-9)}
"""By dtype: the suffix of the PTX instruction, the bits of the power of two, and what a packed 1 widens to."""


def pack(values: jax.Array) -> jax.Array:
    """Packs integers from -127 to 127, (..., depth), as uint8 in the order of the lanes; depth is a multiple of 16."""
    pairs = jnp.moveaxis(_grouped(values.astype(jnp.int8), _SHAPE), -3, -1)
    signs = jnp.where(jnp.flip(pairs, -1) < 0, jnp.uint8(_SIGN), jnp.uint8(0))
    return (jnp.abs(pairs).astype(jnp.uint8) | signs).reshape(values.shape)


def unpack(values: jax.Array) -> jax.Array:
    """Inverts `pack`; returns int8."""
    pairs = _grouped(values, (*_SHAPE[1:], _SHAPE[0]))
    magnitudes = (pairs & jnp.uint8(_SIGN - 1)).astype(jnp.int8)
    signed = jnp.where(jnp.flip(pairs, -1) < _SIGN, magnitudes, -magnitudes)
    return jnp.moveaxis(signed, -1, -3).reshape(values.shape)


def is_packed_dtype(dtype: DTypeLike) -> bool:
    """Whether weights of this dtype are packed: uint8 is used for nothing else."""
    return jnp.dtype(dtype) == jnp.uint8


def unit(integers: DTypeLike, dtype: jnp.dtype) -> float:
    """Returns what `widened` makes of 1, a power of two."""
    return FORMS[dtype.name][2] if is_packed_dtype(integers) else 1.0


def load_integers(ref: Any) -> jax.Array:
    """Loads integers, (64 columns, depth), to registers by wide loads."""
    layouts = {"uint8": plgpu.Layout.WGMMA_8BIT, "int8": plgpu.Layout.WGMMA_UPCAST_2X}
    return plgpu.load(ref, layout=layouts.get(ref.dtype.name, plgpu.Layout.WGMMA_UPCAST_4X))


def widened(values: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Widens loaded integers to a 16-bit dtype, times `unit`, in their original order: a product's left operand."""
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
