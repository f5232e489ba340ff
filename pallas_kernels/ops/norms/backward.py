"""Norms backward: one pass over x and dy writes dx, and each block writes a row of partial column sums.

With v = (x - mean) * inverse and w = scale * dy (inverse = 1 / sqrt(mean((x - mean)**2) + epsilon); RMSNorm: mean = 0),
a row's gradients are

    dx = (w - mean(w) - v * mean(v * w)) * inverse (+ the cotangent of the sum)
    dscale = sum over rows of dy * v,   dbias = sum over rows of dy

(RMSNorm without the mean(w)). The forward pass saved mean and inverse. Blocks are persistent and keep their column sums
in registers; XLA adds the blocks' sums in a fixed order, so results repeat bit for bit. Where a block's rows come from
is up to a source of `row_sources`. Rows that do not fit in registers are differentiated by XLA.
"""

from __future__ import annotations

import functools
import math
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.ops.norms.config import BackwardConfig, BackwardShape
from pallas_kernels.ops.norms.norm import StaticNorm, center
from pallas_kernels.ops.norms.row_sources import STREAMS, Rows, ring_rows, ring_scratch, short_rows, short_scratch
from pallas_kernels.primitives.elementwise import COMPILER_PARAMS
from pallas_kernels.primitives.platform import target_device
from pallas_kernels.primitives.random import array_dropped, mixed_words
from pallas_kernels.primitives.rows import RowValues, map_row, short_rows_at_once, to_float32, zeros_row
from pallas_kernels.primitives.settings import named_kernel, usual_promotion

_SOURCES = {"registers": (short_rows, short_scratch), "ring": (ring_rows, ring_scratch)}

_STEPS = 3
"""The fewest steps of a block that takes several rows at once, if all multiprocessors have one."""


class NormGradients(NamedTuple):
    """Gradients of a norm. `dx` is the gradient of the dropout's input; None without dropout."""

    dtotal: jax.Array
    dx: jax.Array | None
    dscale: jax.Array | None
    dbias: jax.Array | None


def norm_backward(
    norm: StaticNorm,
    total: jax.Array,
    statistics: jax.Array,
    dy: jax.Array,
    *,
    scale: jax.Array | None = None,
    bias: jax.Array | None = None,
    dtotal: jax.Array | None = None,
    words: jax.Array | None = None,
    config: BackwardConfig | None = None,
) -> NormGradients:
    """Computes the gradients of `norm_forward`.

    total (the normalised x, or sum), dy and dtotal (the cotangent of the sum, None for zeros): (rows, features) of one
    floating dtype, features >= 128. statistics: of total, from `norm_forward`. scale, bias: (features,), or None; of
    the bias only the dtype counts. words: the dropout's key.
    """
    if config is None:
        config = BackwardShape(
            rows=total.shape[0],
            features=total.shape[1],
            itemsize=total.dtype.itemsize,
            streams=2 if dtotal is None else 3,
            gain_bytes=0 if scale is None else scale.dtype.itemsize,
            sums=(scale is not None) + (bias is not None),
            has_dropout=words is not None,
            centered=norm.centered,
        ).default()
    if config is None:
        return xla_gradients(norm, total, statistics, dy, scale=scale, bias=bias, dtotal=dtotal, words=words)
    dtypes = {name: array.dtype for name, array in (("scale", scale), ("bias", bias)) if array is not None}
    operands = {"total": total, "dy": dy, "dtotal": dtotal, "statistics": statistics, "scale": scale, "words": words}
    operands = {name: array for name, array in operands.items() if array is not None}
    blocks = _blocks(total, config, has_sums=bool(dtypes))
    outputs = _launch(norm, operands, tuple(dtypes), blocks=blocks, config=config)
    # One array for both kinds of sums, so that XLA adds up both in one launch.
    sums = {name: jnp.sum(outputs["sums"][:, i], axis=0).astype(dtypes[name]) for i, name in enumerate(dtypes)}
    return NormGradients(
        dtotal=outputs["dtotal_out"],
        dx=outputs.get("dx"),
        dscale=sums.get("scale"),
        dbias=sums.get("bias"),
    )


