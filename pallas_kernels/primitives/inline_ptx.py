"""Inline PTX instructions on 32-bit words and addresses, for kernels that lay out registers by hand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.extend.mlir.dialects import arith
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm


def inlined(work: Callable[..., Any], *operands: Any, arrays: Sequence[Any] = (), result: Any = None) -> Any:
    """Calls `work(context, *operands)` while the kernel is lowered.

    arrays: layouts of the first operands, which are arrays; the other operands are references. result: the
    ShapeDtypeStruct of the value that `work` returns, or None."""
    types = (*arrays, *(plgpu.RefType() for _ in operands[len(arrays) :]))
    call: Any = plgpu.inline_mgpu(arg_types=types, return_type=result)(work)
    return call(*operands)


def word_type() -> ir.Type:
    """Returns the type of a 32-bit word."""
    return ir.IntegerType.get_signless(32)


def constant(value: int) -> Any:
    """Makes a constant word."""
    return mgpu.c(value, word_type())


def instruct(result: ir.Type | None, operands: Sequence[Any], text: str, constraints: str, *, ordered=False) -> Any:
    """Inserts a PTX instruction. ordered: whether it keeps its order among other ordered instructions."""
    return llvm.inline_asm(result, list(operands), text, constraints, has_side_effects=ordered)


class Word:
    """Unsigned 32-bit arithmetic."""

    def __init__(self, value: Any):
        self.value = value

    @classmethod
    def special(cls, name: str) -> Word:
        """Reads a PTX special register."""
        return cls(instruct(word_type(), [], f"mov.u32 $0, %{name};", "=r"))

    def _with(self, other: Any, operation: Callable[..., Any]) -> Word:
        return Word(operation(self.value, other.value if isinstance(other, Word) else constant(other)))

    def __add__(self, other: Word | int) -> Word:
        return self._with(other, arith.addi)

    def __mul__(self, other: Word | int) -> Word:
        return self._with(other, arith.muli)

    def __floordiv__(self, other: Word | int) -> Word:
        return self._with(other, arith.divui)

    def __mod__(self, other: Word | int) -> Word:
        return self._with(other, arith.remui)

    def __xor__(self, other: Word | int) -> Word:
        return self._with(other, arith.xori)

    def least(self, other: Word | int) -> Word:
        """Returns the smaller word."""
        return self._with(other, arith.minui)


def in_device_memory(ref: Any, byte: Word) -> Any:
    """Returns the 64-bit address a number of bytes after the start of `ref`."""
    i64 = ir.IntegerType.get_signless(64)
    return arith.addi(llvm.ptrtoint(i64, mgpu.utils.memref_ptr(ref)), arith.extui(i64, byte.value))


def in_shared_memory(ref: Any, words: Word | None = None) -> Any:
    """Returns the 32-bit address a number of words after the start of `ref`."""
    base = llvm.ptrtoint(word_type(), mgpu.utils.memref_ptr(ref))
    return base if words is None else (Word(base) + words * 4).value


def load_four(address: Any, offset: int, kind: str = "") -> list[Any]:
    """Loads four words a number of bytes after an address in device memory that no kernel writes. kind: cache hints."""
    struct = llvm.StructType.get_literal([word_type()] * 4)
    text = f"ld.global.nc{kind}.v4.u32 {{$0, $1, $2, $3}}, [$4+{offset}];"
    four = instruct(struct, [address], text, "=r,=r,=r,=r,l", ordered=True)
    return [llvm.extractvalue(word_type(), four, [i]) for i in range(4)]


_LOADS = {
    **dict.fromkeys(("float32", "int32"), "@p ld.global.f32 v, [$1];"),
    "bfloat16": "@p ld.global.b16 h, [$1]; mov.b32 v, {z, h};",
    "float16": "@p ld.global.b16 h, [$1]; cvt.f32.f16 v, h;",
}


def load_number(address: Any, dtype: Any, place: Word, end: int) -> Any:
    """Loads a number from device memory as float32, or the bits of an int32; zero where place >= end."""
    start = "{ .reg .f32 v; .reg .b16 h, z; .reg .pred p; mov.b16 z, 0; mov.b16 h, 0; mov.f32 v, 0f00000000; "
    text = start + f"setp.lt.u32 p, $2, $3; {_LOADS[jnp.dtype(dtype).name]} mov.f32 $0, v; }}"
    return instruct(ir.F32Type.get(), [address, place.value, constant(end)], text, "=f,l,r,r", ordered=True)


_STORES = {
    "float32": "@p st.global.f32 [$0], $1;",
    "bfloat16": "cvt.rn.bf16.f32 h, $1; @p st.global.b16 [$0], h;",
    "float16": "cvt.rn.f16.f32 h, $1; @p st.global.b16 [$0], h;",
}


def store_number(address: Any, value: Any, dtype: Any, place: Word, end: int) -> None:
    """Rounds a float32 and stores it to device memory, unless place >= end."""
    text = "{ .reg .pred p; .reg .b16 h; setp.lt.u32 p, $2, $3; " + _STORES[jnp.dtype(dtype).name] + " }"
    instruct(None, [address, value, place.value, constant(end)], text, "l,f,r,r", ordered=True)


def load_shared(address: Any, offset: int, place: Word, end: int) -> Any:
    """Loads the float32 a number of bytes past an address in shared memory; zero where place >= end."""
    text = "{ .reg .pred p; setp.lt.u32 p, $2, $3; mov.f32 $0, 0f00000000; "
    text += f"@p ld.shared.f32 $0, [$1+{offset}]; }}"
    operands = [address, place.value, constant(end)]
    return instruct(ir.F32Type.get(), operands, text, "=&f,r,r,r,~{memory}", ordered=True)


def as_array(value: Any, shape: tuple[int, ...], layout: Any, *, is_signed: bool | None = None) -> Any:
    """Makes an array in which each thread holds one 32-bit number. is_signed: whether integers are signed."""
    registers = np.empty((1,), dtype=object)
    registers[0] = llvm.bitcast(ir.VectorType.get((1,), value.type), value)
    return mgpu.FragmentedArray(_registers=registers, _layout=layout.to_mgpu(), _is_signed=is_signed)


def of_array(array: Any) -> Any:
    """Returns the thread's number of an array that `as_array` made."""
    return llvm.extractelement(array.registers[0], constant(0))
