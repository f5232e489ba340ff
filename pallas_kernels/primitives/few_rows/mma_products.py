"""The work of a warp on its share of a step's depth, for a product of at most 16 rows.

In the tensor cores' tiles (mma.m16n8k16), columns of the result are rows, and rows of x are columns. `ldmatrix` reads
both from shared memory in the layout of TMA: tiles of (8, 64) with swizzled rows of 128 bytes. It transposes the
weights. Once a warp has read its share, the buffer is refilled while the warp multiplies. x is normalised in registers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm

from pallas_kernels.primitives.gemm.operands import SWIZZLE_BYTES
from pallas_kernels.primitives.inline_ptx import Word, constant, in_shared_memory, inlined, instruct, word_type
from pallas_kernels.primitives.integer_gemm.mma_kernel import multiplied
from pallas_kernels.primitives.row_tiles import TileForm

TOKENS = 8
"""Rows of x in a tile of the tensor cores."""
DEPTH = 16
"""The depth of a tile of the tensor cores."""
_TILE_BYTES, _LINE_WORDS, _CHUNK_WORDS = 1024, 32, 4
"""Bytes of a tile in shared memory, words of its rows, and words of a swizzled chunk."""
_TRANSFORMS = (
    plgpu.TilingTransform((8, 64)),  # pyright: ignore[reportAbstractUsage]
    plgpu.SwizzleTransform(128),  # pyright: ignore[reportAbstractUsage]
)
_PADDING = 4
"""Words between one row's sums and the next, so that lanes that write at once use different banks."""
_BARRIER = 9
"""A hardware barrier that Mosaic GPU does not use: it numbers its own by warpgroup."""


