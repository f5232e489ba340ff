"""The product of at most 16 rows with int8 weights that are loaded from device memory to registers directly.

A block computes 16 columns. Its warps take pieces of the depth in turn and load as many weights ahead as registers
hold. They wait for no barrier until their sums are added in shared memory.

In the tensor cores' tiles (mma.m16n8k16), 16 columns of the result are rows, and rows of x are columns. A lane loads 16
bytes of a row of weights at once: 16 neighbours along the depth in the order of `packing.py`, each word of which makes
two registers of a tile. So a tile's depth is permuted. The sum stays the same because the lane loads the same 16
neighbours of x, 32 bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm

from pallas_kernels.primitives import settings
from pallas_kernels.primitives.flop_metadata import product
from pallas_kernels.primitives.gemm.epilogue import Epilogue
from pallas_kernels.primitives.inline_ptx import (
    Word,
    constant,
    in_device_memory,
    in_shared_memory,
    inlined,
    instruct,
    load_four,
    word_type,
)
from pallas_kernels.primitives.integer_gemm.packing import FORMS, unit, unpack
from pallas_kernels.primitives.platform import is_interpreted, varying_like
from pallas_kernels.primitives.thread_values import Values, keep_order

PIECE = 128
"""The depth that a warp multiplies at a time: one memory line of each row of weights."""
TILE = 16
"""Columns of the result in a tile of the tensor cores."""
TOKENS = 8
"""Rows of x in a tile of the tensor cores."""
PITCH = TILE + 4
"""Words from one row's sums to the next, so that lanes that write at once use different banks."""
_HALF, _LINE = 64, 16
"""Values of a piece that the lanes of one row read at once, and values that one lane reads."""
_ONCE = ".L1::no_allocate.L2::256B"
"""Cache hint for weights: read once per multiprocessor, so not kept in L1; 256 bytes come to L2 for other warps."""
_PAIRS = ("and.b32 t, $1, 0x807f807f;", "prmt.b32 t, $1, 0, 0x2301; and.b32 t, t, 0x807f807f;")


