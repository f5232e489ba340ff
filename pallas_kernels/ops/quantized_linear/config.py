"""Launch configurations of the kernels, and where they are the faster implementation."""

from __future__ import annotations

from dataclasses import replace

import jax.numpy as jnp

from pallas_kernels.primitives.few_rows.choice import MOST_ROWS, SHARED, choose_few_rows
from pallas_kernels.primitives.few_rows.config import FewRowsConfig
from pallas_kernels.primitives.integer_gemm.config import IntegerGemmConfig
from pallas_kernels.primitives.integer_gemm.direct import MOST_ROWS as MOST_DIRECT_ROWS
from pallas_kernels.primitives.integer_gemm.direct import DirectConfig
from pallas_kernels.primitives.integer_gemm.lanes import is_in_lanes
from pallas_kernels.primitives.platform import target_device

Config = FewRowsConfig | DirectConfig | IntegerGemmConfig
_LINE_BITS = 512
"""Of a row of weights that come at once for products of many rows."""
MOST_PREFERRED_ROWS = 8192
FEWEST_OUTPUTS, FEWEST_FEATURES = 1024, 1024
"""Above, and below these, nothing has been measured."""
_SHORT = 1024
"""Rows up to which small tiles are needed for every multiprocessor to have one."""
_SQUARE = IntegerGemmConfig(rows=128, depth=128, in_parts=True, stages=12)
_LOW = IntegerGemmConfig(rows=104, warpgroups=3, depth=128, in_parts=True, stages=12, store_rows=32)
"""The cuts for so many rows; the second for weights in the lanes' order, where its tiles fit in fewer waves."""
_PAIRED = IntegerGemmConfig(cluster=2, last_rows=64)
"""The cut for more rows of weights in the lanes' order."""
_FEWEST_TOKENS = 8
_SMALL_BLOCKS = DirectConfig()
_LARGE_BLOCKS = DirectConfig(columns=32, warpgroups=4, tiles=2)
_FEW_FEATURES = range(2048, 8192)
_LEAST_BUSY = 0.9
"""Of the multiprocessors, that have 32 outputs each where those configurations run: 4096 outputs were measured."""


def default_config(rows: int, outputs: int, features: int, dtype: jnp.dtype, *, scale_groups: int = 1) -> Config:
    """The untuned choice for a (rows, outputs) result with sums over so many features, of weights of this dtype."""
    bits, in_lanes = jnp.iinfo(dtype).bits, is_in_lanes(dtype)
    if rows <= MOST_ROWS:
        direct = _SMALL_BLOCKS if rows == 1 else _LARGE_BLOCKS
        cores = target_device().core_count
        is_known = (
            not 1 < rows <= _FEWEST_TOKENS
            and features in _FEW_FEATURES
            and _LEAST_BUSY * cores <= outputs // 32 <= cores
        )
        if in_lanes and scale_groups == 1 and is_known and direct.fits(rows, outputs, features):
            return direct
        return choose_few_rows(rows, outputs, features, weight_bits=bits, in_lanes=in_lanes)
    if rows > _SHORT:
        return _PAIRED if in_lanes else IntegerGemmConfig(depth=_LINE_BITS // bits)
    if bits < 8:
        return IntegerGemmConfig(rows=128, depth=_LINE_BITS // bits, stages=12)

    def work(config: IntegerGemmConfig) -> int:
        tiles = -(-rows // config.rows) * -(-outputs // config.columns)
        return -(-tiles // target_device().core_count) * config.rows * config.columns

    return min((_SQUARE, _LOW), key=work) if in_lanes else _SQUARE


def candidates(rows: int, dtype: jnp.dtype) -> dict[str, Config]:
    """The configurations worth measuring, by name."""
    bits = jnp.iinfo(dtype).bits
    found: dict[str, Config] = {}
    if rows > MOST_ROWS:
        shallow, deep = {8: (64, 128), 4: (128, 256)}[bits]
        cuts = (
            (128, shallow, False),
            (128, deep, False),
            (128, deep, True),
            (256, shallow, False),
            (256, shallow, True),
        )
        for m, depth, in_parts in cuts:
            name = f"{m} rows, {depth} deep{', in parts' if in_parts else ''}"
            found[name] = IntegerGemmConfig(rows=m, depth=depth, in_parts=in_parts, stages=12)
        if bits == 8:
            found["104 rows, 192 columns, 128 deep, in parts"] = _LOW
            found["128 rows, 128 deep, in parts, 64 at last"] = replace(_SQUARE, last_rows=64)
            found["256 rows, 64 deep, pairs of blocks, 64 at last"] = _PAIRED
        return found
    line = {8: 128, 4: 256}[bits]
    cuts = (
        *((64, line, 1, 4), (128, line, 1, 4)),
        *((64, 256, 2, 2), (64, 256, 2, 3), (64, 256, 1, 4)),
    )
    for columns, depth, splits, warpgroups in cuts:
        name = f"{columns} columns, {depth} deep, depth shared by {splits}, {warpgroups} warpgroups"
        found[name] = FewRowsConfig(
            columns=columns, depth=depth, splits=splits, warpgroups=warpgroups, stages=64, in_parts=is_in_lanes(dtype)
        )
    if is_in_lanes(dtype) and rows <= MOST_DIRECT_ROWS:
        found["16 columns by registers"], found["32 columns by registers"] = _SMALL_BLOCKS, _LARGE_BLOCKS
    if is_in_lanes(dtype):
        found["64 columns, 256 deep, depth shared by 2, 4 stages, direct"] = SHARED
        found["64 columns, 256 deep, 4 warpgroups, direct"] = replace(SHARED, splits=1, warpgroups=4, stages=2)
    return found


def is_preferred(rows: int, outputs: int, features: int) -> bool:
    """Whether a kernel runs where the caller leaves the choice: where it was measured to be faster.

    On an H200 with eight bits, times as fast as XLA's product of 16-bit weights: 1.00 at 8192 rows of 4096 features and
    outputs, 1.00 at 512, 1.5 to 1.8 at 16. XLA's own product of integers widens the weights in a pass of its own.
    """
    return rows <= MOST_PREFERRED_ROWS and outputs >= FEWEST_OUTPUTS and features >= FEWEST_FEATURES