@dataclass(frozen=True, kw_only=True)
class Share:
    """The split of a block's work: its warps share the depth of each step.

    rows: rows of x. columns: columns of the block, a multiple of 64. depth: the depth of a step. is_scaled: whether x
    is multiplied by a vector along the depth.
    """

    rows: int
    columns: int
    depth: int
    warps: int
    dtype: jnp.dtype
    is_scaled: bool

    @property
    def token_tiles(self) -> int:
        """The number of tensor-core tiles along the rows of x."""
        return -(-self.rows // TOKENS)

    @property
    def x_form(self) -> TileForm:
        """Shared-memory layout of one step of x: panels for more than 8 rows; for 8 both layouts are the same."""
        is_apart = self.token_tiles > 1
        return TileForm(
            size=self.depth, dtype=self.dtype, in_panels=is_apart, has_all_rows=is_apart, swizzle=SWIZZLE_BYTES
        )

    @property
    def column_tiles(self) -> int:
        """The number of tensor-core tiles along the columns."""
        return self.columns // 16

    @property
    def tiles(self) -> int:
        """The number of tensor-core tiles along a warp's share of a step's depth."""
        return self.depth // (DEPTH * self.warps)

    @property
    def pitch(self) -> int:
        """Words from one row's sums to the next."""
        return self.columns + _PADDING

    @property
    def words(self) -> int:
        """Words that a lane reads in a step: of weights, of x, and of x's scale."""
        return self.tiles * (4 * self.column_tiles + 2 * self.token_tiles + 2 * self.is_scaled)

    @property
    def sums(self) -> int:
        """The number of sums of a lane: of products and of squares."""
        return 4 * self.token_tiles * (self.column_tiles + 1)

    def no_sums(self) -> jax.Array:
        """Returns the initial sums for `multiply`."""
        return plgpu.layout_cast(jnp.zeros((self.sums, 128), jnp.float32), _layout(self.sums))

    def load(self, weights: Any, x: Any, scale: Any, step: jax.Array) -> jax.Array:
        """Loads the words of each lane in a step, from shared memory.

        weights: (depth, columns). x: a tile of `x_form`. scale: the whole vector in lines of 64.
        """
        more = [scale] if self.is_scaled else []

        def work(_, step_array, weights_ref, x_ref, *scale_ref):
            thread = Word.special("tid.x")
            first, lane = thread // 32 * (DEPTH * self.tiles), thread % 32
            line, matrix = lane % 8, lane // 8
            words = self._weights(weights_ref, first, line, matrix) + self._x(x_ref, first, line, matrix)
            if self.is_scaled:
                # All lines of these matrices are the same: every row of x has the same scale.
                start = Word(_of_array(step_array)[0]) * self.depth + first
                address = in_shared_memory(scale_ref[0], start // 2 + matrix % 2 * _CHUNK_WORDS)
                for tile in range(self.tiles):
                    words += _load_matrices(address, 2 * DEPTH * tile, 2)
            return _as_array(words)

        types = (_layout(1), *[plgpu.RefType(_TRANSFORMS)] * 2, *[plgpu.RefType() for _ in more])
        call: Any = plgpu.inline_mgpu(arg_types=types, return_type=_type(self.words, jnp.int32))(work)
        return call(plgpu.layout_cast(jnp.full((1, 128), step, jnp.int32), _layout(1)), weights, x, *more)

    def _weights(self, ref: Any, first: Word, line: Word, matrix: Word) -> list[Any]:
        """Loads four words for each tile along the depth and every 16 columns."""
        across = self.columns // 64
        depth = first + line + matrix // 2 * 8
        start = depth // 8 * (across * _TILE_BYTES // 4) + line * _LINE_WORDS
        chunk = (matrix % 2) ^ line
        addresses = [in_shared_memory(ref, start + (chunk ^ (2 * i)) * _CHUNK_WORDS) for i in range(4)]
        places = [(tile, column) for tile in range(self.tiles) for column in range(self.column_tiles)]
        found = []
        for tile, column in places:
            offset = _TILE_BYTES * (2 * tile * across + column // 4)
            found += _load_matrices(addresses[column % 4], offset, 4, ".trans")
        return found

    def _x(self, ref: Any, first: Word, line: Word, matrix: Word) -> list[Any]:
        """Loads two words for each tile along the depth and every 8 rows."""
        found = []
        for tile in range(self.tiles):
            depth = first + DEPTH * tile
            place = depth // 64 * (self.token_tiles * _TILE_BYTES // 4) + line * _LINE_WORDS
            if self.token_tiles > 1:
                place = place + matrix // 2 * (_TILE_BYTES // 4)
            chunk = (depth % 64 // 8 + matrix % 2) ^ line
            found += _load_matrices(in_shared_memory(ref, place + chunk * _CHUNK_WORDS), 0, 2 * self.token_tiles)
        return found

    def multiply(self, sums: jax.Array, words: jax.Array) -> jax.Array:
        """Adds a step's products and squares to the sums. words: from `load`."""

        def work(_, sums_array, words_array):
            sums, words = _in_fours(_of_array(sums_array)), _of_array(words_array)
            of_tiles = self.column_tiles * self.token_tiles
            weights = _in_fours(words[: 4 * self.tiles * self.column_tiles])
            rest = words[4 * len(weights) :]
            for tile in range(self.tiles):
                x = [rest[2 * (tile * self.token_tiles + i) :][:2] for i in range(self.token_tiles)]
                # This multiplies every row with every other; only the products of a row with itself are used.
                left = [x[0][0], x[-1][0], x[0][1], x[-1][1]]
                for i, own in enumerate(x):
                    sums[of_tiles + i] = multiplied(sums[of_tiles + i], left, own, self.dtype)
                if self.is_scaled:
                    scale = rest[2 * (self.tiles * self.token_tiles + tile) :][:2]
                    x = [[_scaled(*pair) for pair in zip(own, scale, strict=True)] for own in x]
                for column in range(self.column_tiles):
                    for i, own in enumerate(x):
                        place = i * self.column_tiles + column
                        left = weights[tile * self.column_tiles + column]
                        sums[place] = multiplied(sums[place], left, own, self.dtype)
            return _as_array([value for four in sums for value in four])

        types = (_layout(self.sums), _layout(self.words))
        call: Any = plgpu.inline_mgpu(arg_types=types, return_type=_type(self.sums, jnp.float32))(work)
        return call(sums, words)

    def store_sums(self, sums: jax.Array, arriving: Any, squares: Any) -> None:
        """Writes each warp's sums to shared memory, then waits for all these warps.

        arriving: (warps, rows, pitch) float32. squares: (rows, warps) float32.
        """

        def work(_, array, arriving_ref, squares_ref):
            sums = _in_fours(_of_array(array))
            thread = Word.special("tid.x")
            warp, lane = thread // 32, thread % 32
            group, place = lane // 4, lane % 4
            for i in range(self.token_tiles):
                for member in range(2):
                    token = place * 2 + (TOKENS * i + member)
                    own = (warp * self.rows + token) * self.pitch + group
                    address = in_shared_memory(arriving_ref, own)
                    for column in range(self.column_tiles):
                        for half in range(2):
                            value = sums[i * self.column_tiles + column][2 * half + member]
                            self._store(address, 4 * (16 * column + 8 * half), value, token)
                    # The rows of tile i are the lower (i = 0) or upper half of the tensor cores' rows.
                    value = sums[self.token_tiles * self.column_tiles + i][2 * i + member]
                    is_other = (place * 2 + member) ^ group
                    token = group + TOKENS * i
                    address = in_shared_memory(squares_ref, token * self.warps + warp)
                    self._store(address, 0, value, token + is_other * self.rows)
            instruct(None, [], f"bar.sync {_BARRIER}, {32 * self.warps};", "~{memory}", ordered=True)

        inlined(work, sums, arriving, squares, arrays=(_layout(self.sums),))

    def _store(self, address: Any, offset: int, value: Any, token: Word) -> None:
        """Stores a value if its row exists."""
        text = "{ .reg .pred p; setp.lt.u32 p, $1, $2; " + f"@p st.shared.f32 [$0+{offset}], $3; }}"
        instruct(None, [address, token.value, constant(self.rows), value], text, "r,r,r,f", ordered=True)


def _load_matrices(address: Any, offset: int, count: int, kind: str = "") -> list[Any]:
    """Loads a word of each of two or four matrices of 8 lines of 16 bytes. address: the address of a lane's line."""
    struct = llvm.StructType.get_literal([word_type()] * count)
    names = ", ".join(f"${i}" for i in range(count))
    text = f"ldmatrix.sync.aligned.m8n8.x{count}{kind}.shared.b16 {{{names}}}, [${count}+{offset}];"
    words = instruct(struct, [address], text, "=r," * count + "r,~{memory}", ordered=True)
    return [llvm.extractvalue(word_type(), words, [i]) for i in range(count)]


def _scaled(word: Any, scale: Any) -> Any:
    """Multiplies two bfloat16 pairs, rounding once."""
    return instruct(word_type(), [word, scale], "mul.rn.bf16x2 $0, $1, $2;", "=r,r,r")


def _in_fours(values: list[Any]) -> list[list[Any]]:
    return [values[i : i + 4] for i in range(0, len(values), 4)]


def _layout(count: int) -> Any:
    """Returns a layout with `count` values per thread; only the thread matters, not the position in the array."""
    return plgpu.Layout.WG_STRIDED((count, 128), vec_size=1)


def _type(count: int, dtype: Any) -> Any:
    return plgpu.ShapeDtypeStruct((count, 128), dtype, layout=_layout(count))


def _as_array(values: list[Any]) -> Any:
    """Makes an array of float32 values, or of words as int32."""
    registers = np.empty((len(values),), dtype=object)
    for i, value in enumerate(values):
        registers[i] = llvm.bitcast(ir.VectorType.get((1,), value.type), value)
    is_signed = True if values[0].type == word_type() else None
    return mgpu.FragmentedArray(_registers=registers, _layout=_layout(len(values)).to_mgpu(), _is_signed=is_signed)


def _of_array(array: Any) -> list[Any]:
    return [llvm.extractelement(register, constant(0)) for register in array.registers.flat]