@dataclass(frozen=True, kw_only=True)
class Share:
    """The split of a tile's depth among the warps of a block, which take pieces of it in turn.

    warps: the number of warps of the block. tokens: rows of sums in shared memory, `PITCH` words apart.
    """

    rows: int
    features: int
    warps: int
    tokens: int
    dtype: jnp.dtype

    @property
    def pieces(self) -> int:
        """The number of pieces of each warp."""
        return self.features // (PIECE * self.warps)

    @property
    def token_tiles(self) -> int:
        """The number of tensor-core tiles along the rows of x."""
        return -(-self.rows // TOKENS)


def store_partial_sums(share: Share, x: Any, values: Any, arriving: Any) -> None:
    """Multiplies and writes each warp's sums to shared memory, then waits for all warps of the block.

    x: (rows, features) in device memory. values: the weights in device memory, from the block's first column on.
    arriving: (warps, tokens, `PITCH`) float32 in shared memory.
    """

    def work(_, x_ref, values_ref, arriving_ref):
        thread = Word.special("tid.x")
        warp, lane = thread // 32, thread % 32
        group, place = lane // 4, lane % 4
        first = warp * PIECE + place * _LINE
        weights = in_device_memory(values_ref, group * share.features + first)
        tokens = [(group + TOKENS * i).least(share.rows - 1) for i in range(share.token_tiles)]
        rows = [in_device_memory(x_ref, (token * share.features + first) * 2) for token in tokens]
        sums = _sums(share, weights, rows)
        for half in range(2):
            for i in range(share.token_tiles):
                for member in range(2):
                    token, column = place * 2 + (TOKENS * i + member), group + 8 * half
                    address = in_shared_memory(arriving_ref, (warp * share.tokens + token) * PITCH + column)
                    operands = [address, token.value, constant(share.tokens), sums[i][2 * half + member]]
                    text = "{ .reg .pred p; setp.lt.u32 p, $1, $2; @p st.shared.f32 [$0], $3; }"
                    instruct(None, operands, text, "r,r,r,f", ordered=True)
        instruct(None, [], "bar.sync 0;", "~{memory}", ordered=True)

    inlined(work, x, values, arriving)


def _sums(share: Share, weights: Any, rows: list[Any]) -> list[list[Any]]:
    """Returns a lane's four sums for each tile of rows. weights, rows: addresses of the lane's first bytes."""
    zero = mgpu.c(0.0, ir.F32Type.get())
    sums = [[zero] * 4 for _ in rows]
    for piece in range(share.pieces):  # the compiler loads as many pieces ahead as registers hold
        start = piece * PIECE * share.warps
        halves = (start, start + _HALF)
        right = [[[load_four(row, 2 * half + 16 * pair) for pair in range(2)] for row in rows] for half in halves]
        left = [[load_four(weights, line + half, _ONCE) for half in halves] for line in (0, 8 * share.features)]
        for half in range(2):
            for pair in range(2):
                for word in (0, 2):
                    words = [left[i][half][word + j] for j in range(2) for i in range(2)]
                    a = [_widened(each, pair, share.dtype) for each in words]
                    for i in range(share.token_tiles):
                        b = right[half][i][pair][word : word + 2]
                        sums[i] = multiplied(sums[i], a, b, share.dtype)
    return sums


def _widened(word: Any, pair: int, dtype: jnp.dtype) -> Any:
    """Returns one of the two pairs of weights in a word, as 16-bit values; see `packing.py`."""
    kind, factor, _ = FORMS[dtype.name]
    text = f"{{ .reg .b32 t; {_PAIRS[pair]} mul.{kind} $0, t, $2; }}"
    return instruct(word_type(), [word, constant(factor * 0x10001)], text, "=r,r,r")


def multiplied(sums: list[Any], left: list[Any], right: list[Any], dtype: jnp.dtype) -> list[Any]:
    """Adds to a tile's sums the product of registers with 16 columns and with 8 rows, over a depth of 16."""
    f32 = ir.F32Type.get()
    kind = {"bfloat16": "bf16", "float16": "f16"}[dtype.name]
    text = (
        f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32 "
        "{$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13};"
    )
    struct = llvm.StructType.get_literal([f32] * 4)
    four = instruct(struct, [*left, *right, *sums], text, "=f,=f,=f,=f,r,r,r,r,r,r,f,f,f,f")
    return [llvm.extractvalue(f32, four, [i]) for i in range(4)]


MOST_ROWS = 2 * TOKENS
COLUMNS = TILE
"""Columns of the result that a block computes."""


@dataclass(frozen=True, kw_only=True)
class IntegerMmaConfig:
    """The tiling of a product. warpgroups: of a block, 1, 2 or 4."""

    warpgroups: int = 2

    def fits(self, rows: int, outputs: int, features: int) -> bool:
        """Whether the tiling divides a product of this size evenly."""
        return rows <= MOST_ROWS and outputs % COLUMNS == 0 and features % (PIECE * 4 * self.warpgroups) == 0


def integer_mma_product(
    x: jax.Array,
    values: jax.Array,
    scales: jax.Array,
    *,
    epilogue: Epilogue,
    bias: jax.Array | None = None,
    residual: jax.Array | None = None,
    out_dtype: jnp.dtype | None = None,
    config: IntegerMmaConfig | None = None,
    name: str = "integer_mma_product",
) -> jax.Array:
    """Returns the epilogue's result, (M, N).

    Args:
        x: (M, K), M at most 16, bfloat16 or float16; K a multiple of `PIECE` times the warps of a block.
        values: (N, K), uint8 in the order of `packing.py`; N a multiple of 16.
        scales: (N,) float32.
        bias: (N,), bfloat16, float16 or float32.
        residual: (M, N) of out_dtype.
        out_dtype: the result's dtype; None: x's.
        config: the tiling.
        name: the kernel's name, for traces.

    Raises:
        ValueError: `config` does not fit the sizes.
    """
    (rows, features), outputs = x.shape, values.shape[0]
    config = config or IntegerMmaConfig()
    if not config.fits(rows, outputs, features):
        raise ValueError(f"{rows} rows of {features} features to {outputs} outputs cannot be cut up by {config}")
    turn = 128 // COLUMNS
    tokens = -(-rows // turn) * turn
    share = Share(rows=rows, features=features, warps=4 * config.warpgroups, tokens=tokens, dtype=x.dtype)
    out_dtype = jnp.dtype(out_dtype or x.dtype)
    operands = {"scales": scales, "bias": bias, "residual": residual}
    extras = {key: value for key, value in operands.items() if value is not None}

    def body(x_ref, values_ref, extra_refs, out_ref, arriving):
        own = pl.ds(lax.axis_index("block") * COLUMNS, COLUMNS)
        work = _interpreted if is_interpreted() else partial(_compute, share)
        work(epilogue, x_ref, values_ref, extra_refs, out_ref, arriving, own)

    body.__name__ = name
    kernel = settings.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((rows, outputs), out_dtype),
        grid=(outputs // COLUMNS,),
        grid_names=("block",),
        num_threads=config.warpgroups,
        thread_name="warpgroup",
        scratch_types=(plgpu.SMEM((share.warps, tokens, PITCH), jnp.float32),),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        products=product(rows, outputs, features, x.dtype),
    )
    return varying_like(kernel(x, values, extras), x, values, *extras.values())


def _compute(
    share: Share,
    epilogue: Epilogue,
    x: Any,
    values: Any,
    extras: Mapping[str, Any],
    out: Any,
    arriving: Any,
    own: Any,
) -> None:
    width = values.shape[0]
    threads = Values(rows=share.rows, warps=share.warps, columns=COLUMNS, pitch=PITCH, sum_rows=share.tokens)
    scale = threads.of_columns(extras["scales"].at[own]) * (1 / unit(share.dtype))
    bias = threads.of_columns(extras["bias"].at[own]) if "bias" in extras else None
    residuals = [
        threads.load(extras["residual"].at[:, own], turn, width) if "residual" in extras else None
        for turn in threads.turns
    ]
    keep_order()
    store_partial_sums(share, x, values.at[own], arriving)
    for turn, residual in zip(threads.turns, residuals, strict=True):
        product = threads.sums(arriving, turn) * scale
        (value,) = epilogue.apply([product], scale=None, bias=bias, residual=residual, dtype=out.dtype)
        threads.store(value, out.at[:, own], turn, width)


def _interpreted(
    epilogue: Epilogue, x: Any, values: Any, extras: Mapping[str, Any], out: Any, arriving: Any, own: Any
) -> None:
    """Computes the block without inline PTX, which the interpreter does not support."""
    del arriving

    @pl.when(lax.axis_index("warpgroup") == 0)
    def _():
        weights = unpack(values[own, :]).astype(jnp.float32)
        product = jnp.dot(x[...].astype(jnp.float32), weights.T, preferred_element_type=jnp.float32)
        vectors = {key: extras[key][own].astype(jnp.float32)[None] for key in ("scales", "bias") if key in extras}
        (value,) = epilogue.apply(
            [product * vectors["scales"]],
            scale=None,
            bias=vectors.get("bias"),
            residual=extras["residual"][:, own].astype(jnp.float32) if "residual" in extras else None,
            dtype=out.dtype,
        )
        out[:, own] = value.astype(out.dtype)