def _blocks(total: jax.Array, config: BackwardConfig, *, has_sums: bool) -> int:
    """Returns the number of blocks. Each writes its column sums, so blocks that take several rows at once take turns.

    At 1024 x 512 bf16 RMS norm takes 5.6 µs with its gradient in a block a multiprocessor, 6.3 in three, 7.2 in five;
    at 16384 x 512 39.3, 28.1 and 26.2. Without sums to write there are no turns, in which the last may be nearly empty.
    """
    rows, cores = total.shape[0], target_device().core_count
    if config.loads != "registers":
        return min(rows, cores * config.blocks_per_core)
    steps = -(-rows // short_rows_at_once(total.shape, total.dtype.itemsize))
    if not has_sums:
        return steps
    return min(steps, cores * config.blocks_per_core, max(cores, steps // _STEPS))


def _launch(
    norm: StaticNorm, operands: dict[str, jax.Array], sums: tuple[str, ...], *, blocks: int, config: BackwardConfig
) -> dict[str, jax.Array]:
    """Returns "dtotal_out", with dropout "dx", and if there are any "sums": of each block, (blocks, sums, features).

    operands: by name, "total", "dy" and, if it has one, the sum's cotangent "dtotal", each (rows, features);
        "statistics"; "scale" and the dropout's "words" where given.
    sums: the gradients that are summed over rows, of "scale" and "bias".
    """
    rows, features = operands["total"].shape
    # Warps see a row in lines, one for each, where the row divides evenly.
    parts = config.parts(features, operands["total"].dtype.itemsize)
    shapes = dict.fromkeys(STREAMS, (rows, *parts)) | {"scale": parts}
    operands = {name: each.reshape(shapes.get(name, each.shape)) for name, each in operands.items()}
    row = jax.ShapeDtypeStruct((rows, *parts), operands["total"].dtype)
    outputs = {"dtotal_out": row} | ({"dx": row} if "words" in operands else {})
    outputs |= {"sums": jax.ShapeDtypeStruct((blocks, len(sums), *parts), jnp.float32)} if sums else {}
    source_of, scratch_of = _SOURCES[config.loads]

    def body(refs: dict[str, Any]) -> None:
        words = mixed_words(refs["words"]) if "words" in refs else None
        source = source_of(refs, config, blocks)

        def step(i, carry):
            totals, statistics = carry
            ahead = source.read_ahead(i + 1)
            for rows in source.arrived(i, statistics):
                totals = _differentiate(norm, rows, refs, source.gain, words, totals)
            return totals, ahead

        totals = {name: zeros_row(source.segments) for name in sums}
        totals, _ = lax.fori_loop(0, source.trips, step, (totals, source.read_ahead(jnp.int32(0))))
        for i, name in enumerate(sums):
            source.store_sums(refs["sums"].at[lax.axis_index("block"), i], totals[name])

    # Sums of lines need no scratch memory, which sums over a warpgroup do.
    others = {"reduction_scratch_bytes": 512} if len(parts) > 1 else {}
    found = named_kernel(
        body,
        operands,
        outputs,
        scratch_of(operands, config),
        name=norm.kernel_name(has_residual=False, has_dropout="words" in operands) + "_gradient",
        grid={"block": blocks},
        warpgroups=config.warpgroups,
        compiler_params=replace(COMPILER_PARAMS, **others),
    )
    whole = {"sums": (blocks, len(sums), features)}
    return {name: each.reshape(whole.get(name, (rows, features))) for name, each in found.items()}


def _differentiate(
    norm: StaticNorm, rows: Rows, refs: dict[str, Any], gain: Any, words: Any, totals: dict[str, RowValues]
) -> dict[str, RowValues]:
    """Writes the gradient of rows; returns the column sums with theirs added."""
    features = math.prod(refs["total"].shape[1:])
    inverse, *means = rows.statistics

    def read():
        total, dy, *dtotal = rows.read()
        dy = to_float32(dy)
        weighted = dy if gain is None else map_row(jnp.multiply, gain(), dy)
        return center(to_float32(total), means), dy, weighted, dtotal

    centered, dy, weighted, dtotal = read()
    product, *weight = rows.sums(map_row(jnp.multiply, centered, weighted), *([weighted] if means else []))
    if rows.is_read_again:
        centered, dy, weighted, dtotal = read()
    slope = product * inverse * (1.0 / features) * inverse * inverse
    gradient = map_row(lambda v, w: w * inverse - v * slope, centered, weighted)
    if weight:
        offset = weight[0] * inverse * (1.0 / features)
        gradient = map_row(lambda g: g - offset, gradient)
    if dtotal:
        gradient = map_row(jnp.add, gradient, to_float32(dtotal[0]))
    rows.store(refs["dtotal_out"], gradient)
    if words is not None:
        rows.store(refs["dx"], norm.drop(gradient, words, rows.index, rows.columns, features))
    added, counted = dict(totals), rows.counted(dy)
    if "scale" in totals:
        added["scale"] = map_row(lambda t, d, v: t + d * (v * inverse), totals["scale"], counted, centered)
    if "bias" in totals:
        added["bias"] = map_row(jnp.add, totals["bias"], counted)
    return added


@usual_promotion()
def xla_gradients(norm: StaticNorm, total, statistics, dy, *, scale, bias, dtotal, words) -> NormGradients:
    """Computes the gradients of `norm_backward` in plain `jax.numpy`, in float32 up to the results."""
    inverse, *means = statistics[..., None]
    normed = functools.reduce(jnp.subtract, means, total.astype(jnp.float32)) * inverse
    dy = dy.astype(jnp.float32)
    weighted = dy if scale is None else dy * scale.astype(jnp.float32)
    gradient = weighted - normed * jnp.mean(weighted * normed, axis=1, keepdims=True)
    if norm.centered:
        gradient -= jnp.mean(weighted, axis=1, keepdims=True)
    gradient = gradient * inverse if dtotal is None else gradient * inverse + dtotal
    gradient = gradient.astype(total.dtype)
    wide = gradient.astype(jnp.float32)
    return NormGradients(
        dtotal=gradient,
        dx=None if words is None else array_dropped(wide, words, rate=norm.rate).astype(total.dtype),
        dscale=None if scale is None else jnp.sum(dy * normed, axis=0).astype(scale.dtype),
        dbias=None if bias is None else jnp.sum(dy, axis=0).astype(bias.dtype),
    )
