"""RMSNorm forward on Mosaic GPU: one warpgroup a row, 16-byte accesses straight to registers.

The simple form is the fast one: with a row a block, enough blocks share a multiprocessor to hide the memory's latency
(97 to 99 % of the copy ceiling on an H200; TMA pipelines and persistent blocks reached 90 to 97 %).
"""

from __future__ import annotations

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.ops.rms_norm.config import ForwardConfig, default_forward
from pallas_kernels.primitives.platform import varying_like
from pallas_kernels.primitives.rows import (
    load_row,
    map_row,
    row_sum,
    split_row,
    store_row,
    to_float32,
    zeros_row,
)

# No automatic barriers: each thread only ever reads back what it wrote itself, in the same layout.
COMPILER_PARAMS = plgpu.CompilerParams(unsafe_no_auto_barriers=True, approx_math=True)


def rms_norm_forward(
    x: jax.Array,
    scale: jax.Array,
    residual: jax.Array | None,
    *,
    epsilon: float,
    config: ForwardConfig | None = None,
) -> tuple[jax.Array, jax.Array | None]:
    """Returns (y, x + residual), or (y, None) without a residual.

    x and residual: (rows, features) of one floating dtype, features >= 128. scale: (features,).
    """
    config = config or default_forward(x.shape[1], x.dtype.itemsize)
    make_body = _whole_row_body if x.shape[1] <= config.register_columns else _chunked_row_body
    body = make_body(x, epsilon, config)

    def rms_norm(x_ref, scale_ref, y_ref):
        body(lax.axis_index("row"), x_ref, scale_ref, None, y_ref, None)

    def rms_norm_residual(x_ref, scale_ref, residual_ref, y_ref, total_ref):
        body(lax.axis_index("row"), x_ref, scale_ref, residual_ref, y_ref, total_ref)

    operands = (x, scale) if residual is None else (x, scale, residual)
    out_type = jax.ShapeDtypeStruct(x.shape, x.dtype)
    outputs = plgpu.kernel(
        rms_norm if residual is None else rms_norm_residual,
        out_type=(out_type,) if residual is None else (out_type, out_type),
        grid=(x.shape[0],),
        grid_names=("row",),
        compiler_params=COMPILER_PARAMS,
    )(*operands)
    outputs = tuple(varying_like(output, *operands) for output in outputs)
    return outputs[0], (None if residual is None else outputs[1])


def _add_residual(x_ref, residual_ref, total_ref, segments):
    """One row of x (+ residual, rounded as it is stored), in float32."""
    value = to_float32(load_row(x_ref, segments))
    if residual_ref is None:
        return value
    total = map_row(lambda a, b: (a + b).astype(total_ref.dtype), value, to_float32(load_row(residual_ref, segments)))
    store_row(total_ref, total, segments)
    return to_float32(total)


def _whole_row_body(x, epsilon, config):
    del config
    features = x.shape[1]
    segments = split_row(features, x.dtype.itemsize)

    def body(row, x_ref, scale_ref, residual_ref, y_ref, total_ref):
        residual_row, total_row = (None, None) if residual_ref is None else (residual_ref.at[row], total_ref.at[row])
        value = _add_residual(x_ref.at[row], residual_row, total_row, segments)
        mean_square = row_sum(map_row(jnp.square, value), segments) * (1.0 / features)
        inverse = lax.rsqrt(mean_square + epsilon)
        gain = to_float32(load_row(scale_ref, segments))
        store_row(y_ref.at[row], map_row(lambda v, g: v * inverse * g, value, gain), segments)

    return body


def _chunked_row_body(x, epsilon, config):
    features, chunk = x.shape[1], config.chunk
    trips = features // chunk
    segments = split_row(chunk, x.dtype.itemsize, stride=features)
    rest = split_row(features - trips * chunk, x.dtype.itemsize, offset=trips * chunk, stride=features)

    def body(row, x_ref, scale_ref, residual_ref, y_ref, total_ref):
        def part(ref, columns):
            return None if ref is None else ref.at[row, columns]

        def add(columns, segments):
            value = _add_residual(part(x_ref, columns), part(residual_ref, columns), part(total_ref, columns), segments)
            return map_row(jnp.square, value)

        def accumulate(i, squares):
            return map_row(jnp.add, squares, add(pl.ds(i * chunk, chunk), segments))

        squares = lax.fori_loop(0, trips, accumulate, zeros_row(segments))
        total = row_sum(squares, segments)
        whole = pl.ds(0, features)
        if rest:
            total += row_sum(add(whole, rest), rest)
        inverse = lax.rsqrt(total * (1.0 / features) + epsilon)
        sum_ref = x_ref if residual_ref is None else total_ref

        def scale_part(columns, segments):
            value = to_float32(load_row(part(sum_ref, columns), segments))
            gain = to_float32(load_row(scale_ref.at[columns], segments))
            store_row(part(y_ref, columns), map_row(lambda v, g: v * inverse * g, value, gain), segments)

        @pl.loop(0, trips)
        def _(i):
            scale_part(pl.ds(i * chunk, chunk), segments)

        if rest:
            scale_part(whole, rest)

    return body
