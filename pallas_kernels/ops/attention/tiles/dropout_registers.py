"""What a thread of a kernel does for dropout with its registers, in words that leave the compiler no choice.

Arrays lie in the accumulators' layout: of each eight columns a thread has two rows, and in each of them two neighbours,
in one register or in a pair of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.experimental.mosaic.gpu as mgpu
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith, vector
from jaxlib.mlir.dialects import llvm

from pallas_kernels.primitives.platform import is_interpreted

_ROW_AXIS = 4
"""Of the layout's array of registers: the two rows of a thread."""

Members = tuple[int, int]
"""What a word is multiplied by, for a thread's first row and for the other one."""


def rounded(values: jax.Array, dtype: Any) -> jax.Array:
    """values.astype(dtype) of a tile in the accumulators' layout, where it stands.

    What goes round a loop in 16 bits has half of the registers. LLVM would round it after it has gone round.
    """
    if is_interpreted():
        return values.astype(dtype)
    layout = plgpu.Layout.WGMMA
    result = plgpu.ShapeDtypeStruct(values.shape, dtype, layout=layout)
    kind = _pair_kind(dtype)

    @plgpu.inline_mgpu(arg_types=(layout,), return_type=result)
    def round_pairs(_, array):
        i32 = ir.IntegerType.get_signless(32)
        registers = np.empty_like(array.registers)
        for place in np.ndindex(*registers.shape):
            low, high = (llvm.extractelement(array.registers[place], mgpu.c(i, i32)) for i in range(2))
            pair = llvm.inline_asm(i32, [high, low], f"cvt.rn.{kind}.f32 $0, $1, $2;", "=r,f,f")
            registers[place] = llvm.bitcast(_pair_type(dtype), pair)
        return mgpu.FragmentedArray(_registers=registers, _layout=array.layout, _is_signed=None)

    return round_pairs(values)  # pyright: ignore[reportCallIssue]: JAX gives the first argument


def saturated(value: jax.Array) -> jax.Array:
    """Clamped to 0 and 1, not-a-number to 0: a modifier of the instruction that made the value.

    `jnp.clip` would keep not-a-number, for which there is no such modifier: two instructions at half rate.
    """
    if is_interpreted():
        return jnp.where(value > 0, jnp.minimum(value, 1.0), 0.0)
    layout = plgpu.Layout.WGMMA
    result = plgpu.ShapeDtypeStruct(value.shape, jnp.float32, layout=layout)

    @plgpu.inline_mgpu(arg_types=(layout,), return_type=result)
    def saturate(_, array):
        zero, one = (mgpu.c(bound, array.mlir_dtype) for bound in (0.0, 1.0))
        return array.foreach(lambda x, _: arith.minnumf(arith.maxnumf(x, zero), one), create_array=True)

    return saturate(value)  # pyright: ignore[reportCallIssue]: JAX gives the first argument


def bits_of_halves(word: jax.Array, members: Members) -> jax.Array:
    """Halves of products in front, (64, 8) uint32: of even columns the one behind, of odd ones that in front."""

    def register_of(product):
        i32 = ir.IntegerType.get_signless(32)
        even = arith.shli(product, mgpu.c(16, i32))
        return vector.from_elements(ir.VectorType.get((2,), i32), [even, product])

    return _of_products(word, members, jnp.uint32, register_of)


def mask_of_halves(word: jax.Array, members: Members, dtype: Any, limit: int) -> jax.Array:
    """float16's 1.0 or 0.0 as bits of `dtype`, (64, 8): 1.0 where 15 bits of the products' halves are below the limit.

    Their difference, as float16, is scaled such that the least one is 1, and saturated.
    """
    scale = 2.0 ** max(0, 26 - (limit >> 10))
    scaled_limit = float(np.uint16(limit).view(np.float16)) * scale
    numbers = [scaled_limit] if scale == 1 else [scaled_limit, -scale]
    difference = "sub.rn.sat.f16x2 $0, $2, random;" if scale == 1 else "fma.rn.sat.f16x2 $0, random, $3, $2;"
    asm = f"{{ .reg .b32 random; abs.f16x2 random, $1; {difference} }}"

    def register_of(product):
        i32 = ir.IntegerType.get_signless(32)
        constants = [mgpu.c(int(np.float16(number).view(np.uint16)) * 0x10001, i32) for number in numbers]
        operands = [product, *constants]
        return llvm.bitcast(_pair_type(dtype), llvm.inline_asm(i32, operands, asm, "=r" + ",r" * len(operands)))

    return _of_products(word, members, dtype, register_of)


def permuted(word: jax.Array, order: jax.Array) -> jax.Array:
    """The bytes of 64 x 8 words in another order, that of `prmt` with zeros behind the word.

    Both are the same for a thread's two rows, and order for all that it has: so they are made once.
    """
    layout = plgpu.Layout.WGMMA
    result = plgpu.ShapeDtypeStruct(word.shape, word.dtype, layout=layout)

    @plgpu.inline_mgpu(arg_types=(layout, layout), return_type=result)
    def permute(_, words, orders):
        i32 = ir.IntegerType.get_signless(32)
        own = llvm.extractelement(orders.registers.flat[0], mgpu.c(0, i32))
        pair = (llvm.extractelement(words.registers.flat[0], mgpu.c(i, i32)) for i in range(2))
        permuted = [llvm.inline_asm(i32, [each, own], "prmt.b32 $0, $1, 0, $2;", "=r,r,r") for each in pair]
        register = vector.from_elements(ir.VectorType.get((2,), i32), permuted)
        registers = np.full_like(words.registers, register)
        return mgpu.FragmentedArray(_registers=registers, _layout=words.layout, _is_signed=words.is_signed)

    return permute(word, order)  # pyright: ignore[reportCallIssue]: JAX gives the first argument


def _of_products(word: jax.Array, members: Members, dtype: Any, register_of: Callable[[Any], Any]) -> jax.Array:
    """An array like `word`, of which a thread's elements are one number, made once: the compiler may not see that.

    register_of: from its product with the member of a row to the row's two elements.
    """
    layout = plgpu.Layout.WGMMA
    result = plgpu.ShapeDtypeStruct(word.shape, dtype, layout=layout)

    @plgpu.inline_mgpu(arg_types=(layout,), return_type=result)
    def make(_, words):
        i32 = ir.IntegerType.get_signless(32)
        own = llvm.extractelement(words.registers.flat[0], mgpu.c(0, i32))
        registers = np.empty_like(words.registers)
        for place in np.ndindex(*registers.shape):
            registers[place] = register_of(arith.muli(own, mgpu.c(members[place[_ROW_AXIS]], i32)))
        is_signed = False if dtype == jnp.uint32 else None
        return mgpu.FragmentedArray(_registers=registers, _layout=words.layout, _is_signed=is_signed)

    return make(word)  # pyright: ignore[reportCallIssue]: JAX gives the first argument


def _pair_kind(dtype: Any) -> str:
    return "bf16x2" if dtype == jnp.bfloat16 else "f16x2"


def _pair_type(dtype: Any) -> Any:
    return ir.VectorType.get((2,), ir.BF16Type.get() if dtype == jnp.bfloat16 else ir.F16Type.get())
