"""The product of at most 16 rows with int8 weights in the lanes' order, which go from device memory to registers.

The warps of a block take pieces of the depth in turn, and ask for as many weights as registers hold before they look at
the first. No barrier is waited for until the sums of the parts meet in shared memory.
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

from pallas_kernels.primitives import settings
from pallas_kernels.primitives.gemm.epilogue import Epilogue
from pallas_kernels.primitives.integer_gemm.direct_products import (
    PIECE,
    PITCH,
    TILE,
    TOKENS,
    Share,
    leave_partial_sums,
)
from pallas_kernels.primitives.integer_gemm.direct_sums import (
    gathered,
    keep_order,
    load_rows,
    load_vector,
    store_rows,
)
from pallas_kernels.primitives.integer_gemm.lanes import from_lanes, unit
from pallas_kernels.primitives.platform import is_interpreted, varying_like
from pallas_kernels.primitives.stated import product

MOST_ROWS = 2 * TOKENS
COLUMNS = TILE
"""Of the result, that a block computes."""


@dataclass(frozen=True, kw_only=True)
class DirectConfig:
    """How a product is cut up. warpgroups: of a block, 1, 2 or 4."""

    warpgroups: int = 2

    def fits(self, rows: int, outputs: int, features: int) -> bool:
        """Whether a product can be cut up so."""
        return rows <= MOST_ROWS and outputs % COLUMNS == 0 and features % (PIECE * 4 * self.warpgroups) == 0


def direct_product(
    x: jax.Array,
    values: jax.Array,
    scales: jax.Array,
    *,
    epilogue: Epilogue,
    bias: jax.Array | None = None,
    residual: jax.Array | None = None,
    out_dtype: jnp.dtype | None = None,
    config: DirectConfig | None = None,
    name: str = "direct_product",
) -> jax.Array:
    """Returns the epilogue's result, (M, N).

    Args:
        x: (M, K), M at most 16, bfloat16 or float16; K a multiple of what `config` shares.
        values: (N, K), uint8 in the order of `lanes.py`; N a multiple of 16.
        scales: (N,) float32.
        bias: (N,), bfloat16, float16 or float32.
        residual: (M, N) of out_dtype.
        config: the cut.

    Raises:
        ValueError: `config` does not fit.
    """
    (rows, features), outputs = x.shape, values.shape[0]
    config = config or DirectConfig()
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
    turns = range(0, share.rows, 32 * share.warps // COLUMNS)
    scale = load_vector(extras["scales"].at[own]) * (1 / unit(share.dtype))
    bias = load_vector(extras["bias"].at[own]) if "bias" in extras else None
    residuals = [
        load_rows(share, extras["residual"].at[:, own], width, token) if "residual" in extras else None
        for token in turns
    ]
    keep_order()
    leave_partial_sums(share, x, values.at[own], arriving)
    for token, residual in zip(turns, residuals, strict=True):
        product = gathered(share, arriving, token) * scale
        (value,) = epilogue.apply([product], scale=None, bias=bias, residual=residual, dtype=out.dtype)
        store_rows(share, value, out.at[:, own], width, token)


def _interpreted(
    epilogue: Epilogue, x: Any, values: Any, extras: Mapping[str, Any], out: Any, arriving: Any, own: Any
) -> None:
    """The same without a thread's own instructions, of which the interpreter knows none."""
    del arriving

    @pl.when(lax.axis_index("warpgroup") == 0)
    def _():
        weights = from_lanes(values[own, :]).astype(jnp.float32)
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
