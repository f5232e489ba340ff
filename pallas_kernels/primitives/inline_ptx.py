"""Single instructions of a thread, for kernels whose registers are laid out by hand: words of 32 bits and addresses."""

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
    """Calls work(context, *operands) while the kernel is lowered. arrays: layouts of the first operands, which are
    arrays; the others are references. result: the ShapeDtypeStruct of what `work` returns, or None."""
    types = (*arrays, *(plgpu.RefType() for _ in operands[len(arrays) :]))
    call: Any = plgpu.inline_mgpu(arg_types=types, return_type=result)(work)
    return call(*operands)


def word_type() -> ir.Type:
    """32 bits."""
    return ir.IntegerType.get_signless(32)


def constant(value: int) -> Any:
    """A word."""
    return mgpu.c(value, word_type())


def instruct(result: ir.Type | None, operands: Sequence[Any], text: str, constraints: str, *, ordered=False) -> Any:
    """PTX. ordered: whether it stays where it is among others that are so."""
    return llvm.inline_asm(result, list(operands), text, constraints, has_side_effects=ordered)


class Word:
    """Arithmetic of 32 bits without sign."""

    def __init__(self, value: Any):
        self.value = value

    @classmethod
    def special(cls, name: str) -> Word:
        """A special register of PTX."""
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
        """The smaller one."""
        return self._with(other, arith.minui)


def in_device_memory(ref: Any, byte: Word) -> Any:
    """The address so many bytes after the beginning of `ref`, 64 bits."""
    i64 = ir.IntegerType.get_signless(64)
    return arith.addi(llvm.ptrtoint(i64, mgpu.utils.memref_ptr(ref)), arith.extui(i64, byte.value))


def in_shared_memory(ref: Any, words: Word | None = None) -> Any:
    """The address so many words after the beginning of `ref`, 32 bits."""
    base = llvm.ptrtoint(word_type(), mgpu.utils.memref_ptr(ref))
    return base if words is None else (Word(base) + words * 4).value


def load_four(address: Any, offset: int, kind: str = "") -> list[Any]:
    """The four words that lie so many bytes after an address in device memory, where nobody writes. kind: how they
    are kept in caches."""
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
    """The number there as float32, or the bits of int32; zero where place >= end."""
    start = "{ .reg .f32 v; .reg .b16 h, z; .reg .pred p; mov.b16 z, 0; mov.b16 h, 0; mov.f32 v, 0f00000000; "
    text = start + f"setp.lt.u32 p, $2, $3; {_LOADS[jnp.dtype(dtype).name]} mov.f32 $0, v; }}"
    return instruct(ir.F32Type.get(), [address, place.value, constant(end)], text, "=f,l,r,r", ordered=True)


_STORES = {
    "float32": "@p st.global.f32 [$0], $1;",
    "bfloat16": "cvt.rn.bf16.f32 h, $1; @p st.global.b16 [$0], h;",
    "float16": "cvt.rn.f16.f32 h, $1; @p st.global.b16 [$0], h;",
}


def store_number(address: Any, value: Any, dtype: Any, place: Word, end: int) -> None:
    """Rounds float32 and writes it there; nothing where place >= end."""
    text = "{ .reg .pred p; .reg .b16 h; setp.lt.u32 p, $2, $3; " + _STORES[jnp.dtype(dtype).name] + " }"
    instruct(None, [address, value, place.value, constant(end)], text, "l,f,r,r", ordered=True)


def load_shared(address: Any, offset: int, place: Word, end: int) -> Any:
    """The float32 that lies so many bytes after an address in shared memory; zero where place >= end."""
    text = "{ .reg .pred p; setp.lt.u32 p, $2, $3; mov.f32 $0, 0f00000000; "
    text += f"@p ld.shared.f32 $0, [$1+{offset}]; }}"
    operands = [address, place.value, constant(end)]
    return instruct(ir.F32Type.get(), operands, text, "=&f,r,r,r,~{memory}", ordered=True)


def as_array(value: Any, shape: tuple[int, ...], layout: Any, *, is_signed: bool | None = None) -> Any:
    """An array of which each thread has one number of 32 bits. is_signed: of integers."""
    registers = np.empty((1,), dtype=object)
    registers[0] = llvm.bitcast(ir.VectorType.get((1,), value.type), value)
    return mgpu.FragmentedArray(_registers=registers, _layout=layout.to_mgpu(), _is_signed=is_signed)


def of_array(array: Any) -> Any:
    """The one number that a thread has."""
    return llvm.extractelement(array.registers[0], constant(0))
